"""Grouped rows: moves the rows of a rank's groups to the front, and back.

Tensors keep the full size, because the number of rows per rank depends on the values. So nothing
waits for the device, CUDA graphs can be recorded, and memory does not depend on the data. Groups
end at `bounds`; each rank has complete groups, in order, and the last rank also has all rows after
the last group. `localise_index` is for lookups of single rows in an embedding sharded along them.
"""

import torch
from torch import Tensor

from autotp.algebra.split import share


def move_rows_first(x: Tensor, bounds: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Move the rows of the groups of `rank` of `ranks` to the front, followed by zeros."""
    start, stop = _find_own_range(bounds, x.size(dim), rank, ranks)
    at = torch.arange(x.size(dim), device=x.device)
    return _mask_rows(at < stop - start, x.index_select(dim, (at + start) % x.size(dim)), dim)


def move_rows_back(x: Tensor, bounds: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Move the first rows back to their places, with zeros elsewhere.

    sum(move_rows_back(move_rows_first(x, b, d, rank, n), b, d, rank, n) for rank in range(n))  # x
    """
    start, stop = _find_own_range(bounds, x.size(dim), rank, ranks)
    at = torch.arange(x.size(dim), device=x.device)
    own = (at >= start) & (at < stop)
    return _mask_rows(own, x.index_select(dim, (at - start) % x.size(dim)), dim)


def find_own_bounds(bounds: Tensor, rank: int, ranks: int) -> Tensor:
    """Find where each group of `rank` ends, counted from the rank's first row."""
    first, count = share(bounds.numel(), ranks, rank)
    own = bounds[first : first + count]
    return own - bounds[first - 1] if first else own.clone()


def localise_index(
    index: Tensor, size: int, rank: int, ranks: int, *, absent: bool
) -> tuple[Tensor, Tensor]:
    """Localise `index` into `size` rows for `rank`; also return which rows other ranks have.

    localise_index(tensor([1, 4, 9]), 6, 1, 2, absent=False)  # [0, 1, 8], [True, False, True]

    Constraints:
    - A row of another rank is replaced by a row of this one, whose result is masked.
    - A row that no rank has stays out of range, so that its lookup fails as in the full embedding;
      with `absent`, it stands for no row and does not fail.
    """
    start, length = share(size, ranks, rank)
    local = index - start
    others = (local < 0) | (local >= length)
    own = local.clamp(0, length - 1)
    if not absent:
        own = own.add(index.div(size, rounding_mode="floor"), alpha=size)
    return own, others


def _find_own_range(
    bounds: Tensor, size: int, rank: int, ranks: int
) -> tuple[Tensor | int, Tensor | int]:
    """Find the first row of `rank`, and the end of its rows."""
    first, count = share(bounds.numel(), ranks, rank)
    stop = size if rank == ranks - 1 else bounds[first + count - 1]
    return bounds[first - 1] if first else 0, stop


def _mask_rows(own: Tensor, x: Tensor, dim: int) -> Tensor:
    """Zero all rows of `x` but the `own` ones, whatever values they have (NaN included)."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(own.view(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))
