"""Tiny models in real processes equal the whole ones: outputs, every gradient, collectives, bytes."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotp.core.plan import Plan
from tests.models import build
from tests.spmd.beside import (
    DIVISIBLE_BY_3,
    TOLERANCE,
    Call,
    differences,
    inputs_of,
    predicted,
    run,
    sharded_runs,
    wrong_gradients,
)
from tests.spmd.pool import Pool

Pools = Callable[[int], Pool]

# the first prices the plan; the others are unlike it and unlike what was traced
CALLS = (Call(2, 12), Call(1, 7, seed=1), Call(3, 20, padded=True, seed=2))
ONE_LAYER = {"t5": {"num_layers": 1, "num_decoder_layers": 1}}
EVERYWHERE = tuple(DIVISIBLE_BY_3)


def compare(pool: Pools, name: str, world: int, sizes: Mapping[str, Any], training: bool) -> Plan:
    """The plan, after all calls were compared with the whole model's."""
    whole, _ = build(name, **sizes)
    texts, runs = zip(*pool(world).run(sharded_runs, name, sizes, training, CALLS), strict=True)
    plan = Plan.from_json(texts[0])

    assert [texts[0]] * world == list(texts)
    for call, *ranks in zip(CALLS, *runs, strict=True):
        expected = run(whole, inputs_of(name, call), backward=training)
        for rank in ranks:
            assert all(d <= TOLERANCE for d in differences(expected.outputs, rank.outputs))
            assert predicted(plan) == rank.counts()
        gradients = [rank.gradients for rank in ranks]
        assert {} == wrong_gradients(plan, expected.gradients, gradients, TOLERANCE)
    priced = Counter((c.kind, c.phase, c.payload_bytes) for c in plan.collectives)
    assert priced == runs[0][0].payloads()
    return plan


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_model_trains_as_the_whole_one(pool: Pools, name: str, world: int) -> None:
    sizes = ONE_LAYER.get(name, {}) | (DIVISIBLE_BY_3[name] if world == 3 else {})
    plan = compare(pool, name, world, sizes, True)

    assert plan.cost["home_bytes"] == 0
    assert plan.collectives


@pytest.mark.parametrize(
    ("name", "world", "training"),
    [
        ("llama", 4, False),
        ("bert", 2, False),
        ("mixtral", 2, False),
        ("gpt2", 2, True),
        ("qwen3", 4, True),
        ("gemma2", 2, True),
        ("hand", 4, True),
        ("opt", 2, True),
        ("phi3", 2, False),
    ],
)
def test_further_models_and_inference(pool: Pools, name: str, world: int, training: bool) -> None:
    plan = compare(pool, name, world, {}, training)

    assert plan.training == training
    assert plan.collectives
