"""Grouped rows in real processes: every conversion by its definition, and a model trained so."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from autotp.algebra.placement import CONVERSIONS, Kind
from autotp.algebra.split import block
from autotp.runtime.group.process_group import resolve_group
from autotp.runtime.ops.grouped_rows import move_rows_back, move_rows_first
from autotp.verification.simulate.collectives import run_jointly
from tests.planner.test_experts import Sorted, drawn, tokens
from tests.spmd.beside import differences, joined_over
from tests.spmd.placed import part, whole
from tests.spmd.pool import Pool
from tests.spmd.tally import Tally

Pools = Callable[[int], Pool]

SHAPE, DIM = (3, 10), 1
BOUNDS = {
    "some": torch.tensor([2, 2, 5, 9], dtype=torch.int32),
    "all in the last group": torch.tensor([0, 0, 0, 10], dtype=torch.int32),
    "none": torch.tensor([0, 0, 0, 0], dtype=torch.int32),
}
"""The first two rows are of group 0, none of group 1; the tenth row is of none."""
GROUPED = [change for change in CONVERSIONS if "G" in change]
DUAL = {"R": "R", "R~": "P", "P": "R", "G": "G"}


def placed(x: Tensor, kind: str, bounds: Tensor, rank: int, world: int) -> Tensor:
    """What a rank holds of `x`; the rows after its own are NaN: they mean nothing."""
    if kind != "G":
        return part(x, kind, 0, block(SHAPE[0]), rank, world)
    own = move_rows_first(torch.ones_like(x), bounds, DIM, rank, world) == 1
    return move_rows_first(x, bounds, DIM, rank, world).masked_fill(~own, torch.nan)


def is_placed(x: Tensor, parts: list[Tensor], kind: str, bounds: Tensor) -> bool:
    if kind == "G":
        parts = [move_rows_back(p, bounds, DIM, r, len(parts)) for r, p in enumerate(parts)]
    totals = [sum(parts[1:], parts[0])] if kind in ("P", "G") else parts
    return all(torch.equal(x, found) for found in totals)


@dataclass(frozen=True)
class Outcome:
    value: Tensor
    gradient: Tensor
    ran: tuple[list[str], list[str]]


def convert(rank: int, world: int, change: tuple[Kind, Kind], bounds: Tensor) -> Outcome:
    source, target = change
    op = getattr(torch.ops.autotp, CONVERSIONS[change].op)
    x = placed(whole(SHAPE, 1), source, bounds, rank, world).requires_grad_()
    dy = placed(whole(SHAPE, 2), DUAL[target], bounds, rank, world)
    with Tally() as forward:
        y = op(x, bounds, DIM, resolve_group(world).name)
    with Tally() as backward:
        (dx,) = torch.autograd.grad(y, x, dy)
    ran = list(forward.kinds.elements()), list(backward.kinds.elements())
    return Outcome(y.detach(), dx, ran)


def expected(change: tuple[Kind, Kind]) -> tuple[list[str], list[str]]:
    one = CONVERSIONS[change]
    forward, backward = (
        [p.collective] if p.collective else [] for p in (one.forward, one.backward)
    )
    return forward, backward


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("change", GROUPED, ids=" to ".join)
def test_rows_go_to_their_ranks_and_back(
    pool: Pools, change: tuple[Kind, Kind], bounds: str
) -> None:
    source, target = change
    for world in (2, 3):
        found = pool(world).run(convert, change, BOUNDS[bounds])

        assert is_placed(whole(SHAPE, 1), [o.value for o in found], target, BOUNDS[bounds])
        gradients = [o.gradient for o in found]
        assert is_placed(whole(SHAPE, 2), gradients, DUAL[source], BOUNDS[bounds])
        assert [expected(change)] * world == [o.ran for o in found]


@pytest.mark.parametrize("change", GROUPED, ids=" to ".join)
def test_the_simulated_conversion_does_what_processes_do(change: tuple[Kind, Kind]) -> None:
    source, target = change
    bounds = BOUNDS["some"]
    parts = [placed(whole(SHAPE, 1), source, bounds, rank, 3) for rank in range(3)]
    given = [{"x": x, "bounds": bounds, "dim": DIM, "group": "tp"} for x in parts]
    found = run_jointly(f"autotp::{CONVERSIONS[change].op}", given, Counter())

    assert is_placed(whole(SHAPE, 1), found, target, bounds)


STEPS = 3


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x=tokens()["x"].double()) ** 2).mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained_shards(rank: int, world: int) -> tuple[str, dict[str, Tensor]]:
    options: dict[str, Any] = {"overrides": {"up": "expert", "down": "expert"}, "training": True}
    inputs = {"x": tokens()["x"].double()}
    sharded = autotp.parallelize(
        drawn(Sorted(4, dead=(1,))).double(), world, example_inputs=inputs, **options
    )
    return sharded.plan.to_json(), trained(sharded)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_experts_train_in_processes_as_the_whole_model_does(pool: Pools, world: int) -> None:
    """What is whole on every rank, the router too, is asserted to be equal on all of them."""
    texts, parts = zip(*pool(world).run(trained_shards), strict=True)
    plan = autotp.Plan.from_json(texts[0])

    assert {"expert", "replicated"} == {record.layout for record in plan.parameters.values()}
    for name, expected in trained(drawn(Sorted(4, dead=(1,))).double()).items():
        joined = joined_over(plan, name, [own[name] for own in parts])
        assert differences([expected], [joined])[0] < 1e-9, name
