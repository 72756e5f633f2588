"""What one process does for each primitive of the conversion table: one function each.

A primitive maps one tensor to one tensor. Those that communicate run exactly one functional
collective and wait for it, so that torch.compile and dispatch modes see both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from autotp.algebra.placement import Primitive
from autotp.algebra.split import Split
from autotp.dtypes import sum_dtype
from autotp.errors import PlanError
from autotp.runtime.group.process_group import checked, rank_of, size_of
from autotp.runtime.ops.blocks import first_copy, fitted_part, join, put, take
from autotp.runtime.ops.grouped_rows import rows_back, rows_first

__all__ = ["PRIMITIVES", "Cut", "Wire"]

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim and how it is cut."""

    dim: int
    split: Split

    @staticmethod
    def of(numbers: Sequence[int]) -> "Cut | None":
        """The cut that `encode` wrote; None for no numbers."""
        return Cut(numbers[0], Split.decode(numbers[1:])) if numbers else None

    def encode(self) -> list[int]:
        """The dim, then the flat form of the split."""
        return [self.dim, *self.split.encode()]

    def lies_in_rank_order(self, num_dims: int, ranks: int) -> bool:
        """Whether the ranks' parts, one after the other in memory, are the whole tensor."""
        split = self.split
        blocks = split.is_block(ranks) and split.is_even(ranks) and split.is_exact(ranks)
        return self.dim % num_dims == 0 and blocks

    def lengths(self, x: Tensor, rank: int, ranks: int) -> list[int]:
        """The elements of the cut dim that each rank holds, if `x` is the part of `rank`."""
        cut = fitted_part(self.split, x.size(self.dim), self.dim, rank, ranks)
        return [cut.local_length(r, ranks) for r in range(ranks)]


@dataclass(frozen=True, slots=True)
class Wire:
    """What a primitive needs besides its tensor.

    - `cut`: of the sliced, gathered or scattered dim; for all_to_all, of its input.
    - `to`: for all_to_all, of its result; otherwise the same as `cut`.
    - `dtype`: what sums are made in at least; None for the tensor's own.
    - `bounds`: where each group of the rows along `cut` ends.
    """

    group: str
    cut: Cut
    to: Cut
    dtype: torch.dtype | None = None
    bounds: Tensor | None = None

    def widened(self, x: Tensor) -> Tensor:
        """`x` in the dtype that it is summed in."""
        return x.to(sum_dtype(x.dtype, self.dtype))

    def reversed(self) -> "Wire":
        """The wire of the backward pass."""
        return replace(self, cut=self.to, to=self.cut)

    @property
    def rows(self) -> tuple[Tensor, int]:
        """The bounds of grouped rows, and the dim along which they lie."""
        assert self.bounds is not None, "rows are grouped by their bounds"
        return self.bounds, self.cut.dim


def _identity(x: Tensor, wire: Wire) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, wire: Wire) -> Tensor:
    group = checked(wire.group)
    summands = wire.widened(x).contiguous()
    return _ops.wait_tensor(_ops.all_reduce(summands, "sum", group)).to(x.dtype)


def _all_gather(x: Tensor, wire: Wire) -> Tensor:
    ranks, cut = size_of(wire.group), wire.cut
    if cut.lies_in_rank_order(x.dim(), ranks):
        return _gathered(x, wire)
    if cut.split.is_even(ranks):
        return join(_gathered(x, wire).chunk(ranks), cut.dim, cut.split)
    lengths = cut.lengths(x, rank_of(wire.group), ranks)
    rows = _gathered(_padded(x, cut.dim, max(lengths)), wire).chunk(ranks)
    parts = [row.narrow(cut.dim, 0, n) for row, n in zip(rows, lengths, strict=True)]
    return join(parts, cut.dim, cut.split)


