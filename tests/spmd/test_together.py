"""Several sharded models in one process: other sizes of group, other heads; one model twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.errors import WeightsError
from autotp.records.plan import Plan
from tests.models import build
from tests.spmd.beside import (
    TOLERANCE,
    Call,
    Ran,
    differences,
    inputs_of,
    predicted,
    run,
    wrong_gradients,
)
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
Told = tuple[str, list[Ran]]
"""A plan, and what calls of its model gave on one rank."""

# four ranks share two key-value heads (a group in two factors) and, in pairs, five heads
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "num_key_value_heads": 2},
    "hand": {"layers": 1, "heads": 5, "hidden": 40, "ffn": 51},
}
CALLS = (Call(2, 12), Call(1, 7, seed=1))


def whole(name: str) -> nn.Module:
    return build(name, **MODELS[name])[0]


def same(name: str, told: list[Told], seeds: tuple[int, ...] = (0, 1)) -> Plan:
    """The plan of the ranks in `told`, after all calls were compared with the whole model's."""
    plan = Plan.from_json(told[0][0])
    for number, _ in enumerate(seeds):
        expected = run(whole(name), inputs_of(name, CALLS[number]), backward=True)
        ranks = [runs[number] for _, runs in told]
        for rank in ranks:
            assert all(d <= TOLERANCE for d in differences(expected.outputs, rank.outputs))
            assert predicted(plan) == rank.counts()
        gradients = [rank.gradients for rank in ranks]
        assert {} == wrong_gradients(plan, expected.gradients, gradients, TOLERANCE)
    return plan


def sharded(name: str, **where: Any) -> nn.Module:
    return autotp.parallelize(
        whole(name), example_inputs=inputs_of(name, CALLS[0]), training=True, **where
    )


def in_turns(rank: int, world: int) -> tuple[int, dict[str, Told]]:
    """Two models over groups of 4 and of 2, called in turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data"))
    both: dict[str, Any] = {
        "llama": sharded("llama", tp=world),
        "hand": sharded("hand", mesh=mesh),
    }
    runs: dict[str, list[Ran]] = {name: [] for name in both}
    for call in CALLS:
        for name, model in both.items():
            runs[name].append(run(model, inputs_of(name, call), backward=True))
    told = {name: (model.plan.to_json(), runs[name]) for name, model in both.items()}
    return both["hand"].rank, told


def test_two_models_with_groups_and_heads_of_their_own(pool: Pools) -> None:
    ranks, told = zip(*pool(4).run(in_turns), strict=True)
    large = same("llama", [rank["llama"] for rank in told])
    small = [same("hand", [told[k]["hand"], told[k + 2]["hand"]]) for k in (0, 1)]

    assert (0, 0, 1, 1) == ranks
    assert [4, 2, 2] == [large.tp, *(plan.tp for plan in small)]
    assert "tp/2:1" in {c.group for c in large.collectives}
    assert [3, 2] == sorted((next(p for p in small[0].pairs if p.role == "attention")).local_sizes)[
        ::-1
    ]


def twice(rank: int, world: int) -> tuple[list[Told], Tensor, bool]:
    """One model parallelized twice; a step of the first changes neither the second nor it."""
    model = whole("hand")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = inputs_of("hand", CALLS[0])
    first, second = (
        autotp.parallelize(model, world, example_inputs=inputs, training=True) for _ in range(2)
    )
    told = [(first.plan.to_json(), [run(first, inputs, backward=True)])]
    first(**inputs).square().sum().backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    told.append((second.plan.to_json(), [run(second, inputs, backward=True)]))
    kept = all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return told, first(**inputs).detach(), kept


def test_one_model_twice(pool: Pools) -> None:
    told, stepped, kept = zip(*pool(2).run(twice), strict=True)
    outputs = whole("hand")(**inputs_of("hand", CALLS[0]))

    for number in (0, 1):
        same("hand", [rank[number] for rank in told], (0,))
    assert all(kept)
    assert differences([outputs], [stepped[0]])[0] > 0.01


def without_values(rank: int, world: int) -> str:
    model = whole("hand").to("meta")
    with pytest.raises(WeightsError) as caught:
        autotp.parallelize(model, world, example_inputs=inputs_of("hand", CALLS[0]))
    return str(caught.value)


def test_a_model_without_values_is_told_so_on_every_rank(pool: Pools) -> None:
    for message in pool(2).run(without_values):
        assert "words.weight [512, 40] is on meta and has no values to put on cpu" in message
