"""How one value lies over a tensor-parallel group, and what changing that costs in collectives.

A placement says what each rank holds of a value *and* of its gradient:

    R    replicated: the same value on every rank, the full gradient on every rank
    R~   replicated forward, gradient partial: what a value becomes when sharded consumers read it
    P    partial sum forward, gradient replicated
    S    split: dim `dim` is cut along axis `axis`, forward and gradient
    S~   split, but several ranks hold copies of some elements, and the gradients of the copies are
         partial: key-value heads fewer than ranks, or a segment of a fused dim without the axis
    SS   split along two axes that stand in two dims; `dim` is the first
    G    grouped rows: along `dim` a rank's own rows, those of its groups, come first; the rows
         after them mean nothing, and neither do their gradients; the size is that of the whole

Without gradients R~ equals R, and S~ equals S. A placement names dim *and* partition: a `[hidden,
hidden]` weight has one axis in two dims, a fused QKV weight has several axes in one. A partition
nearly always has one axis, but may have several.
Which rows belong to a rank is known only at run time (`algebra.grouped_rows`), so such a value
keeps its full size.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autotp.algebra.partition import UNCUT, Part, Partition

__all__ = [
    "CONVERSIONS",
    "PARTIAL",
    "REPLICATED",
    "SHARED",
    "Conversion",
    "Kind",
    "Placement",
    "split",
]

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
        """Whether ranks hold parts, less than the whole."""
        return self.kind in ("S", "S~", "SS")

    @property
    def is_grouped(self) -> bool:
        """Whether a rank has its own rows first, and others that mean nothing."""
        return self.kind == "G"

    def __str__(self) -> str:
        """The notation of the documentation, e.g. `S(0, heads)`."""
        return f"{self.kind}({self.dim}, {self.partition})" if self.partition.parts else self.kind


REPLICATED = Placement("R")
SHARED = Placement("R~")
PARTIAL = Placement("P")


def split(dim: int, axis: str) -> Placement:
    """The placement `S(dim, axis)`: one part of the axis per rank."""
    return Placement("S", dim, Partition((Part(axis),)))


Primitive: TypeAlias = Literal[
    "identity",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "slice",
    "pad",
    "keep_first",
    "slice_first",
    "pad_reduce",
    "rows_first",
    "rows_back",
    "rows_back_reduce",
    "reduce_rows_first",
]


@dataclass(frozen=True, slots=True)
class Conversion:
    """One change of placement: the op that performs it, what it runs forward and backward.

    `op` is the name in the `torch.ops.autotp` namespace; `forward` and `backward` are primitives:
    slice takes this rank's part, pad puts it back among zeros, keep_first keeps the value on rank 0
    and zero elsewhere, slice_first does both for what is held in copies, pad_reduce is pad and then
    an all-reduce. rows_first moves this rank's own rows to the front, rows_back back to where they
    were; zero elsewhere. rows_back_reduce and reduce_rows_first do so with an all-reduce.
    """

    op: str
    forward: Primitive
    backward: Primitive


CONVERSIONS: dict[tuple[Kind, Kind], Conversion] = {
    ("R", "R~"): Conversion("copy", "identity", "all_reduce"),
    ("R", "P"): Conversion("keep_first", "keep_first", "identity"),
    ("R", "S"): Conversion("scatter", "slice", "all_gather"),
    ("R~", "R"): Conversion("first_gradient", "identity", "keep_first"),
    ("R~", "S"): Conversion("scatter_partial", "slice", "pad"),
    ("P", "R"): Conversion("reduce", "all_reduce", "identity"),
    ("P", "R~"): Conversion("reduce_copy", "all_reduce", "all_reduce"),
    ("P", "S"): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    ("S", "R"): Conversion("gather", "all_gather", "slice"),
    ("S", "R~"): Conversion("gather_copy", "all_gather", "reduce_scatter"),
    ("S", "S"): Conversion("exchange", "all_to_all", "all_to_all"),
    ("R", "S~"): Conversion("scatter_copies", "slice", "pad_reduce"),
    ("R~", "S~"): Conversion("scatter_partial", "slice", "pad"),
    ("S~", "R"): Conversion("gather_copies", "all_gather", "slice_first"),
    ("R", "G"): Conversion("own_rows", "rows_first", "rows_back_reduce"),
    ("R~", "G"): Conversion("own_rows_partial", "rows_first", "rows_back"),
    ("G", "P"): Conversion("rows_in_place", "rows_back", "rows_first"),
    ("G", "R"): Conversion("reduce_rows", "rows_back_reduce", "rows_first"),
    ("G", "R~"): Conversion("reduce_rows_copy", "rows_back_reduce", "reduce_rows_first"),
}
"""Every legal change of placement, by kinds (forward / backward). Absent pairs are forbidden:
S to P would be padding with zeros, which a solver exploits; R to P serves biases, and values
computed from parameters alone. G to P is what the rows of grouped products are for: they are added
where they go, by one rank each."""
