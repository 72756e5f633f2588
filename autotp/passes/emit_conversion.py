"""The nodes that change a value's placement: `torch.ops.autotp` ops, or plain collectives.

A graph with gradients needs ops whose backward is the conjugate. One without holds functional
collectives with an explicit wait, which any tool that knows torch's own collectives understands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.core.placement import CONVERSIONS, Placement
from autotp.core.split import Split

__all__ = ["Target", "conversion"]

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
_SUMS = {"all_reduce", "reduce_scatter"}


@dataclass(frozen=True, slots=True)
class Target:
    """Whom the graph is for: the group, its size, and how sums are made.

    - `reduce_dtype`: sums over the group are made in it; None: in the value's own dtype.
    """

    tp: int
    group: str
    training: bool
    reduce_dtype: torch.dtype | None = None


def conversion(
    node: fx.Node,
    source: Placement,
    target: Placement,
    cut: Callable[[Placement], Split],
    to: Target,
) -> fx.Node:
    """The node, written after all others, that brings `node` from `source` to `target`.

    - `cut`: how the value's dim is cut in a split placement.
    """
    op = CONVERSIONS[(source.kind, target.kind)]
    if not to.training and op.forward == "all_reduce":
        return _sum(node, to)
    if not to.training and op.forward == "all_gather" and _is_block(cut(source)):
        return _gather(node, source.dim, to)
    args: list[Any] = [node]
    for placement in (source, target):
        if placement.kind == "S":
            args += [placement.dim, list(cut(placement).encode())]
    keywords: dict[str, Any] = {}
    if _SUMS & {op.forward, op.backward} and to.reduce_dtype is not None:
        keywords["dtype"] = to.reduce_dtype
    function = getattr(torch.ops.autotp, op.op).default
    return node.graph.create_node(
        "call_function", function, (*args, to.group), keywords, name=f"{node.name}_{op.op}"
    )


def _is_block(cut: Split) -> bool:
    """Whether each rank holds one run of the dim: else the autotp op puts the parts in place."""
    return cut.outer == 1 and len(cut.segments) == 1 and cut.segments[0].outer == 1


def _gather(node: fx.Node, dim: int, to: Target) -> fx.Node:
    """Shards gathered along dim 0, then moved to where they belong."""
    call = node.graph.call_function
    new = call(_aten.contiguous.default, (node,))
    new = call(_c10d.all_gather_into_tensor.default, (new, to.tp, to.group))
    new = call(_c10d.wait_tensor.default, (new,))
    if dim == 0:
        return new
    parts = call(_aten.unflatten.int, (new, 0, [to.tp, -1]))
    moved = call(_aten.movedim.int, (parts, 0, dim))
    return call(_aten.flatten.using_ints, (moved, dim, dim + 1))


def _sum(node: fx.Node, to: Target) -> fx.Node:
    call, own = node.graph.call_function, node.meta["val"].dtype
    wider = to.reduce_dtype if to.reduce_dtype not in (None, own) else None
    if wider is not None:
        node = call(_aten.to.dtype, (node, wider))
    new = call(_c10d.all_reduce.default, (node, "sum", to.group))
    new = call(_c10d.wait_tensor.default, (new,))
    return new if wider is None else call(_aten.to.dtype, (new, own))
