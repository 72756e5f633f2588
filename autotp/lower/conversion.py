"""The nodes that change a value's placement: `torch.ops.autotp` ops, or plain collectives.

A graph with gradients needs ops whose backward is the conjugate. A
graph without gradients gets functional collectives with an explicit wait, which every tool for
torch's own collectives understands.
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

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Target:
    """The process group that the graph is for, and the dtype of its sums.

    - `reduce_dtype`: the dtype of sums over the group; None: the value's own dtype.
    - `rank`: the rank whose sizes are written where shards are uneven; otherwise the graphs of all
      ranks are equal.
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
    find_split: Callable[[Placement], Split],
    to: Target,
    bounds: fx.Node | None = None,
) -> fx.Node:
    """Append the node that converts `node` from `source` to `target`.

    - `find_split`: the split of the value's dim in a split placement.
    - `bounds`: the node of the ends of row groups, for a grouped placement.
    """
    op = CONVERSIONS[(source.kind, target.kind)]
    if not to.training and op.forward == ALL_REDUCE:
        return _emit_all_reduce(node, to)
    if not to.training and op.forward == ALL_GATHER and _is_block(find_split(source), to.tp):
        return _emit_all_gather(node, source.dim, to)
    args: list[Any] = [node]
    for placement in (source, target):
        if placement.is_grouped:
            args += [bounds, placement.dim]
    for placement in (source, target):
        if placement.is_split:
            args += [placement.dim, list(find_split(placement).encode())]
    keywords: dict[str, Any] = {}
    if op.sums and to.reduce_dtype is not None:
        keywords["dtype"] = to.reduce_dtype
    function = getattr(torch.ops.autotp, op.op).default
    return node.graph.create_node(
        "call_function", function, (*args, to.group), keywords, name=f"{node.name}_{op.op}"
    )


def _is_block(split: Split, tp: int) -> bool:
    """Whether all shards are contiguous and equally long; else the autotp op interleaves them."""
    return split.is_block(tp) and split.is_even(tp) and split.is_exact(tp)


def _emit_all_gather(node: fx.Node, dim: int, to: Target) -> fx.Node:
    """Gather shards along dim 0, then move them to dim `dim`."""
    new = _emit_after(node, _aten.contiguous.default)
    new = _emit_after(new, _c10d.all_gather_into_tensor.default, to.tp, to.group)
    new = _emit_after(new, _c10d.wait_tensor.default)
    if dim == 0:
        return new
    shards = _emit_after(new, _aten.unflatten.int, 0, [to.tp, -1])
    moved = _emit_after(shards, _aten.movedim.int, 0, dim)
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
    """A call of `function` on `node`, with a name that no other node has."""
    name = f"{node.name}_{function.__name__.partition('.')[0]}"
    return node.graph.create_node("call_function", function, (node, *args), name=name)
