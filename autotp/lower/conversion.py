"""The nodes that change a value's placement: `torch.ops.autotp` ops, or plain collectives.

A graph with gradients needs ops whose backward is the conjugate. One without holds functional
collectives with an explicit wait, which any tool that knows torch's own collectives understands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from autotp.algebra.placement import ALL_GATHER, ALL_REDUCE, CONVERSIONS, Placement
from autotp.algebra.split import Split
from autotp.dtypes import choose_sum_dtype

__all__ = ["Target", "emit_conversion"]

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Target:
    """Whom the graph is for: the group, its size, and how sums are made.

    - `reduce_dtype`: sums over the group are made in it; None: in the value's own dtype.
    - `rank`: whose sizes are written where parts are uneven; elsewhere all ranks' graphs are equal.
    """

    tp: int
    group: str
    training: bool
    reduce_dtype: torch.dtype | None = None
    rank: int = 0


def emit_conversion(
    node: fx.Node,
    source: Placement,
    target: Placement,
    cut: Callable[[Placement], Split],
    to: Target,
    bounds: fx.Node | None = None,
) -> fx.Node:
    """The node, written after all others, that brings `node` from `source` to `target`.

    - `cut`: how the value's dim is cut in a split placement.
    - `bounds`: where groups of rows end, in a grouped one.
    """
    op = CONVERSIONS[(source.kind, target.kind)]
    if not to.training and op.forward == ALL_REDUCE:
        return _emit_all_reduce(node, to)
    if not to.training and op.forward == ALL_GATHER and _is_block(cut(source), to.tp):
        return _emit_all_gather(node, source.dim, to)
    args: list[Any] = [node]
    for placement in (source, target):
        if placement.is_grouped:
            args += [bounds, placement.dim]
    for placement in (source, target):
        if placement.is_split:
            args += [placement.dim, list(cut(placement).encode())]
    keywords: dict[str, Any] = {}
    if op.sums and to.reduce_dtype is not None:
        keywords["dtype"] = to.reduce_dtype
    function = getattr(torch.ops.autotp, op.op).default
    return node.graph.create_node(
        "call_function", function, (*args, to.group), keywords, name=f"{node.name}_{op.op}"
    )


def _is_block(cut: Split, tp: int) -> bool:
    """Whether each rank holds one run of the dim, all of one length: else the autotp op puts the
    parts in place.
    """
    return cut.is_block(tp) and cut.is_even(tp) and cut.is_exact(tp)


def _emit_all_gather(node: fx.Node, dim: int, to: Target) -> fx.Node:
    """Shards gathered along dim 0, then moved to where they belong."""
    new = _emit_after(node, _aten.contiguous.default)
    new = _emit_after(new, _c10d.all_gather_into_tensor.default, to.tp, to.group)
    new = _emit_after(new, _c10d.wait_tensor.default)
    if dim == 0:
        return new
    parts = _emit_after(new, _aten.unflatten.int, 0, [to.tp, -1])
    moved = _emit_after(parts, _aten.movedim.int, 0, dim)
    return _emit_after(moved, _aten.flatten.using_ints, dim, dim + 1)


def _emit_all_reduce(node: fx.Node, to: Target) -> fx.Node:
    own = node.meta["val"].dtype
    wide = choose_sum_dtype(own, to.reduce_dtype)
    if wide != own:
        node = _emit_after(node, _aten.to.dtype, wide)
    new = _emit_after(node, _c10d.all_reduce.default, "sum", to.group)
    new = _emit_after(new, _c10d.wait_tensor.default)
    return new if wide == own else _emit_after(new, _aten.to.dtype, own)


def _emit_after(node: fx.Node, function: OpOverload, *args: Argument) -> fx.Node:
    """A node of `function` on `node`, called after it: no other has its name."""
    name = f"{node.name}_{function.__name__.partition('.')[0]}"
    return node.graph.create_node("call_function", function, (node, *args), name=name)
