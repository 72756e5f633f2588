"""What one process does for each primitive of the conversion table: one function each.

A primitive maps one tensor to one tensor. Those that communicate run exactly one functional
collective and wait for it, so that torch.compile and dispatch modes see both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autotp.core.placement import Primitive
from autotp.core.split import Split
from autotp.run.blocks import join, put, take
from autotp.run.crossing import crossed
from autotp.run.group import checked, rank_of, size_of

__all__ = ["PRIMITIVES", "Cut", "Wire"]

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim and how it is cut."""

    dim: int
    split: Split

    def lies_in_rank_order(self, num_dims: int) -> bool:
        """Whether the ranks' parts, one after the other in memory, are the whole tensor."""
        lone = self.split.segments[0]
        repeats = self.split.outer * lone.outer * len(self.split.segments)
        return self.dim % num_dims == 0 and repeats == 1 and lone.axis != 0


@dataclass(frozen=True, slots=True)
class Wire:
    """What a primitive needs besides its tensor.

    - `cut`: of the sliced, gathered or scattered dim; for all_to_all, of its input.
    - `to`: for all_to_all, of its result; otherwise the same as `cut`.
    - `dtype`: what sums are computed in; None for the tensor's own.
    """

    group: str
    cut: Cut
    to: Cut
    dtype: torch.dtype | None = None

    def reversed(self) -> "Wire":
        """The wire of the backward pass."""
        return replace(self, cut=self.to, to=self.cut)


def _identity(x: Tensor, wire: Wire) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, wire: Wire) -> Tensor:
    group = checked(wire.group)
    summands = x.to(wire.dtype or x.dtype).contiguous()
    return _ops.wait_tensor(_ops.all_reduce(summands, "sum", group)).to(x.dtype)


def _all_gather(x: Tensor, wire: Wire) -> Tensor:
    parts = size_of(wire.group)
    rows = _ops.all_gather_into_tensor(x.contiguous(), parts, wire.group)
    stacked = _ops.wait_tensor(rows)  # (parts * first, …)
    if wire.cut.lies_in_rank_order(x.dim()):
        return stacked
    return join(stacked.chunk(parts), wire.cut.dim, wire.cut.split)


def _reduce_scatter(x: Tensor, wire: Wire) -> Tensor:
    parts = size_of(wire.group)
    pieces = [take(x, wire.cut.dim, wire.cut.split, rank, parts) for rank in range(parts)]
    in_order = wire.cut.lies_in_rank_order(x.dim())
    stacked = x if in_order else torch.cat(pieces)  # (parts * first, …)
    summands = stacked.to(wire.dtype or x.dtype).contiguous()
    local = _ops.reduce_scatter_tensor(summands, "sum", parts, wire.group)
    return _ops.wait_tensor(local).to(x.dtype)


def _all_to_all(x: Tensor, wire: Wire) -> Tensor:
    parts, cut, to = size_of(wire.group), wire.cut, wire.to
    first, second = cut.split, to.split
    if (cut.dim - to.dim) % x.dim() == 0:
        first, second = crossed(first, second, x.size(cut.dim) * parts, cut.dim, parts)
    pieces = [take(x, to.dim, second, rank, parts) for rank in range(parts)]
    sizes = [1] * parts
    stacked = _ops.all_to_all_single(torch.stack(pieces), sizes, sizes, wire.group)
    return join(_ops.wait_tensor(stacked).unbind(), cut.dim, first)


def _slice(x: Tensor, wire: Wire) -> Tensor:
    return take(x, wire.cut.dim, wire.cut.split, rank_of(wire.group), size_of(wire.group))


def _pad(x: Tensor, wire: Wire) -> Tensor:
    return put(x, wire.cut.dim, wire.cut.split, rank_of(wire.group), size_of(wire.group))


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
}
