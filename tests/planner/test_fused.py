"""Weights of several projections in one: their segments are found in the graph, and each is split.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import randomize
from tests.proven import Captured, of_zoo, proven
from tests.spmd.beside import joined_over
from tests.toys import FusedAttention, vectors

HIDDEN, HEADS, SIZE = 16, 8, 4


def by_head(x: Tensor) -> list[Tensor]:
    """[q k v] of each head."""
    return list(x.unflatten(-1, (HEADS, 3, SIZE)).unbind(-2))


def in_blocks(x: Tensor) -> list[Tensor]:
    """[q | k | v]."""
    return [part.unflatten(-1, (HEADS, SIZE)) for part in x.chunk(3, -1)]


def in_four_blocks(x: Tensor) -> list[Tensor]:
    """[q | k | v] of each quarter of the heads."""
    parts = x.unflatten(-1, (4, 3, HEADS // 4 * SIZE)).unbind(-2)
    return [part.flatten(-2).unflatten(-1, (HEADS, SIZE)) for part in parts]


LAYOUTS = {"by head": by_head, "in blocks": in_blocks, "in four blocks": in_four_blocks}


class Attention(FusedAttention):
    """One attention, whatever the layout of its fused weight is; the product too, if asked."""

    def __init__(self, layout: str, *, shows: bool = False) -> None:
        super().__init__(LAYOUTS[layout], HIDDEN, 3 * HEADS * SIZE, HEADS * SIZE)
        self.shows = shows
        torch.manual_seed(0)
        base = torch.randn(3 * HEADS * SIZE, HIDDEN) * 0.3
        rows = torch.stack(self.apart(torch.arange(len(base)))).flatten()
        nn.init.normal_(self.out.weight, std=0.3)
        nn.init.normal_(self.out.bias)
        with torch.no_grad():
            self.fused.weight[rows] = base
            self.fused.bias[rows] = base[:, 0]

    def forward(self, x: Tensor) -> Any:
        fused = self.fused(x)
        y = x + self.attended(fused)
        return (y, fused) if self.shows else y


@pytest.mark.slow
def test_layouts_of_one_attention_are_each_cut_right() -> None:
    """Three layouts were treated alike, and the numbers were wrong (C014)."""
    inputs = vectors(2, 5, HIDDEN)
    attentions = [Attention(layout) for layout in LAYOUTS]
    outputs = [attention(**inputs) for attention in attentions]
    found = [Captured(attention, inputs) for attention in attentions]

    assert all(torch.allclose(outputs[0], other, atol=1e-5) for other in outputs)
    for tp in (2, 3, 8):
        proofs = [captured.proof(tp) for captured in found]
        rows = [p.plan.parameters["fused.weight"].shards[0].shape[0] for p in proofs]
        most = 3 * SIZE * -(-HEADS // tp)
        quarters = 3 * SIZE * HEADS // 4 * -(-4 // tp) if tp == 3 else most
        assert [True] * 3 == [p.evidence.ok for p in proofs]
        assert [most, most, quarters] == rows  # a quarter, of two heads, is the unit of the last
        assert 1 == len({p.plan.cost["time_ps"] for p in proofs})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_intermediate_is_gathered_in_the_order_of_the_whole(layout: str) -> None:
    """The fused product, which is cut, is an output, too (C021)."""
    plan = proven(Attention(layout, shows=True), vectors(2, 5, HIDDEN), 3)

    assert plan.parameters["fused.weight"].dim == 0
    assert "row" == plan.parameters["out.weight"].layout
    assert ["all_gather", "all_reduce"] == sorted(
        c.kind for c in plan.collectives if c.phase == "forward"
    )


class Segments(nn.Module):
    """A gate beside queries and values in one product; the two pass a convolution a channel."""

    def __init__(self) -> None:
        super().__init__()
        inner = 6 * SIZE
        self.into = nn.Linear(HIDDEN, 3 * inner)
        self.conv = nn.Conv1d(2 * inner, 2 * inner, 3, groups=2 * inner, padding=2)
        self.out = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, both = self.into(x).split([6 * SIZE, 12 * SIZE], -1)
        both = functional.silu(self.conv(both.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        q, v = (part.unflatten(-1, (6, SIZE)) for part in both.chunk(2, -1))
        states = torch.einsum("bshd,bshe->bshde", q, v).cumsum(1)
        read = torch.einsum("bshde,bshd->bshe", states, q.softmax(-1))
        return x + self.out(read.flatten(-2) * functional.silu(gate))


@pytest.fixture(scope="module")
def segments() -> Captured:
    torch.manual_seed(0)
    return Captured(Segments(), vectors(2, 5, HIDDEN))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_segments_that_are_cut_behind_a_convolution(segments: Captured, tp: int) -> None:
    """The sizes of a split did not fit the shards behind a convolution (C025)."""
    proof = segments.proof(tp)
    layouts = {name: p.layout for name, p in proof.plan.parameters.items()}

    assert proof.evidence.ok
    assert {"column", "row"} == set(layouts.values())
    assert 3 * SIZE * -(-6 // tp) == proof.plan.parameters["into.weight"].shards[0].shape[0]
    assert 1 == sum(c.phase == "forward" for c in proof.plan.collectives)


def test_segments_come_back_in_the_order_of_the_whole(segments: Captured) -> None:
    """Weights of several segments came back scrambled (C022)."""
    proof = segments.proof(4)
    whole = dict(segments.model.named_parameters())
    parts = [dict(rank.named_parameters()) for rank in proof.ranks]

    for name, tensor in whole.items():
        joined = joined_over(proof.plan, name, [p[name].detach() for p in parts])
        assert torch.equal(tensor, joined), name


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


@cache
def fused(layout: Callable[[Tensor], list[Tensor]], heads: int) -> Captured:
    torch.manual_seed(0)
    return Captured(FusedAttention(layout, 32, 64, 8 * heads), vectors(2, 5, 32))


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
    """`whole`: the rows of the fused weight that every rank holds (C015, C019)."""
    plan = fused(layout, heads).proven(tp)
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


@pytest.fixture(scope="module")
def parallel() -> Captured:
    torch.manual_seed(0)
    return Captured(Parallel(), vectors(2, 5, 32))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_attention_and_mlp_in_one_projection_are_both_cut(parallel: Captured, tp: int) -> None:
    """Such a projection needed a style of its own (C024)."""
    plan = parallel.proven(tp)

    assert ["column", "row"] == [plan.parameters[f"{n}.weight"].layout for n in ("into", "out")]
    assert 0.01 > plan.replicated_fraction
    assert 1 == sum(c.phase == "forward" for c in plan.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [3, 8])
def test_a_fused_weight_in_four_blocks(tp: int) -> None:
    """More than four ranks failed in a reshape (C012)."""
    assert 0.01 > of_zoo("codegen").proven(tp).replicated_fraction


class Indexed(nn.Module):
    """Queries, key and value of each key-value head fused, and taken apart by lists of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(32, 2 * 6 * 8), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x).view(*x.shape[:2], 2, 6, 8)
        parts = fused[:, :, :, :-2], fused[:, :, :, [-2]], fused[:, :, :, [-1]]
        shape = parts[0].shape
        q, k, v = (p.expand(shape).flatten(2, 3).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def indexed() -> Captured:
    model = Indexed()
    randomize(model, 0)
    return Captured(model, vectors(2, 6, 32))


@pytest.mark.parametrize("tp", [2, 4])
def test_segments_taken_by_a_list_of_numbers_are_segments(indexed: Captured, tp: int) -> None:
    plan = indexed.proven(tp)

    assert ["kv_heads*(heads_per_kv + 1 + 1)*8"] == [p.expression for p in plan.pairs]
    assert 0.05 > plan.replicated_fraction
