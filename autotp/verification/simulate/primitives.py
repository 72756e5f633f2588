"""What each primitive of the conversion table does to all ranks' tensors at once.

`runtime.ops.primitives` says what one process does, with real collectives; here is the same table
without processes: a primitive is a function of n tensors that gives n tensors. It trusts nothing:
ranks that bring different tensors to a collective are an error.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autotp.algebra.placement import Primitive
from autotp.errors import VerifyError
from autotp.runtime.ops.blocks import first_copy, fitted_part, join, put, take
from autotp.runtime.ops.grouped_rows import rows_back, rows_first
from autotp.runtime.ops.primitives import Cut, Wire

__all__ = ["PRIMITIVES"]


def _identity(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return [x.view_as(x) for x in xs]


def _all_reduce(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    total = _total(xs, wire)
    return [total.to(x.dtype, copy=True) for x in xs]


def _all_gather(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    whole = join(_parted(xs, wire.cut), wire.cut.dim, wire.cut.split)
    return [whole.clone() for _ in xs]


def _reduce_scatter(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    total = _total(xs, wire)
    return [part.to(x.dtype) for part, x in zip(_parts(total, wire.cut, len(xs)), xs, strict=True)]


def _all_to_all(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    whole = join(_parted(xs, wire.cut), wire.cut.dim, wire.cut.split)
    return _parts(whole, wire.to, len(xs))


def _slice(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    cut = wire.cut
    return [take(x, cut.dim, cut.split, rank, len(xs)) for rank, x in enumerate(xs)]


def _pad(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    cut = wire.cut
    return [put(x, cut.dim, cut.split, rank, len(xs)) for rank, x in enumerate(xs)]


def _slice_first(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    cut = wire.cut
    return [
        first_copy(x, cut.dim, cut.split, rank, len(xs)) for rank, x in enumerate(_slice(xs, wire))
    ]


def _pad_reduce(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return _all_reduce(_pad(xs, wire), wire)


def _rows_first(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return [rows_first(x, *wire.rows, rank, len(xs)) for rank, x in enumerate(xs)]


def _rows_back(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return [rows_back(x, *wire.rows, rank, len(xs)) for rank, x in enumerate(xs)]


def _rows_back_reduce(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return _all_reduce(_rows_back(xs, wire), wire)


def _reduce_rows_first(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return _rows_first(_all_reduce(xs, wire), wire)


def _keep_first(xs: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    return [torch.zeros_like(x) if rank else x.view_as(x) for rank, x in enumerate(xs)]


PRIMITIVES: Mapping[Primitive, Callable[[Sequence[Tensor], Wire], list[Tensor]]] = {
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


def _total(xs: Sequence[Tensor], wire: Wire) -> Tensor:
    """The sum over the ranks, in the dtype of the wire."""
    first, *others = (wire.widened(x) for x in _alike(xs))
    total = first.clone()
    for other in others:
        total += other
    return total


def _parts(whole: Tensor, cut: Cut, size: int) -> list[Tensor]:
    return [take(whole, cut.dim, cut.split, rank, size).clone() for rank in range(size)]


def _alike(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    kinds = {(tuple(x.shape), x.dtype) for x in xs}
    if len(kinds) > 1:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in xs)
        raise VerifyError(
            f"the {len(xs)} ranks bring different tensors to one collective: {found}; processes "
            "would hang or mix memory. Make the local sizes equal"
        )
    return xs


def _parted(xs: Sequence[Tensor], cut: Cut) -> Sequence[Tensor]:
    """`xs`, if they are alike but for the lengths that `cut` gives them; processes would hang."""
    dim = cut.dim % xs[0].dim()
    fit = fitted_part(cut.split, xs[0].size(dim), dim, 0, len(xs))
    lengths = [fit.local_length(rank, len(xs)) for rank in range(len(xs))]
    if [x.size(dim) for x in xs] == lengths:
        _alike([x.narrow(dim, 0, min(lengths)) for x in xs])
        return xs
    return _alike(xs)
