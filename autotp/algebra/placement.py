"""How one value is placed on a tensor-parallel group, and which collectives change its placement.

A placement describes each rank's copy or shard of a value *and* of its gradient:

    R    replicated: the same value on every rank, the full gradient on every rank
    R~   replicated forward, gradient partial: a value that sharded consumers read
    P    partial sum forward, gradient replicated
    S    split: dim `dim` is sharded along axis `axis`, forward and gradient
    S~   split, but several ranks have copies of some elements, and the gradients of the copies are
         partial: key-value heads fewer than ranks, or a segment of a fused dim without the axis
    SS   split along two axes in two dims; `dim` is the first
    G    grouped rows: along `dim` a rank's own rows, those of its groups, come first; the rows
         after them and their gradients are undefined; the size is the unsharded one

Without gradients R~ equals R, and S~ equals S. A placement names dim *and* partition: a `[hidden,
hidden]` weight has one axis in two dims, a fused QKV weight has several axes in one. A partition
nearly always has one axis, but may have several.
Which rows belong to a rank is known only at run time (`algebra.grouped_rows`), so such a value
keeps its full size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autotp.algebra.partition import UNCUT, Part, Partition

Kind: TypeAlias = Literal["R", "R~", "P", "S", "S~", "SS", "G"]


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The placement of one value over one (sub-)group.

    Constraints:
    - `dim` and `partition` are set exactly when the value is split or its rows are grouped.
    """

    kind: Kind
    dim: int = -1
    partition: Partition = UNCUT

    @property
    def is_split(self) -> bool:
        """Whether each rank has a shard only."""
        return self.kind in ("S", "S~", "SS")

    @property
    def is_grouped(self) -> bool:
        """Whether a rank has its own rows first, and undefined rows after them."""
        return self.kind == "G"

    def __str__(self) -> str:
        """The notation of the documentation, e.g. `S(0, heads)`."""
        return f"{self.kind}({self.dim}, {self.partition})" if self.partition.parts else self.kind


REPLICATED = Placement("R")
SHARED = Placement("R~")
PARTIAL = Placement("P")


def split(dim: int, axis: str) -> Placement:
    """The placement `S(dim, axis)`: one shard of the axis per rank."""
    return Placement("S", dim, Partition((Part(axis),)))


Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

