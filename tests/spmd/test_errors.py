"""Ranks that disagree, or do not fit their group: all say the same, and nobody waits for ever."""

from collections.abc import Callable
from typing import Any

import autotp
from autotp.errors import PlanError
from tests.models import build
from tests.spmd.pool import Pool

Pools = Callable[[int], Pool]

SECONDS = 150.0  # below the five minutes after which a group gives up on a lost rank


def message(**options: Any) -> tuple[str, str]:
    """The message of the PlanError that this rank met, and of what caused it."""
    model, inputs = build("hand", layers=1)
    try:
        autotp.parallelize(model, example_inputs=inputs, **options)
    except PlanError as error:
        return str(error), str(error.__context__ or "")
    return "", ""


def of_another_size(rank: int, world: int) -> tuple[str, str]:
    return message(tp=world + 1)


def overriding(rank: int, world: int, layouts: list[str]) -> tuple[str, str]:
    return message(overrides={"*.up.weight": layouts[rank]})


def test_tp_must_be_the_size_of_the_group(pool: Pools) -> None:
    for found, _ in pool(2).run(of_another_size, timeout=SECONDS):
        assert "tp is 3, but the group has 2 members" in found
        assert "torchrun --nproc-per-node 3" in found


def test_ranks_with_different_plans_all_say_the_same(pool: Pools) -> None:
    layouts = ["column", "replicated", "column"]
    (first, _), *others = pool(3).run(overriding, layouts, timeout=SECONDS)

    assert [first, first] == [found for found, _ in others]
    assert "the plan is not the same on all 3 ranks" in first
    assert "but ranks [1] hold" in first
    assert "the same model, options and library versions, or one plan with plan=" in first


def test_a_rank_that_cannot_plan_is_not_waited_for(pool: Pools) -> None:
    layouts = ["column", "column", "expert"]
    found = pool(3).run(overriding, layouts, timeout=SECONDS)

    assert len({text for text, _ in found}) == 1
    assert "but ranks [2] hold" in found[0][0]
    assert "asks for layout 'expert'" in found[2][1]


def test_a_fault_that_all_ranks_share_is_told_as_itself(pool: Pools) -> None:
    for found, _ in pool(3).run(overriding, ["expert"] * 3, timeout=SECONDS):
        assert "asks for layout 'expert'" in found
