"""Every conversion alone in real processes: value and gradient by the definition of placements."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autotp.algebra.placement import CONVERSIONS, Kind, Primitive
from autotp.algebra.split import Extent, Segment, Split, block, segment
from autotp.errors import PlanError
from autotp.runtime.group.process_group import resolve_group
from autotp.runtime.ops.library import write_schema
from tests.spmd.placed import gradient_kind, is_placed, part, whole
from tests.spmd.pool import Pool
from tests.spmd.tally import Tally

Pools = Callable[[int], Pool]
Cut = tuple[int, Split]

OPS = torch.ops.autotp
SHAPE = (24, 144, 2)
CUTS: dict[str, Cut] = {
    "rows": (0, block(24)),
    "inner rows": (0, Split(1, (segment(2, 12, 1),))),
    "columns": (1, block(144)),
    "outer axis": (-2, Split(1, (segment(1, 12, 12),))),
    "inner axis": (1, Split(1, (segment(12, 12, 1),))),
    "unknown size": (1, Split(1, (segment(-1, 12, 2),))),
    "unequal segments": (1, Split(1, (segment(1, 12, 8), segment(1, 12, 3), segment(1, 12, 1)))),
    "repeated segments": (1, Split(2, (segment(2, 12, 2), segment(1, 24, 1)))),
    "a whole segment": (1, Split(1, (segment(1, 12, 4), segment(1, 0, 48), segment(1, 48, 1)))),
    "uneven": (1, Split(1, (segment(2, 9, 2), segment(1, 18, 6)))),
    "uneven, size unknown": (1, Split(1, (segment(1, 9, -1),))),
    "factored group": (1, Split(1, (Segment((Extent(8, 2, 2), Extent(3, 2), Extent(6))),))),
    "copies": (1, Split(1, (Segment((Extent(8, 2, 2), Extent(9))), segment(1, 12, 6)))),
}
FACTORED = {"factored group", "copies"}
"""Cuts that are made for four ranks."""

ACROSS = {"rows": "columns", "inner rows": "columns"}
"""Where `exchange` goes from a cut; from all others it goes to rows."""


def cuts(change: tuple[Kind, Kind], world: int) -> list[str]:
    """The cuts that a conversion is tried with: those without copies, unless it is about them."""
    copies = "S~" in change
    every = [c for c in CUTS if world == 4 or c not in FACTORED]
    return [c for c in every if copies or CUTS[c][1].is_exact(world)]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one conversion, and of the gradient of its gradient."""

    value: Tensor
    gradient: Tensor
    forward: list[str]
    backward: list[str]
    second: Tensor
    expected_second: Tensor


