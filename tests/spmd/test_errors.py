"""Ranks that disagree, or do not fit their group: all say the same, and nobody waits for ever."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import autotp
from autotp.errors import AutotpError, PlanError
from tests.models import build
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]

SECONDS = 150.0  # below the five minutes after which a group gives up on a lost rank


def message(**options: Any) -> str:
    """The message of the PlanError that this rank met."""
    model, inputs = build("hand", layers=1)
    try:
        autotp.parallelize(model, example_inputs=inputs, **options)
    except PlanError as error:
        return str(error)
    return ""


def of_another_size(rank: int, world: int) -> str:
    return message(tp=world + 1)


def overriding(rank: int, world: int, layouts: list[str]) -> str:
    return message(overrides={"*.up.weight": layouts[rank]})


def buggy(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("a bug")


def with_a_bug(rank: int, world: int) -> str:
    model, inputs = build("hand", layers=1)
    if rank == 1:
        model.named_parameters = buggy
    with pytest.raises((RuntimeError, AutotpError)) as caught:
        autotp.parallelize(model, example_inputs=inputs)
    return f"{caught.type.__name__}: {caught.value}"


def test_tp_must_be_the_size_of_the_group(pool: Pools) -> None:
    for found in pool(2).run(of_another_size, timeout=SECONDS):
        assert "tp is 3, but the group has 2 members" in found
        assert "torchrun --nproc-per-node 3" in found


def test_ranks_with_different_plans_all_say_the_same(pool: Pools) -> None:
    layouts = ["column", "replicated", "column"]
    first, *others = pool(3).run(overriding, layouts, timeout=SECONDS)

    assert [first, first] == others
    assert "the plan is not the same on all 3 ranks" in first
    assert "but ranks [1] have " in first
    assert "the same model, options and library versions, or one plan with plan=" in first


def test_a_rank_that_cannot_plan_is_not_waited_for(pool: Pools) -> None:
    layouts = ["column", "column", "expert"]
    first, *others = pool(3).run(overriding, layouts, timeout=SECONDS)

    assert [first, first] == others
    assert "requests layout 'expert'" in first


def test_a_fault_that_all_ranks_share_is_told_as_itself(pool: Pools) -> None:
    for found in pool(3).run(overriding, ["expert"] * 3, timeout=SECONDS):
        assert "requests layout 'expert'" in found


def test_a_bug_on_one_rank_is_told_to_all(pool: Pools) -> None:
    other, own = pool(2).run(with_a_bug, timeout=SECONDS)

    assert own == "RuntimeError: a bug"
    assert other.startswith(
        "GroupError: rank 1 failed: RuntimeError: a bug. Look at the output of "
    )


def resized(rank: int, world: int) -> str:
    """What asking a sharded model for another vocabulary says."""
    model, inputs = build("gpt2", n_layer=1)
    sharded = autotp.parallelize(model, world, example_inputs=inputs)
    with pytest.raises(PlanError) as caught:
        sharded.resize_token_embeddings(1024)
    return str(caught.value)


def test_tables_of_shards_are_not_resized(pool: Pools) -> None:
    for rank, message in enumerate(pool(2).run(resized)):
        assert message.startswith(f"GPT2LMHeadModel: rank {rank} of 2 has shards, which ")
