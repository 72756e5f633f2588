"""Any tp: sizes that the ranks do not divide, fewer key-value heads than ranks, fused layouts.

The inputs are faults that users of other tools reported, each here as one of its kind.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import PlanError
from autotp.records.plan import Pair, Plan
from tests import zoo
from tests.models import build
from tests.proven import proven

ONE = {"num_hidden_layers": 1}


def pair_of(plan: Plan, role: str) -> Pair:
    return next(pair for pair in plan.pairs if pair.role == role)


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
    heads = sizes.get("num_attention_heads", 8)
    model, inputs = build(name, **ONE | {"hidden_size": 8 * heads} | sizes)
    plan = proven(model, inputs, tp)
    pair = pair_of(plan, "attention")
    backward = [c for c in plan.collectives if c.phase == "backward" and "layers.0" in c.where]

    assert pair.split
    assert local == pair.local_sizes
    assert 2 == len(backward)  # nothing more than with enough key-value heads


def test_copies_of_key_value_heads_are_summed_among_those_that_hold_them() -> None:
    model, inputs = build("llama", **ONE, num_key_value_heads=2)
    plan = autotp.plan(model, 4, example_inputs=inputs, training=True)
    shards = plan.parameters["model.layers.0.self_attn.k_proj.weight"].shards
    bucket = [c for c in plan.collectives if c.group != "tp"]

    assert [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)] == [s.ranges for s in shards]
    assert ["tp/2:1"] == [c.group for c in bucket]
    assert 2 * 8 * 64 * 4 == bucket[0].payload_bytes  # k and v of one head, in float32


@pytest.mark.parametrize("tp", [2, 3])
def test_odd_head_counts_are_cut(tp: int) -> None:
    model, inputs = build("gpt2", n_layer=1, n_head=5, n_embd=40)

    assert sorted(pair_of(proven(model, inputs, tp), "attention").local_sizes) in (
        [2, 3],
        [1, 2, 2],
    )


def test_too_few_heads_stay_whole_alone_and_the_plan_says_which_tp_would_do() -> None:
    sizes = ONE | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    model, inputs = build("llama", **sizes)
    plan = proven(model, inputs, 8)
    attention = pair_of(plan, "attention")
    reason = plan.parameters["model.layers.0.self_attn.q_proj.weight"].reason

    assert not attention.split
    assert pair_of(plan, "mlp").split
    assert "heads (5): too few for tp 8; tp sizes that split it: 2 to 5" == attention.note == reason


def test_heads_that_a_factored_group_would_share_are_not_called_too_few() -> None:
    model, inputs = build("llama", **ONE | {"num_key_value_heads": 2})
    plan = autotp.plan(model, 4, example_inputs=inputs, shard_threshold=1.0)
    record = plan.parameters["model.layers.0.self_attn.k_proj.weight"]

    assert record.reason.startswith(f"its {record.bytes} bytes are below the threshold")


def test_an_override_that_forces_such_a_split_is_told_the_legal_sizes() -> None:
    sizes = ONE | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}
    model, inputs = build("llama", **sizes)
    with pytest.raises(PlanError) as caught:
        autotp.plan(model, 6, example_inputs=inputs, overrides={"*.o_proj": "row"})

    assert "over 6 ranks: its axis heads (5) or one of 8 has no parts for 6 ranks" in str(
        caught.value
    )
    assert "tp sizes that split it: 2, 3, 4, 5, 8. Possible for it are" in str(caught.value)


def test_an_odd_vocabulary_is_cut_over_any_tp() -> None:
    model, inputs = build("gpt2", n_layer=1, vocab_size=2 * 251)

    assert 0 == proven(model, inputs, 3).cost["home_bytes"]


@pytest.mark.parametrize("tp", [3, 8])
def test_a_fused_weight_in_four_blocks(tp: int) -> None:
    model, inputs = zoo.build("codegen", "causal-lm")

    assert 0.01 > proven(model, inputs, tp).replicated_fraction


def grouped(x: Tensor) -> list[Tensor]:
    """[q q k v] for each of 2 key-value heads."""
    parts = x.unflatten(-1, (2, 4, 8))
    return [parts[..., :2, :].flatten(-3, -2), parts[..., 2, :], parts[..., 3, :]]


def blocks(x: Tensor) -> list[Tensor]:
    """[q | k | v]."""
    return [p.unflatten(-1, (-1, 8)) for p in x.split([32, 16, 16], -1)]


def backwards(x: Tensor) -> list[Tensor]:
    """[v | k | q]."""
    return [p.unflatten(-1, (-1, 8)) for p in reversed(x.split([16, 16, 32], -1))]


def multi_query(x: Tensor) -> list[Tensor]:
    """[q | k | v] with 6 query heads and one key and value head."""
    return [p.unflatten(-1, (-1, 8)) for p in x.split([48, 8, 8], -1)]


class Fused(nn.Module):
    """Attention whose queries, keys and values are one product, in the layout given."""

    def __init__(self, layout: Callable[[Tensor], list[Tensor]], heads: int) -> None:
        super().__init__()
        self.layout, self.heads = layout, heads
        self.fused, self.out = nn.Linear(32, 64), nn.Linear(8 * heads, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.layout(self.fused(x)))
        k, v = (t.repeat_interleave(self.heads // t.shape[1], 1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(
    ("layout", "heads", "tp", "whole"),
    [
        (grouped, 4, 2, 0),
        (blocks, 4, 2, 0),
        (blocks, 4, 4, 0),
        (backwards, 4, 2, 0),
        (backwards, 4, 4, 0),
        (multi_query, 6, 2, 16),
        (multi_query, 6, 3, 16),
        (multi_query, 6, 4, 16),
    ],
)
def test_fused_layouts_are_told_by_dataflow(
    layout: Callable[[Tensor], list[Tensor]], heads: int, tp: int, whole: int
) -> None:
    """`whole`: the rows of the fused weight that every rank holds."""
    torch.manual_seed(0)
    plan = proven(Fused(layout, heads), {"x": torch.randn(2, 5, 32)}, tp)
    record = plan.parameters["fused.weight"]
    held = [set(range(64)) - {r for a, b in s.ranges for r in range(a, b)} for s in record.shards]

    assert "column" == record.layout
    assert whole == 64 - len(set().union(*held))
    assert ["all_reduce"] == [c.kind for c in plan.collectives if c.phase == "forward"]


class Parallel(nn.Module):
    """Attention and MLP in one projection, and in one output projection of both."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 3 * 32 + 96), nn.Linear(32 + 96, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, up = self.into(x).split([32, 32, 32, 96], -1)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return x + self.out(torch.cat([mixed, functional.gelu(up)], -1))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_attention_and_mlp_in_one_projection_are_both_cut(tp: int) -> None:
    torch.manual_seed(0)
    plan = proven(Parallel(), {"x": torch.randn(2, 5, 32)}, tp)

    assert ["column", "row"] == [plan.parameters[f"{n}.weight"].layout for n in ("into", "out")]
    assert 0.01 > plan.replicated_fraction
    assert 1 == sum(c.phase == "forward" for c in plan.collectives)
