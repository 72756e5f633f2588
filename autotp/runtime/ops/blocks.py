"""Slices a tensor into shards and concatenates them: the local part of all conversions.

A dim is unflattened into its factors, split or concatenated along some of them, and flattened
again. There are no index lists, so it works on meta tensors, under autograd and with symbolic
sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from autotp.algebra.split import Extent, Peers, Segment, Split
from autotp.errors import PlanError


def slice_block(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """Slice the shard of `rank` of `parts` ranks from the full `x`, whose `dim` is split.

        slice_block(arange(12), 0, Split(1, (segment(1, 4, 1), segment(1, 8, 1))), 0, 2)
        # 0 1, 4 5 6 7

    Constraints: the result is a view if the strides allow it.
    """
    dim = dim % x.dim()
    cut = fit_split(split, x.size(dim), dim)
    lengths = [s.length() for s in cut.segments]
    pieces = [
        _narrow(piece, dim, _Extents.of(cut, segment), rank, parts)
        for piece, segment in zip(
            _list_pieces(x, dim, cut.outer, lengths), cut.segments, strict=True
        )
    ]
    return _concatenate(pieces, dim)


def concatenate_shards(parts: Sequence[Tensor], dim: int, split: Split) -> Tensor:
    """Concatenate the shards `parts`, in rank order: the inverse of `slice_block`.

        concatenate_shards([slice_block(x, dim, split, r, n) for r in range(n)], dim, split)  # x

    Constraints: what several ranks have is read from the first of them.
    """
    dim, ranks = dim % parts[0].dim(), len(parts)
    cut = fit_local_split(split, parts[0].size(dim), dim, 0, ranks)
    rows = [_list_local_pieces(x, dim, cut, rank, ranks) for rank, x in enumerate(parts)]
    columns = zip(*rows, strict=True)
    pieces = [
        _concatenate_pieces(column, dim, _Extents.of(cut, segment))
        for column, segment in zip(columns, cut.segments, strict=True)
    ]
    return _concatenate(pieces, dim)


def write_block(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """Write the shard `x` of `rank` into the full tensor, with zeros elsewhere.

    sum(write_block(slice_block(x, dim, split, r, n), dim, split, r, n) for r in range(n))  # x

    Constraints: what several ranks have is written by each of them, so a sum counts it repeatedly.
    """
    dim = dim % x.dim()
    cut = fit_local_split(split, x.size(dim), dim, rank, parts)
    found = zip(_list_local_pieces(x, dim, cut, rank, parts), cut.segments, strict=True)
    pieces = [
        _widen(piece, dim, _Extents.of(cut, segment), rank, parts) for piece, segment in found
    ]
    return _concatenate(pieces, dim)


def keep_first_copy(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """Zero the elements of the shard `x` of `rank` that a lower rank has too."""
    pieces, peers = list_segments(x, dim, split, rank, parts)
    kept = [
        piece if among.first == rank else torch.zeros_like(piece)
        for piece, among in zip(pieces, peers, strict=True)
    ]
    return reorder_segments(kept, dim)


def list_segments(
    x: Tensor, dim: int, split: Split, rank: int, parts: int
) -> tuple[tuple[Tensor, ...], list[Peers]]:
    """List the segments of the shard `x` of `rank`, and the ranks that have the same of each."""
    dim = dim % x.dim()
    cut = fit_local_split(split, x.size(dim), dim, rank, parts)
    pieces = _list_local_pieces(x, dim, cut, rank, parts)
    return pieces, [cut.find_peers(s, rank, parts) for s in cut.segments]


def reorder_segments(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate the pieces from `list_segments`."""
    return _concatenate(pieces, dim % (pieces[0].dim() - 1))


@dataclass(frozen=True, slots=True)
class _Extents:
    """The extents of the repetitions of a segment, and of the segment itself."""

    outer: tuple[Extent, ...]
    inner: tuple[Extent, ...]

    @staticmethod
    def of(split: Split, segment: Segment) -> "_Extents":
        return _Extents(split.repeats or (Extent(split.outer),), segment.extents)

    def list_split(self) -> list[tuple[int, Extent]]:
        """List those that are split, with their positions."""
        return [(k, e) for k, e in enumerate((*self.outer, *self.inner)) if e.parts != 1]

    def map(self, length: Callable[[Extent], int]) -> tuple[list[int], list[int]]:
        """Compute a number for each."""
        return [length(e) for e in self.outer], [length(e) for e in self.inner]


def fit_split(split: Split, size: int, dim: int) -> Split:
    """Infer the one unknown size of `split` from the full `size` of the dim.

    fit_split(Split(1, (segment(-1, 4, 2),)), 24, 0)  # Split(1, (segment(3, 4, 2),))
    """
    if split.is_known:
        if split.length() != size:
            raise _refuse_length(split, size, dim)
        return split
    return _infer_split(split, size, -split.length(), dim)


