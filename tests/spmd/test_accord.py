"""What must be the same on all ranks, and is not: named on every rank, with both sides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import autotp
from autotp.errors import AutotpError
from tests.models import build
from tests.spmd.pool import Pool
from tests.toys import MLP

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])


class Split(MLP):
    """A model that no rank has a whole parameter of, and one buffer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(8, 16, torch.relu, bias=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.body(x * self.scale)
        return y if mask is None else y * mask


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except AutotpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def parallel(model: nn.Module, world: int, **options: Any) -> Any:
    return autotp.parallelize(model, world, example_inputs={"x": torch.ones(2, 4, 8)}, **options)


def with_other_weights(rank: int, world: int, seeds: list[int]) -> str:
    return told(lambda: parallel(Split(seeds[rank]), world))


def with_another_buffer(rank: int, world: int) -> str:
    model = Split(0)
    model.get_buffer("scale")[rank] = 2.0
    return told(lambda: parallel(model, world))


def test_weights_of_another_seed_are_named(pool: Pools) -> None:
    """Though each rank has only parts of its own, which nothing else could tell apart."""
    first, *others = pool(3).run(with_other_weights, [1, 1, 2])

    assert [first, first] == others
    assert first.startswith(
        "WeightsError: up.weight: the unsharded weights are not the same on all 3"
    )
    assert "2 have the hash " in first
    assert "but ranks [2] have" in first
    assert "Tensors that differ: 2 of 3 (up.weight, down.weight)" in first
    assert "the same seed before the model is built" in first
    assert ["", "", ""] == pool(3).run(with_other_weights, [1, 1, 1])


def test_another_buffer_is_named(pool: Pools) -> None:
    for found in pool(2).run(with_another_buffer):
        assert found.startswith(
            "WeightsError: scale: the unsharded weights are not the same on all 2"
        )


def calls(rank: int, world: int) -> dict[str, str]:
    """What calls with unlike inputs say in debug mode; those with the same say nothing."""
    model = parallel(Split(0), world, training=False, debug=True)
    x = torch.ones(2, 4, 8)
    other = x.clone()
    other[1, 2, 3] = 1.5
    mask = torch.ones(8)
    mine = rank == 0
    return {
        "the same": told(lambda: model(x)),
        "a value": told(lambda: model(x if mine else other)),
        "a size": told(lambda: model(x if mine else x[:1])),
        "a dtype": told(lambda: model(x if mine else x.double())),
        "one less": told(lambda: model(x, mask) if mine else model(x)),
        "not a number": told(lambda: model(x * float("nan"))),
        "the same again": told(lambda: model(x, mask)),
    }


def test_unlike_inputs_are_named(pool: Pools) -> None:
    first, second = pool(2).run(calls)

    assert first == second
    assert ["", "", ""] == [first[k] for k in ("the same", "not a number", "the same again")]
    start = "GroupError: Split: the input 'x' is not the same on all 2 ranks: rank 0 has float32 "
    assert all(first[k].startswith(start) for k in ("a value", "a size", "a dtype"))
    assert "1 of 64 elements differ, the first at [1, 2, 3]: 1.0 and 1.5" in first["a value"]
    assert "float32 [2, 4, 8] #" in first["a size"]
    assert "but rank 1 float32 [1, 4, 8] #" in first["a size"]
    assert "but rank 1 float64 [2, 4, 8] #" in first["a dtype"]
    assert "the input 'mask'" in first["one less"]
    assert "but rank 1 nothing" in first["one less"]


def of_two_lengths(rank: int, world: int) -> tuple[str, str, str]:
    model: Any = build("llama", num_hidden_layers=1)[0]
    own: Any = autotp.parallelize(model, world, training=False, debug=True)
    asked = {"do_sample": False, "attention_mask": torch.ones_like(IDS)}
    fine = told(lambda: own.generate(IDS, max_new_tokens=4, **asked))
    settings = GenerationConfig(max_new_tokens=4 + rank, do_sample=False)
    longer = told(lambda: own.generate(IDS, generation_config=settings))
    cache = own(input_ids=IDS, use_cache=True).past_key_values
    if rank:
        cache.crop(-1)
    return fine, longer, told(lambda: own(input_ids=IDS[:, :1], past_key_values=cache))


def test_caches_and_words_of_other_lengths_are_named(pool: Pools) -> None:
    for fine, longer, found in pool(2).run(of_two_lengths):
        assert "" == fine
        assert "'generation_config.max_new_tokens' is not the same on all 2 ranks" in longer
        assert "rank 0 has 4, but rank 1 5" in longer
        assert found.startswith("GroupError: LlamaForCausalLM: the input 'past_key_values layers.0")
        assert "'past': 4" in found
        assert "but rank 1" in found
        assert "'past': 3" in found
