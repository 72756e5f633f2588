"""A rank's part of a tensor and back: the local arithmetic behind slices, gathers and reads.

One idea: a dim is viewed by its factors, cut or joined along one of them, and flattened again. No
index lists, so it works on meta tensors, under autograd and with symbolic sizes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autotp.core.split import Segment, Split
from autotp.errors import PlanError

__all__ = ["fitted", "join", "put", "take"]


def take(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """The part of the whole `x` that `rank` of `parts` ranks holds when `dim` is cut.

        take(arange(12), 0, Split(1, (Segment(1, 4, 1), Segment(1, 8, 1))), 0, 2)  # 0 1, 4 5 6 7

    Constraints:
    - `parts` divides every segment's axis.
    - It is a view where the strides allow one.
    """
    dim = dim % x.dim()
    cut = fitted(split, x.size(dim), dim)
    _check_divisible(cut, dim, parts)
    pieces = [
        _narrowed(piece, dim + 1, segment, rank, parts)
        for piece, segment in zip(_pieces(x, dim, cut, 1), cut.segments, strict=True)
    ]
    return _concatenated(pieces, dim)


def join(parts: Sequence[Tensor], dim: int, split: Split) -> Tensor:
    """The whole tensor of which `parts`, in rank order, are the parts: the inverse of `take`.

        join([take(x, dim, split, rank, n) for rank in range(n)], dim, split)  # x

    Constraints: a segment that stays whole is read from the first part.
    """
    dim = dim % parts[0].dim()
    cut = _fitted_parts(split, parts[0].size(dim), dim, len(parts))
    rows = [_pieces(part, dim, cut, len(parts)) for part in parts]
    columns = zip(*rows, strict=True)
    pieces = [
        _joined(column, dim + 1, segment)
        for column, segment in zip(columns, cut.segments, strict=True)
    ]
    return _concatenated(pieces, dim)


def put(x: Tensor, dim: int, split: Split, rank: int, parts: int) -> Tensor:
    """The part `x` of `rank` at its place in the whole tensor, zeros elsewhere.

        sum(put(take(x, dim, split, rank, n), dim, split, rank, n) for rank in range(n))  # x

    Constraints: a segment that stays whole is put by rank 0 only, so that the sum counts it once.
    """
    zeros = torch.zeros_like(x)
    return join([x if part == rank else zeros for part in range(parts)], dim, split)


def fitted(split: Split, size: int, dim: int) -> Split:
    """`split` with its one unknown size inferred from the whole dim's `size`.

    fitted(Split(1, (Segment(-1, 4, 2),)), 24, 0)  # Split(1, (Segment(3, 4, 2),))
    """
    segment = split.segments[0]
    sizes = (segment.outer, segment.axis, segment.inner)
    if -1 not in sizes:
        return _of_length(split, size, dim)
    known = -sizes[0] * (sizes[1] or 1) * sizes[2]
    if size % known:
        raise _unfit(split, size, dim)
    outer, axis, inner = (size // known if n == -1 else n for n in sizes)
    return replace(split, segments=(Segment(outer, axis, inner),))


def _fitted_parts(split: Split, local_size: int, dim: int, parts: int) -> Split:
    unknown = any(-1 in (s.outer, s.axis, s.inner) for s in split.segments)
    if unknown:
        return fitted(split, local_size * parts, dim)
    _check_divisible(split, dim, parts)
    if split.length(parts) != local_size:
        raise _unfit(split, local_size, dim, f"one of {parts} parts of ")
    return split


def _of_length(split: Split, size: int, dim: int) -> Split:
    if split.length() != size:
        raise _unfit(split, size, dim)
    return split


def _unfit(split: Split, size: int, dim: int, part: str = "") -> PlanError:
    return PlanError(
        f"dim {dim} has {size} elements, which is not the size of {part}{split}; the plan does not "
        "fit this tensor: plan again for the model and the sizes at hand"
    )


def _check_divisible(split: Split, dim: int, parts: int) -> None:
    for segment in split.segments:
        if segment.axis % parts:
            raise PlanError(
                f"dim {dim} is cut along an axis of {segment.axis}, which {parts} ranks do not "
                f"divide; choose a tp, or pad the inputs to a size, such that tp divides it"
            )


def _pieces(x: Tensor, dim: int, split: Split, parts: int) -> tuple[Tensor, ...]:
    """The segments of `x`, each with the repetitions at `dim` and its own elements at `dim + 1`."""
    rows = x.unflatten(dim, (split.outer, x.size(dim) // split.outer))
    if len(split.segments) == 1:
        return (rows,)
    return rows.split([s.length(parts) for s in split.segments], dim + 1)


def _concatenated(pieces: Sequence[Tensor], dim: int) -> Tensor:
    rows = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim + 1)
    return rows.flatten(dim, dim + 1)


def _narrowed(x: Tensor, dim: int, segment: Segment, rank: int, parts: int) -> Tensor:
    if not segment.axis:
        return x
    size = segment.axis // parts * segment.inner
    runs = x.unflatten(dim, (segment.outer, segment.axis * segment.inner))
    return runs.narrow(dim + 1, rank * size, size).flatten(dim, dim + 1)


def _joined(parts: Sequence[Tensor], dim: int, segment: Segment) -> Tensor:
    if not segment.axis:
        return parts[0]
    runs = [p.unflatten(dim, (segment.outer, p.size(dim) // segment.outer)) for p in parts]
    return torch.cat(runs, dim + 1).flatten(dim, dim + 1)
