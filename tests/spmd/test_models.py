"""Tiny models in real processes equal the whole ones: outputs, gradients, collectives, bytes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.records.plan import Plan
from tests.models import ONE_LAYER, build
from tests.sharding import check_sharding
from tests.spmd.beside import (
    DIVISIBLE_BY_3,
    TOLERANCE,
    Call,
    Ran,
    differences,
    inputs_of,
    joined_over,
    loss_of,
    predicted,
    run,
    sharded_runs,
    wrong_gradients,
)
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]

# the first prices the plan; the others are unlike it and unlike what was traced
CALLS = (Call(2, 12), Call(1, 7, seed=1), Call(3, 20, padded=True, seed=2))


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


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("llama", 2), ("llama", 3), ("llama", 4), ("gpt_neox", 3), ("bloom", 4), ("bert", 3),
        ("t5", 2), ("mixtral", 4),
    ],
)  # fmt: skip
def test_a_model_trains_as_the_whole_one(pool: Pools, name: str, world: int) -> None:
    """Two layers in two processes; one in more, where each process costs its share of two cores."""
    one_layer = ONE_LAYER.get(name, {"num_hidden_layers": 1})
    sizes = {2: {}, 3: one_layer | DIVISIBLE_BY_3[name], 4: one_layer}[world]
    check_sharding(compare(pool, name, world, sizes, True), world)


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
    one_layer = ONE_LAYER.get(name, {"num_hidden_layers": 1})
    plan = compare(pool, name, world, one_layer, training)

    assert plan.training == training
    assert plan.collectives


ODD = {"vocab_size": 503}
TWO_KV = {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "world", "sizes"),
    [
        ("llama", 3, ODD | {"intermediate_size": 101}),  # 8 heads in 4 groups: 2, 1, 1
        ("mixtral", 3, ODD),
        ("llama", 4, TWO_KV),  # each key-value head on two ranks
        ("phi3", 4, TWO_KV),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(
    pool: Pools, name: str, world: int, sizes: Mapping[str, Any]
) -> None:
    one_layer = ONE_LAYER.get(name, {"num_hidden_layers": 1})
    plan = compare(pool, name, world, one_layer | dict(sizes), True)

    assert plan.cost["home_bytes"] == 0
    assert all(pair.split for pair in plan.pairs)


def trained(model: nn.Module, calls: Sequence[Call]) -> dict[str, Tensor]:
    """The parameters after a step of AdamW on each call."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for call in calls:
        optimizer.zero_grad()
        loss_of(model(**inputs_of("hand", call))).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


STEPS = (Call(2, 12), Call(3, 9, seed=1), Call(1, 7, seed=2))


def double() -> nn.Module:
    """In float64: AdamW divides a gradient by its own size, which magnifies rounding."""
    model, _ = build("hand", layers=1)
    return model.double()


def trained_shards(rank: int, world: int) -> tuple[str, dict[str, Tensor]]:
    sharded = autotp.parallelize(
        double(), world, example_inputs=inputs_of("hand", STEPS[0]), training=True
    )
    return sharded.plan.to_json(), trained(sharded, STEPS)


def test_three_steps_of_adamw_end_where_the_whole_model_does(pool: Pools) -> None:
    """Joining asserts that what every rank holds whole is equal on all of them, bit for bit."""
    expected = trained(double(), STEPS)
    texts, parts = zip(*pool(2).run(trained_shards), strict=True)
    plan = Plan.from_json(texts[0])

    assert "replicated" in {record.layout for record in plan.parameters.values()}
    for name, whole in expected.items():
        joined = joined_over(plan, name, [part[name] for part in parts])
        assert differences([whole], [joined])[0] < 1e-9, name


def in_replicas(rank: int, world: int) -> tuple[int, str, Ran]:
    """Two replicas of tp 2 whose groups are world ranks 0 and 2, and 1 and 3, on their own data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model, _ = build("hand", layers=1)
    calls = [Call(2, 12), Call(2, 9, seed=mesh.get_local_rank("dp"))]
    inputs = inputs_of("hand", calls[0])
    sharded = autotp.parallelize(model, mesh=mesh, example_inputs=inputs, training=True)
    return (
        sharded.rank,
        sharded.plan.to_json(),
        run(sharded, inputs_of("hand", calls[1]), backward=True),
    )


def test_two_replicas_of_tp_2_keep_to_themselves(pool: Pools) -> None:
    whole, _ = build("hand", layers=1)
    ranks, texts, runs = zip(*pool(4).run(in_replicas), strict=True)
    plan = Plan.from_json(texts[0])

    assert (0, 0, 1, 1) == ranks
    for replica in (0, 1):
        expected = run(whole, inputs_of("hand", Call(2, 9, seed=replica)), backward=True)
        group = [runs[replica], runs[2 + replica]]
        for found in group:
            assert predicted(plan) == found.counts()
            assert differences(expected.outputs, found.outputs)[0] <= TOLERANCE
        gradients = [found.gradients for found in group]
        assert {} == wrong_gradients(plan, expected.gradients, gradients, TOLERANCE)
