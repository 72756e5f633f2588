"""Any tp: sizes that the ranks do not divide, fewer key-value heads than ranks.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

import pytest

import autotp
from autotp.errors import PlanError
from autotp.records.plan import Pair, Plan
from tests.models import build
from tests.proven import family, proven

ONE = {"num_hidden_layers": 1}


def pair_of(plan: Plan, role: str) -> Pair:
    return next(pair for pair in plan.pairs if pair.role == role)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "sizes", "local"),
    [
        ("llama", 4, {"num_key_value_heads": 2}, (2, 2, 2, 2)),
        ("llama", 4, {"num_attention_heads": 20, "num_key_value_heads": 10}, (3, 3, 2, 2)),
        ("llama", 4, {"num_attention_heads": 9, "num_key_value_heads": 3}, (4, 2, 2, 1)),
        ("llama", 8, {"num_key_value_heads": 1}, (1,) * 8),
        ("qwen3", 4, {"num_key_value_heads": 2}, (2, 2, 2, 2)),
        ("phi3", 4, {"num_key_value_heads": 2}, (2, 2, 2, 2)),
    ],
)
def test_heads_are_shared_in_whole_units(
    name: str, tp: int, sizes: dict[str, int], local: tuple[int, ...]
) -> None:
    """Such heads were refused, failed in a reshape, or gave wrong numbers (C000, C005, C013)."""
    heads = sizes.get("num_attention_heads", 8)
    plan = family(name, **ONE | {"hidden_size": 8 * heads} | sizes).proven(tp)
    pair = pair_of(plan, "attention")
    backward = [c for c in plan.collectives if c.phase == "backward" and "layers.0" in c.where]

    assert pair.split
    assert local == pair.local_sizes
    assert 2 == len(backward)  # nothing more than with enough key-value heads


@pytest.mark.slow
def test_copies_of_key_value_heads_are_summed_among_those_that_hold_them() -> None:
    """Training failed where ranks share key-value heads (C001)."""
    plan = family("llama", **ONE, num_key_value_heads=2).plan(4)
    shards = plan.parameters["model.layers.0.self_attn.k_proj.weight"].shards
    bucket = [c for c in plan.collectives if c.group != "tp"]

    assert [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)] == [s.ranges for s in shards]
    assert ["tp/2:1"] == [c.group for c in bucket]
    assert 2 * 8 * 64 * 4 == bucket[0].payload_bytes  # k and v of one head, in float32


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
def test_odd_head_counts_are_cut(tp: int) -> None:
    """Such head counts crashed (C007, C009)."""
    plan = family("gpt2", n_layer=1, n_head=5, n_embd=40).proven(tp)

    assert {2: [2, 3], 3: [1, 2, 2]}[tp] == sorted(pair_of(plan, "attention").local_sizes)


@pytest.mark.slow
def test_too_few_heads_stay_whole_alone_and_the_plan_says_which_tp_would_do() -> None:
    """Too few heads failed in a reshape, or broke the whole model (C004, C061)."""
    sizes = ONE | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    model, inputs = build("llama", **sizes)
    plan = proven(model, inputs, 8)
    attention = pair_of(plan, "attention")
    reason = plan.parameters["model.layers.0.self_attn.q_proj.weight"].reason

    assert not attention.split
    assert pair_of(plan, "mlp").split
    assert "heads (5): too few for tp 8; tp sizes that split it: 2 to 5" == attention.note == reason


@pytest.mark.slow
def test_heads_that_a_factored_group_would_share_are_not_called_too_few() -> None:
    model, inputs = build("llama", **ONE | {"num_key_value_heads": 2})
    plan = autotp.plan(model, 4, example_inputs=inputs, shard_threshold=1.0)
    record = plan.parameters["model.layers.0.self_attn.k_proj.weight"]

    assert record.reason.startswith(f"its {record.bytes:,} bytes are below the shard threshold")


@pytest.mark.slow
def test_an_override_that_forces_such_a_split_is_told_the_legal_sizes() -> None:
    """The message named no legal size (C010)."""
    sizes = ONE | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    model, inputs = build("llama", **sizes)
    with pytest.raises(PlanError) as caught:
        autotp.plan(model, 6, example_inputs=inputs, overrides={"*.o_proj": "row"})

    assert "over 6 ranks: its axis heads (5) or one of 8 cannot be sharded over 6 ranks" in str(
        caught.value
    )
    assert "tp sizes that split it: 2, 3, 4, 5, 8. Its possible layouts are" in str(caught.value)
