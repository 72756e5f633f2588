"""A rank's part of a tensor and back: the local arithmetic behind slices, gathers and reads.

One idea: a dim is viewed by its factors, cut or joined along some of them, and flattened again. No
index lists, so it works on meta tensors, under autograd and with symbolic sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from autotp.algebra.split import Extent, Peers, Segment, Split
from autotp.errors import PlanError

__all__ = [
    "keep_first_copy",
    "fit_split",
    "fit_local_split",
    "concatenate_shards",
    "write_block",
    "reorder_segments",
    "list_segments",
    "slice_block",
]


def slice_block(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """The part of the whole `x` that `rank` of `parts` ranks holds when `dim` is cut.

        take(arange(12), 0, Split(1, (segment(1, 4, 1), segment(1, 8, 1))), 0, 2)  # 0 1, 4 5 6 7

    Constraints: it is a view where the strides allow one.
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
    """The whole tensor of which `parts`, in rank order, are the parts: the inverse of `slice_block`.

        join([take(x, dim, split, rank, n) for rank in range(n)], dim, split)  # x

    Constraints: what several ranks hold is read from the first of them.
    """
    dim, ranks = dim % parts[0].dim(), len(parts)
    cut = fit_local_split(split, parts[0].size(dim), dim, 0, ranks)
    rows = [_list_local_pieces(x, dim, cut, rank, ranks) for rank, x in enumerate(parts)]
    columns = zip(*rows, strict=True)
    pieces = [
        _join_pieces(column, dim, _Extents.of(cut, segment))
        for column, segment in zip(columns, cut.segments, strict=True)
    ]
    return _concatenate(pieces, dim)