def strided(x: Tensor) -> Tensor:
    """`x`, laid out in memory with its first and last dims exchanged."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def target_cut(target: tuple[Kind, Kind], cut: str) -> Cut:
    return CUTS[ACROSS.get(cut, "rows")] if target == ("S", "S") else CUTS[cut]


def arguments(change: tuple[Kind, Kind], cut: str) -> list[object]:
    (dim, split), (to_dim, to_split) = CUTS[cut], target_cut(change, cut)
    signature = write_schema(CONVERSIONS[change])
    first = [dim, split.encode()] if "int[] split" in signature else []
    last = [to_dim, to_split.encode()] if "int[] to_split" in signature else []
    return [*first, *last]


def convert(rank: int, world: int, change: tuple[Kind, Kind], cut: str) -> Outcome:
    (source, target), group = change, resolve_group(world).name
    given, wanted = CUTS[cut], target_cut(change, cut)
    numbers = (*arguments(change, cut), group)
    run = getattr(OPS, CONVERSIONS[change].op)
    x = strided(part(whole(SHAPE, 1), source, *given, rank, world)).requires_grad_()
    dy = strided(part(whole(SHAPE, 2), gradient_kind(target), *wanted, rank, world))
    v = part(whole(SHAPE, 3), source, *given, rank, world)
    with Tally() as forward:
        y = run(x, *numbers)
    with Tally() as backward:
        (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    (second,) = torch.autograd.grad(dx, dy, v)
    return Outcome(
        value=y.detach(),
        gradient=dx.detach(),
        forward=list(forward.kinds.elements()),
        backward=list(backward.kinds.elements()),
        second=second,
        expected_second=run(v, *numbers),
    )


def convert_all(rank: int, world: int, change: tuple[Kind, Kind]) -> dict[str, Outcome]:
    return {cut: convert(rank, world, change, cut) for cut in cuts(change, world)}


def collectives(primitive: Primitive) -> list[str]:
    return [primitive.collective] if primitive.collective else []


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("change", [c for c in CONVERSIONS if "G" not in c], ids=" to ".join)
def test_conversion(pool: Pools, world: int, change: tuple[Kind, Kind]) -> None:
    source, target = change
    conversion = CONVERSIONS[change]
    ranks = pool(world).run(convert_all, change)
    for cut in cuts(change, world):
        outcomes = [rank[cut] for rank in ranks]
        wanted = target_cut(change, cut)

        assert is_placed(whole(SHAPE, 1), [o.value for o in outcomes], target, *wanted)
        assert is_placed(
            whole(SHAPE, 2), [o.gradient for o in outcomes], gradient_kind(source), *CUTS[cut]
        )
        for outcome in outcomes:
            assert collectives(conversion.forward) == outcome.forward
            assert collectives(conversion.backward) == outcome.backward
            assert torch.equal(outcome.expected_second, outcome.second)


def overlapping(rank: int, world: int) -> str:
    try:
        OPS.exchange(
            torch.ones(6), 0, block(12).encode(), 0, block(12).encode(), resolve_group(world).name
        )
    except PlanError as error:
        return str(error)
    return ""


def test_exchange_within_one_dim_is_refused_before_communicating(pool: Pools) -> None:
    for message in pool(2).run(overlapping):
        assert "an all-to-all of [6] cannot gather and shard the same dim 0" in message


def integers(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    group, split = resolve_group(world).name, block(4).encode()
    x = torch.arange(4)
    local = OPS.scatter(x, 0, split, group)
    return local, OPS.gather(local, 0, split, group), OPS.reduce(x, group)


def test_integers_are_converted_without_gradients(pool: Pools) -> None:
    x = torch.arange(4)
    first, second = pool(2).run(integers)

    assert [0, 1] == first[0].tolist()
    assert [2, 3] == second[0].tolist()
    for _, gathered, reduced in (first, second):
        assert torch.equal(x, gathered)
        assert torch.equal(2 * x, reduced)


def in_float32(rank: int, world: int, op: str, wide: bool) -> tuple[Tensor, Tensor, list[str]]:
    group, dtype = resolve_group(world).name, torch.float32 if wide else None
    cut = (0, block(2 * world).encode()) if op in ("reduce_scatter", "gather_copy") else ()
    x = torch.ones(2 if op == "gather_copy" else 2 * world, dtype=torch.bfloat16)
    x.requires_grad_()
    with Tally() as tally:
        y = getattr(OPS, op)(x, *cut, group, dtype=dtype)
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    return y.detach(), x.grad, [str(d) for d in tally.dtypes]


@pytest.mark.parametrize(
    ("op", "value", "gradient", "summed", "moved"),
    [
        ("copy", 1, 2, 1, 0),
        ("reduce", 2, 1, 1, 0),
        ("reduce_copy", 2, 2, 2, 0),
        ("reduce_scatter", 2, 1, 1, 1),
        ("gather_copy", 1, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("wide", [True, False])
def test_sums_in_the_dtype_asked_for(
    pool: Pools, op: str, value: int, gradient: int, summed: int, moved: int, wide: bool
) -> None:
    dtypes = ["torch.float32" if wide else "torch.bfloat16"] * summed + ["torch.bfloat16"] * moved
    for y, dx, seen in pool(2).run(in_float32, op, wide):
        assert torch.equal(torch.full_like(y, value), y)
        assert torch.equal(torch.full_like(dx, gradient), dx)
        assert (torch.bfloat16, torch.bfloat16) == (y.dtype, dx.dtype)
        assert sorted(dtypes) == sorted(seen)
