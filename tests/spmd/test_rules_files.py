"""Ranks with files of rules: all plan alike if these are equal, otherwise every rank refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autotp
from autotp.errors import PlanError
from tests import shop
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]


def difference(rank: int, world: int, files: list[str]) -> str:
    """What `parallelize` refuses; otherwise how far its result is from the model's own."""
    model, inputs = shop.model(), shop.inputs()
    try:
        sharded = autotp.parallelize(model, world, example_inputs=inputs, rules=files[rank])
    except PlanError as error:
        return str(error)
    with torch.no_grad():
        torch.testing.assert_close(sharded(**inputs), model(**inputs))
    return sharded.sharded_state.plan.parameters["up.weight"].layout


def test_ranks_must_have_the_same_rules(pool: Pools, tmp_path: Path) -> None:
    first, other = tmp_path / "shop.toml", tmp_path / "other" / "shop.toml"
    other.parent.mkdir()
    first.write_text(shop.RULE)
    other.write_text(f"{shop.RULE}note = 'the same rule in another file'\n")
    refused = pool(2).run(difference, [str(first), str(other)])

    assert ["column", "column"] == pool(2).run(difference, [str(first), str(first)])
    assert all("the plan" in said and "ranks" in said for said in refused), refused