def write_block(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """The part `x` of `rank` at its place in the whole tensor, zeros elsewhere.

    sum(put(take(x, dim, split, rank, n), dim, split, rank, n) for rank in range(n))  # x

    Constraints: what several ranks hold is put by each, so that the sum adds up their parts.
    """
    dim = dim % x.dim()
    cut = fit_local_split(split, x.size(dim), dim, rank, parts)
    found = zip(_list_local_pieces(x, dim, cut, rank, parts), cut.segments, strict=True)
    pieces = [
        _widen(piece, dim, _Extents.of(cut, segment), rank, parts) for piece, segment in found
    ]
    return _concatenate(pieces, dim)


def keep_first_copy(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """The part `x` of `rank`, with zeros for what a rank before it holds too."""
    pieces, peers = list_segments(x, dim, split, rank, parts)
    kept = [
        piece if among.first == rank else torch.zeros_like(piece)
        for piece, among in zip(pieces, peers, strict=True)
    ]
    return reorder_segments(kept, dim)


def list_segments(
    x: Tensor, dim: int, split: Split, rank: int, parts: int
) -> tuple[tuple[Tensor, ...], list[Peers]]:
    """The part `x` of `rank` segment by segment, and the ranks that hold the same of each."""
    dim = dim % x.dim()
    cut = fit_local_split(split, x.size(dim), dim, rank, parts)
    pieces = _list_local_pieces(x, dim, cut, rank, parts)
    return pieces, [cut.peers(s, rank, parts) for s in cut.segments]


def reorder_segments(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The tensor of which `list_segments` gave the pieces."""
    return _concatenate(pieces, dim % (pieces[0].dim() - 1))


@dataclass(frozen=True, slots=True)
class _Extents:
    """The extents of a segment's repetitions, and its own."""

    outer: tuple[Extent, ...]
    inner: tuple[Extent, ...]

    @staticmethod
    def of(split: Split, segment: Segment) -> "_Extents":
        return _Extents(split.repeats or (Extent(split.outer),), segment.extents)

    def cut(self) -> list[tuple[int, Extent]]:
        """Those that are cut, with their places."""
        return [(k, e) for k, e in enumerate((*self.outer, *self.inner)) if e.parts != 1]

    def map(self, length: Callable[[Extent], int]) -> tuple[list[int], list[int]]:
        """A number for each."""
        return [length(e) for e in self.outer], [length(e) for e in self.inner]


def fit_split(split: Split, size: int, dim: int) -> Split:
    """`split` with its one unknown size inferred from the whole dim's `size`.

    fitted(Split(1, (segment(-1, 4, 2),)), 24, 0)  # Split(1, (segment(3, 4, 2),))
    """
    if split.is_known:
        if split.length() != size:
            raise _refuse_length(split, size, dim)
        return split
    return _infer_split(split, size, -split.length(), dim)


def fit_local_split(split: Split, size: int, dim: int, rank: int, ranks: int) -> Split:
    """`split` with its one unknown size inferred from the `size` that `rank` of `ranks` holds."""
    if split.is_known:
        if split.local_length(rank, ranks) != size:
            raise _refuse_length(split, size, dim, f"rank {rank}'s part of {ranks} of ")
        return split
    extents = split.segments[0].extents
    known = [e.part(rank, ranks)[1] for e in extents if e.size != -1]
    unknown = next(e for e in extents if e.size == -1)
    parts = unknown.parts or ranks
    local = 1
    for length in known:
        local *= length
    whole = -split.length()  # of the sizes known
    return _infer_split(split, size // max(local, 1) * parts * whole, whole, dim)


def _infer_split(split: Split, size: int, known: int, dim: int) -> Split:
    if known == 0 or size % known:
        raise _refuse_length(split, size, dim)
    extents = split.segments[0].extents
    told = tuple(e._replace(size=size // known) if e.size == -1 else e for e in extents)
    return replace(split, segments=(Segment(told),))


def _refuse_length(split: Split, size: int, dim: int, part: str = "") -> PlanError:
    return PlanError(
        f"dim {dim} has {size} elements, which is not the size of {part}{split}; the plan does not "
        "fit this tensor: plan again for the model and the sizes at hand"
    )


def _list_pieces(x: Tensor, dim: int, outer: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The segments of `x`, each with the repetitions at `dim` and its own elements at `dim + 1`."""
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
    runs = _spread_copies(x, dim, extents.map(lambda e: e.size))
    for k, extent in extents.cut():
        runs = runs.narrow(dim + k, *extent.part(rank, ranks))
    return _fold_copies(runs, dim, extents)


def _widen(x: Tensor, dim: int, extents: _Extents, rank: int, ranks: int) -> Tensor:
    runs = _spread_copies(x, dim, extents.map(lambda e: e.part(rank, ranks)[1]))
    for k, extent in extents.cut():
        start, length = extent.part(rank, ranks)
        after = runs.dim() - 1 - (dim + k)
        runs = functional.pad(runs, [0, 0] * after + [start, extent.size - start - length])
    return _fold_copies(runs, dim, extents)


def _join_pieces(column: Sequence[Tensor], dim: int, extents: _Extents) -> Tensor:
    """One segment of all ranks: the first copies of its parts, put together cut by cut."""
    ranks, cut = len(column), extents.cut()
    parts: dict[tuple[int, ...], Tensor] = {}
    for rank, x in enumerate(column):
        index = tuple(e.at(rank, ranks) for _, e in cut)
        if index not in parts:
            sizes = extents.map(lambda e, rank=rank: e.part(rank, ranks)[1])
            parts[index] = _spread_copies(x, dim, sizes)
    for k, _ in reversed(cut):
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for index in sorted(parts):
            rows.setdefault(index[:-1], []).append(parts[index])
        parts = {index: torch.cat(row, dim + k) for index, row in rows.items()}
    return _fold_copies(parts[()], dim, extents)


def _spread_copies(x: Tensor, dim: int, sizes: tuple[list[int], list[int]]) -> Tensor:
    """A piece's two dims, its repetitions and its elements, as one dim an extent."""
    outer, inner = sizes
    x = x.unflatten(dim + 1, inner) if inner else x.squeeze(dim + 1)
    return x.unflatten(dim, outer)


def _fold_copies(runs: Tensor, dim: int, extents: _Extents) -> Tensor:
    """The two dims again."""
    last = dim + len(extents.outer)
    if not extents.inner:
        return runs.flatten(dim, last - 1).unsqueeze(dim + 1)
    return runs.flatten(last, last + len(extents.inner) - 1).flatten(dim, last - 1)