def fit_local_split(split: Split, size: int, dim: int, rank: int, ranks: int) -> Split:
    """Infer the one unknown size of `split` from the local `size` on `rank` of `ranks`."""
    if split.is_known:
        if split.local_length(rank, ranks) != size:
            raise _refuse_length(split, size, dim, f"the shard of rank {rank} of {ranks} of ")
        return split
    extents = split.segments[0].extents
    known = [e.part(rank, ranks)[1] for e in extents if e.size != -1]
    unknown = next(e for e in extents if e.size == -1)
    parts = unknown.parts or ranks
    local = 1
    for length in known:
        local *= length
    known = -split.length()  # of the sizes known
    return _infer_split(split, size // max(local, 1) * parts * known, known, dim)


def _infer_split(split: Split, size: int, known: int, dim: int) -> Split:
    if known == 0 or size % known:
        raise _refuse_length(split, size, dim)
    extents = split.segments[0].extents
    inferred = tuple(e._replace(size=size // known) if e.size == -1 else e for e in extents)
    return replace(split, segments=(Segment(inferred),))


def _refuse_length(split: Split, size: int, dim: int, part: str = "") -> PlanError:
    return PlanError(
        f"dim {dim} has {size} elements, which is not the size of {part}{split}, so the plan does "
        "not fit this tensor. Plan again for this model and these sizes"
    )


def _list_pieces(x: Tensor, dim: int, outer: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """List the segments of `x`, with the repetitions at `dim` and the elements at `dim + 1`."""
    rows = x.unflatten(dim, (outer, x.size(dim) // outer))
    return (rows,) if len(lengths) == 1 else rows.split(list(lengths), dim + 1)


def _list_local_pieces(
    x: Tensor, dim: int, split: Split, rank: int, ranks: int
) -> tuple[Tensor, ...]:
    lengths = [s.local_length(rank, ranks) for s in split.segments]
    return _list_pieces(x, dim, split.local_outer(rank, ranks), lengths)


def _concatenate(pieces: Sequence[Tensor], dim: int) -> Tensor:
    rows = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim + 1)
    return rows.flatten(dim, dim + 1)


def _narrow(x: Tensor, dim: int, extents: _Extents, rank: int, ranks: int) -> Tensor:
    runs = _unflatten_extents(x, dim, extents.map(lambda e: e.size))
    for k, extent in extents.list_split():
        runs = runs.narrow(dim + k, *extent.part(rank, ranks))
    return _flatten_extents(runs, dim, extents)


def _widen(x: Tensor, dim: int, extents: _Extents, rank: int, ranks: int) -> Tensor:
    runs = _unflatten_extents(x, dim, extents.map(lambda e: e.part(rank, ranks)[1]))
    for k, extent in extents.list_split():
        start, length = extent.part(rank, ranks)
        after = runs.dim() - 1 - (dim + k)
        runs = functional.pad(runs, [0, 0] * after + [start, extent.size - start - length])
    return _flatten_extents(runs, dim, extents)


def _concatenate_pieces(column: Sequence[Tensor], dim: int, extents: _Extents) -> Tensor:
    """Concatenate one segment of all ranks, from the first copies of its shards."""
    ranks, cut = len(column), extents.list_split()
    parts: dict[tuple[int, ...], Tensor] = {}
    for rank, x in enumerate(column):
        index = tuple(e.at(rank, ranks) for _, e in cut)
        if index not in parts:
            sizes = extents.map(lambda e, rank=rank: e.part(rank, ranks)[1])
            parts[index] = _unflatten_extents(x, dim, sizes)
    for k, _ in reversed(cut):
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for index in sorted(parts):
            rows.setdefault(index[:-1], []).append(parts[index])
        parts = {index: torch.cat(row, dim + k) for index, row in rows.items()}
    return _flatten_extents(parts[()], dim, extents)


def _unflatten_extents(x: Tensor, dim: int, sizes: tuple[list[int], list[int]]) -> Tensor:
    """Unflatten the two dims of a piece, repetitions and elements, into one dim per extent."""
    outer, inner = sizes
    x = x.unflatten(dim + 1, inner) if inner else x.squeeze(dim + 1)
    return x.unflatten(dim, outer)


def _flatten_extents(runs: Tensor, dim: int, extents: _Extents) -> Tensor:
    """Flatten them into the two dims again."""
    last = dim + len(extents.outer)
    if not extents.inner:
        return runs.flatten(dim, last - 1).unsqueeze(dim + 1)
    return runs.flatten(last, last + len(extents.inner) - 1).flatten(dim, last - 1)