def _gathered(x: Tensor, wire: Wire) -> Tensor:
    """All ranks' tensors of one shape, one after the other along dim 0."""
    rows = _ops.all_gather_into_tensor(x.contiguous(), size_of(wire.group), wire.group)
    return _ops.wait_tensor(rows)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` with zeros up to `length`: collectives want one shape on all ranks."""
    after = x.dim() - 1 - dim % x.dim()
    return functional.pad(x, [0, 0] * after + [0, length - x.size(dim)])


def _reduce_scatter(x: Tensor, wire: Wire) -> Tensor:
    ranks, dim = size_of(wire.group), wire.cut.dim
    stacked, own = x, -1
    if not wire.cut.lies_in_rank_order(x.dim(), ranks):
        pieces = [take(x, dim, wire.cut.split, rank, ranks) for rank in range(ranks)]
        own = pieces[rank_of(wire.group)].size(dim)
        longest = max(piece.size(dim) for piece in pieces)
        stacked = torch.cat([_padded(piece, dim, longest) for piece in pieces])
    summands = wire.widened(stacked).contiguous()
    local = _ops.reduce_scatter_tensor(summands, "sum", ranks, wire.group)
    local = _ops.wait_tensor(local).to(x.dtype)
    return local if own < 0 else local.narrow(dim, 0, own)


def _all_to_all(x: Tensor, wire: Wire) -> Tensor:
    ranks, cut, to = size_of(wire.group), wire.cut, wire.to
    at = cut.dim % x.dim()
    if at == to.dim % x.dim():
        raise PlanError(
            f"dim {at} of {list(x.shape)} cannot go from {cut.split} to {to.split} by one "
            "all-to-all, since both cut it; convert to R first and then to S"
        )
    lengths = cut.lengths(x, rank_of(wire.group), ranks)
    pieces = [take(x, to.dim, to.split, rank, ranks) for rank in range(ranks)]
    own = list(pieces[rank_of(wire.group)].shape)
    shapes = [[*own[:at], n, *own[at + 1 :]] for n in lengths]
    sent, expected = [p.numel() for p in pieces], [prod(shape) for shape in shapes]
    flat = torch.cat([p.flatten() for p in pieces])
    flat = _ops.wait_tensor(_ops.all_to_all_single(flat, expected, sent, wire.group))
    received = [p.view(s) for p, s in zip(flat.split(expected), shapes, strict=True)]
    return join(received, cut.dim, cut.split)


def _slice(x: Tensor, wire: Wire) -> Tensor:
    return take(x, wire.cut.dim, wire.cut.split, rank_of(wire.group), size_of(wire.group))


def _pad(x: Tensor, wire: Wire) -> Tensor:
    return put(x, wire.cut.dim, wire.cut.split, rank_of(wire.group), size_of(wire.group))


def _slice_first(x: Tensor, wire: Wire) -> Tensor:
    rank, ranks = rank_of(wire.group), size_of(wire.group)
    return first_copy(_slice(x, wire), wire.cut.dim, wire.cut.split, rank, ranks)


def _pad_reduce(x: Tensor, wire: Wire) -> Tensor:
    return _all_reduce(_pad(x, wire), wire)


def _rows_first(x: Tensor, wire: Wire) -> Tensor:
    return rows_first(x, *wire.rows, rank_of(wire.group), size_of(wire.group))


def _rows_back(x: Tensor, wire: Wire) -> Tensor:
    return rows_back(x, *wire.rows, rank_of(wire.group), size_of(wire.group))


def _rows_back_reduce(x: Tensor, wire: Wire) -> Tensor:
    return _all_reduce(_rows_back(x, wire), wire)


def _reduce_rows_first(x: Tensor, wire: Wire) -> Tensor:
    return _rows_first(_all_reduce(x, wire), wire)


def _keep_first(x: Tensor, wire: Wire) -> Tensor:
    return torch.zeros_like(x) if rank_of(wire.group) else x.view_as(x)


PRIMITIVES: Mapping[Primitive, Callable[[Tensor, Wire], Tensor]] = {
    "identity": _identity,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep_first": _keep_first,
    "slice_first": _slice_first,
    "pad_reduce": _pad_reduce,
    "rows_first": _rows_first,
    "rows_back": _rows_back,
    "rows_back_reduce": _rows_back_reduce,
    "reduce_rows_first": _reduce_rows_first,
}