SUMS: frozenset[Collective] = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that add, in the dtype that `reduce_dtype` requests."""

FUNCTIONAL: Mapping[str, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""The collectives by the names of torch's functional ops."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """What a conversion runs in one direction: one tensor of each rank to one tensor of each.

    - `before`, `after`: the local steps before and after the `collective`.
    - `arguments`: the names of its arguments besides the tensor and the group.
    - `aliases`: whether its result may share memory with its tensor.
    """

    before: str = ""
    collective: Collective | None = None
    after: str = ""
    arguments: tuple[str, ...] = ()
    aliases: bool = False

    @property
    def sums(self) -> bool:
        """Whether it sums over the ranks."""
        return self.collective in SUMS

    def __str__(self) -> str:
        """Its steps, e.g. `pad + all_reduce`."""
        return " + ".join(filter(None, (self.before, self.collective, self.after)))


_SPLIT = ("dim", "split")
_ROWS = ("bounds", "dim")

IDENTITY = Primitive("identity", aliases=True)
ALL_REDUCE = Primitive(collective="all_reduce")
ALL_GATHER = Primitive(collective="all_gather", arguments=_SPLIT)
_REDUCE_SCATTER = Primitive(collective="reduce_scatter", arguments=_SPLIT)
_ALL_TO_ALL = Primitive(collective="all_to_all", arguments=(*_SPLIT, "to_dim", "to_split"))
_KEEP_FIRST = Primitive("keep_first", aliases=True)
_SLICE = Primitive("slice", arguments=_SPLIT, aliases=True)
_PAD = Primitive("pad", arguments=_SPLIT)
_SLICE_FIRST = Primitive("slice_first", arguments=_SPLIT)
_PAD_REDUCE = Primitive("pad", "all_reduce", arguments=_SPLIT)
_ROWS_FIRST = Primitive("rows_first", arguments=_ROWS)
_ROWS_BACK = Primitive("rows_back", arguments=_ROWS)
_ROWS_BACK_REDUCE = Primitive("rows_back", "all_reduce", arguments=_ROWS)
_REDUCE_ROWS_FIRST = Primitive("", "all_reduce", "rows_first", arguments=_ROWS)


@dataclass(frozen=True, slots=True)
class Conversion:
    """One change of placement: the op that performs it, what it runs forward and backward.

    `op` is the name in the `torch.ops.autotp` namespace; `forward` and `backward` are primitives:
    slice takes this rank's shard, pad puts it back among zeros, keep_first keeps the value on rank
    0 and is zero elsewhere, slice_first does both for elements that have copies. rows_first moves a
    rank's own rows to the front, rows_back back to where they were; zero elsewhere.

    Constraints: both primitives take the same arguments.
    """

    op: str
    forward: Primitive
    backward: Primitive

    @property
    def sums(self) -> bool:
        """Whether it sums over the ranks, forward or backward."""
        return self.forward.sums or self.backward.sums

    def reverse(self) -> "Conversion":
        """The backward pass as a conversion."""
        return Conversion(self.op, self.backward, self.forward)


CONVERSIONS: dict[tuple[Kind, Kind], Conversion] = {
    ("R", "R~"): Conversion("copy", IDENTITY, ALL_REDUCE),
    ("R", "P"): Conversion("keep_first", _KEEP_FIRST, IDENTITY),
    ("R", "S"): Conversion("scatter", _SLICE, ALL_GATHER),
    ("R~", "R"): Conversion("first_gradient", IDENTITY, _KEEP_FIRST),
    ("R~", "S"): Conversion("scatter_partial", _SLICE, _PAD),
    ("P", "R"): Conversion("reduce", ALL_REDUCE, IDENTITY),
    ("P", "R~"): Conversion("reduce_copy", ALL_REDUCE, ALL_REDUCE),
    ("P", "S"): Conversion("reduce_scatter", _REDUCE_SCATTER, ALL_GATHER),
    ("S", "R"): Conversion("gather", ALL_GATHER, _SLICE),
    ("S", "R~"): Conversion("gather_copy", ALL_GATHER, _REDUCE_SCATTER),
    ("S", "S"): Conversion("exchange", _ALL_TO_ALL, _ALL_TO_ALL),
    ("R", "S~"): Conversion("scatter_copies", _SLICE, _PAD_REDUCE),
    ("R~", "S~"): Conversion("scatter_partial", _SLICE, _PAD),
    ("S~", "R"): Conversion("gather_copies", ALL_GATHER, _SLICE_FIRST),
    ("R", "G"): Conversion("own_rows", _ROWS_FIRST, _ROWS_BACK_REDUCE),
    ("R~", "G"): Conversion("own_rows_partial", _ROWS_FIRST, _ROWS_BACK),
    ("G", "P"): Conversion("rows_in_place", _ROWS_BACK, _ROWS_FIRST),
    ("G", "R"): Conversion("reduce_rows", _ROWS_BACK_REDUCE, _ROWS_FIRST),
    ("G", "R~"): Conversion("reduce_rows_copy", _ROWS_BACK_REDUCE, _REDUCE_ROWS_FIRST),
}
"""Every legal change of placement, by kinds (forward / backward). Absent pairs are forbidden:
S to P would be padding with zeros, which a solver exploits; R to P serves biases, and values
computed from parameters alone. G to P adds each row of a grouped product on the one rank that owns
it."""

CONVERSION_OPS = {conversion.op: conversion for conversion in CONVERSIONS.values()}
"""Each conversion by the name of its op."""
