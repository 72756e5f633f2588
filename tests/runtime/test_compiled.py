"""Compiled calls of a model on one rank: one graph each kind of call, and none a step."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import autotp
from autotp.runtime.compiled import Compiled
from autotp.runtime.model import ShardedModel
from tests.models import build

IDS = torch.arange(3, 17).reshape(2, 7)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def stepped(model: Any, count: int) -> list[list[int]]:
    """What follows IDS, greedily, a call a word."""
    given: dict[str, Any] = {"input_ids": IDS}
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(count):
            call = model(**given, use_cache=True)
            found.append(call.logits[:, -1:].argmax(-1))
            given = {"input_ids": found[-1], "cache": call["cache"]}
    return torch.cat(found, 1).tolist()


@pytest.mark.slow
def test_torch_compile_takes_the_model_with_its_cache_as_one_graph() -> None:
    model, _ = build("gpt2", n_layer=1)
    sharded = autotp.parallelize(model, tp=1, example_inputs={"input_ids": IDS, "use_cache": True})
    expected = stepped(model, 12)
    assert expected == stepped(sharded, 12)  # which captures both kinds of call

    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(sharded, fullgraph=True, backend=backend)
    assert expected[0][:3] == stepped(compiled, 3)[0]
    counted = backend.frame_count
    assert expected == stepped(compiled, 12)
    assert counted == backend.frame_count <= 3


class Tower(torch.nn.Module):
    """A model whose graph a mask of ones makes shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.first(x).unsqueeze(1).chunk(3, -1)
        at = torch.arange(x.shape[1], device=x.device)
        seen = (at[:, None] >= at) & (mask > 0)[:, None, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return self.last(attend(query, key, value, attn_mask=seen).squeeze(1))


def words(length: int, padded: int) -> dict[str, torch.Tensor]:
    """Two rows, of the first of which a mask hides the beginning."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :padded] = 0
    return {"x": torch.arange(16.0 * length).reshape(2, length, 8).sin(), "mask": mask}


@pytest.mark.slow
def test_compile_captures_what_comes_and_chooses_the_shorter_graph() -> None:
    torch.manual_seed(0)
    model, backend = Tower().eval(), CompileCounterWithBackend("eager")
    sharded = autotp.parallelize(model, tp=1, example_inputs=words(5, 0))
    sharded.compile(fullgraph=True, backend=backend)
    with torch.no_grad():
        for length, padded in [(9, 0), (9, 4), (7, 0), (7, 3), (5, 1)]:
            given = words(length, padded)
            seen = given["mask"].bool()
            torch.testing.assert_close(model(**given)[seen], sharded(**given)[seen])
    attentions = [
        node.kwargs.get("is_causal", False)
        for graph in backend.graphs
        for node in graph.graph.nodes
        if "scaled_dot_product" in str(node.target)
    ]

    assert 2 == backend.frame_count
    assert [True, False] == attentions


@pytest.mark.slow
def test_a_compiled_model_is_copied_with_its_own_parameters() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.randn(2, 8)
    sharded = autotp.parallelize(model.eval(), tp=1, example_inputs={"input": x})
    sharded.compile(backend="eager")
    twin: ShardedModel = copy.deepcopy(sharded)
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()

    assert isinstance(twin._compiled_call_impl, Compiled)
    torch.testing.assert_close(model(x), sharded(x))
    torch.testing.assert_close(model[1](model[0].bias), twin(x)[0])


@pytest.mark.slow
def test_an_encoder_s_outputs_are_free_as_well() -> None:
    """New objects and other sizes with each call of generate: nothing guards on which they are."""
    model: Any = build("t5", num_layers=1, num_decoder_layers=1)[0]
    asked = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    sharded: Any = autotp.parallelize(model, tp=1, training=False)
    backend = CompileCounterWithBackend("eager")
    sharded.compile(fullgraph=True, backend=backend)
    counted: list[int] = []
    for batch, length in [(2, 7), (3, 11), (4, 5), (2, 9)]:
        ids = torch.arange(batch * length).reshape(batch, length) % 500 + 3
        assert model.generate(ids, **asked).tolist() == sharded.generate(ids, **asked).tolist()
        counted.append(backend.frame_count)

    assert counted[1] == counted[2] == counted[3] <= 4
    assert {1} == {len(found) for found in sharded.sharded_state.variants.values()}
