"""Grouped rows: those of a rank's own groups moved to the front, and back to where they were.

One idea: sizes stay those of the whole, since how many rows a rank has only the values know. So
nothing waits for the device, graphs can be recorded, and memory does not depend on the data. Groups
end at `bounds`; ranks have whole groups in order, and the last one has all rows after the last
group too. `localise_index` is for rows that are looked up one by one, in a table cut along them.
"""

import torch
from torch import Tensor

from autotp.algebra.split import share

__all__ = ["localise_index", "find_own_bounds", "move_rows_back", "move_rows_first"]


def move_rows_first(x: Tensor, bounds: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The rows of the groups of `rank` of `ranks`, then zeros."""
    start, stop = _own(bounds, x.size(dim), rank, ranks)
    at = torch.arange(x.size(dim), device=x.device)
    return _kept(at < stop - start, x.index_select(dim, (at + start) % x.size(dim)), dim)


def move_rows_back(x: Tensor, bounds: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The rows that come first where they belong, zeros elsewhere.

    sum(rows_back(rows_first(x, b, d, rank, n), b, d, rank, n) for rank in range(n))  # x
    """
    start, stop = _own(bounds, x.size(dim), rank, ranks)
    at = torch.arange(x.size(dim), device=x.device)
    own = (at >= start) & (at < stop)
    return _kept(own, x.index_select(dim, (at - start) % x.size(dim)), dim)


def find_own_bounds(bounds: Tensor, rank: int, ranks: int) -> Tensor:
    """Where each group of `rank` ends, counted from its own first row."""
    first, count = share(bounds.numel(), ranks, rank)
    own = bounds[first : first + count]
    return own - bounds[first - 1] if first else own.clone()


def localise_index(
    index: Tensor, size: int, rank: int, ranks: int, *, absent: bool
) -> tuple[Tensor, Tensor]:
    """Where the rows that `index` names, of `size`, are in the part of `rank`; and which are not.

    local_index(tensor([1, 4, 9]), 6, 1, 2, absent=False)  # [0, 1, 8], [True, False, True]

    Constraints:
    - What another rank has becomes a row of this one, to be looked up and left.
    - What no rank has stays outside of the part, so that a lookup of it fails as in the whole
      table; `absent`: it stands for no row, and does not fail.
    """
    start, length = share(size, ranks, rank)
    local = index - start
    others = (local < 0) | (local >= length)
    own = local.clamp(0, length - 1)
    if not absent:
        own = own.add(index.div(size, rounding_mode="floor"), alpha=size)
    return own, others


def _own(bounds: Tensor, size: int, rank: int, ranks: int) -> tuple[Tensor | int, Tensor | int]:
    """The first row of `rank`, and the first after its last."""
    first, count = share(bounds.numel(), ranks, rank)
    stop = size if rank == ranks - 1 else bounds[first + count - 1]
    return bounds[first - 1] if first else 0, stop


def _kept(own: Tensor, x: Tensor, dim: int) -> Tensor:
    """`x` with zeros but for its `own` rows, whatever the others hold."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.where(own.view(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))
