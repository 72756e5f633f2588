"""Compiled calls in real processes: the whole model's words and gradients, and no step anew."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import autotp
from tests.models import build
from tests.spmd.pool import Pool
from tests.toys import MLP

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
IDS = torch.arange(3, 17).reshape(2, 7)


def whole() -> Any:
    return build("gpt2", n_layer=1)[0]


def words(model: Any, *rounds: Callable[[], None]) -> list[list[int]]:
    """What follows IDS, greedily: one word, then six after each of `rounds` is called."""
    found: list[Tensor] = []
    with torch.no_grad():
        call = model(input_ids=IDS, use_cache=True)
        for begin in rounds:
            begin()
            for _ in range(6):
                found.append(call.logits[:, -1:].argmax(-1))
                call = model(input_ids=found[-1], cache=call["cache"], use_cache=True)
    return torch.cat(found, 1).tolist()


def decoded(rank: int, world: int) -> tuple[list[list[int]], list[int]]:
    """Words of which all but the first come from compiled calls, and how often was compiled."""
    given = {"input_ids": IDS, "use_cache": True}
    sharded = autotp.parallelize(whole(), example_inputs=given)
    backend, counts = CompileCounterWithBackend("eager"), []

    def compile_it() -> None:
        sharded.compile(fullgraph=True, backend=backend)

    def count() -> None:
        counts.append(backend.frame_count)

    made = words(sharded, compile_it, count)
    return made, [*counts, backend.frame_count]


def test_compiled_calls_with_a_cache_give_the_words_of_the_whole_model(pool: Pools) -> None:
    expected = words(whole(), lambda: None, lambda: None)
    for made, counts in pool(2).run(decoded):
        assert expected == made
        assert 1 <= counts[0] == counts[1] <= 2


def begun() -> tuple[Any, Any]:
    """A cache of seven words that the whole model made, and what it says after another."""
    model = whole()
    with torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True)["cache"]
        logits = model(input_ids=IDS[:, :1], cache=copy.deepcopy(cache), use_cache=True).logits
    return cache, logits


def gone_on(rank: int, world: int) -> tuple[Tensor, list[int]]:
    sharded: Any = autotp.parallelize(whole(), example_inputs={"input_ids": IDS})
    sharded.compile(fullgraph=True, backend="eager")
    cache, _ = begun()
    with torch.no_grad():
        logits = sharded(input_ids=IDS[:, :1], cache=cache, use_cache=True).logits
    return logits, list(cache.layers[0].keys.shape)


def test_a_whole_cache_is_cut_before_a_compiled_call(pool: Pools) -> None:
    cache, expected = begun()
    batch, heads, length, size = cache.layers[0].keys.shape
    for logits, shape in pool(2).run(gone_on):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert [batch, heads // 2, length + 1, size] == shape


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).train()


def trained(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """The gradients of an input and of a whole weight after a compiled step."""
    x = torch.arange(48.0).reshape(2, 3, 8).sin().requires_grad_()
    sharded = autotp.parallelize(block(), example_inputs={"input": x})
    sharded.compile(fullgraph=True, backend="aot_eager")
    sharded(x).square().sum().backward()
    weight = sharded.get_parameter("0.weight")
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


def test_a_compiled_training_step_gives_the_gradients_of_the_whole_model(pool: Pools) -> None:
    model, x = block(), torch.arange(48.0).reshape(2, 3, 8).sin().requires_grad_()
    model(x).square().sum().backward()
    for of_input, of_weight in pool(2).run(trained):
        torch.testing.assert_close(x.grad, of_input)
        torch.testing.assert_close(model.get_parameter("0.weight").grad, of_weight)


class Two(MLP):
    """A pair, and a mask that may be left out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 16, torch.relu)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.body(x)
        return y if mask is None else y * mask[..., [0, -1]].sum(-1, keepdim=True)


def errors_of_variants(rank: int, world: int) -> list[float]:
    """How far a compiled shard is off in a variant that was not captured before."""
    model, x = Two(), torch.randn(2, 5, 8)
    sharded = autotp.parallelize(model, world, example_inputs={"x": x}, training=False)
    run = torch.compile(sharded, backend="eager")
    calls = ({"x": x}, {"x": x, "mask": torch.rand(2, 5, 4)})
    return [(model(**call) - run(**call)).abs().max().item() for call in calls]


def test_a_compiled_model_meets_a_new_variant(pool: Pools) -> None:
    for errors in pool(2).run(errors_of_variants):
        assert all(error < 1e-5 for error in errors), errors
