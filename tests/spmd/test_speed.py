"""The benchmark runs, and both sides do the same: in numbers, and in what they send."""

from collections.abc import Callable

import pytest
import torch

from tests.benchmarks.speed import SIDES, TINY, interval, measured, told
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]


def test_both_sides_give_the_same_and_send_the_same(pool: Pools) -> None:
    sizes = {**TINY, "num_hidden_layers": 1}
    found = pool(2).run(measured, sizes, (2, 7, 3), 2, timeout=480)
    for ran in found:
        logits, words = (ran.results[task] for task in ("forward", "generate"))
        torch.testing.assert_close(*logits.values(), rtol=0, atol=1e-5)
        assert torch.equal(*words.values())
        for task, traffic in ran.traffic.items():
            assert traffic["by hand"] == traffic["autotp"], task
            assert {"all-reduce", "all-gather"} == traffic["autotp"].keys()
            assert dict.fromkeys(SIDES, 2) == {s: len(t) for s, t in ran.seconds[task].items()}
    assert "2 rounds" in told([ran.seconds["forward"] for ran in found])


def test_the_interval_is_around_the_median() -> None:
    ratios = [1 + n / 100 for n in range(31)]
    median, low, high = interval(ratios)

    assert 1.15 == median
    assert 1.05 < low < median < high < 1.25
