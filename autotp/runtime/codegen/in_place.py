"""All-reduces in place: a partial sum without other readers may be overwritten.

The functional collective copies its operand first. In the graph that runs (not in the one that is
planned, verified and shown), it is replaced if the operand is a fresh result without other readers.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autotp.runtime.codegen.bindings import sample_arguments

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """Start the sum over the group in place of `x`; a compiler decides for itself."""
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return _ops.all_reduce(x, op, group)
    return _ops.all_reduce_(x, op, group)


def reduce_in_place(graph: fx.Graph) -> None:
    """Let all-reduces of `graph` overwrite operands without other readers."""
    for node in graph.find_nodes(op="call_function", target=_ops.all_reduce.default):
        operand = node.args[0]
        if isinstance(operand, fx.Node) and len(operand.users) == 1 and _is_fresh(operand):
            node.target = all_reduce


def _is_fresh(node: fx.Node) -> bool:
    """Whether the node's result has its own memory, by its schema and by a run on samples."""
    op: Any = node.target
    given = sample_arguments(node)
    if given is None or not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    if any(r.alias_info for r in op._schema.returns):  # pyright: ignore[reportPrivateUsage]
        return False
    with torch.no_grad():
        result = op(*given[0], **given[1])
    operands = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    return isinstance(result, Tensor) and not any(_shares_memory(result, x) for x in operands)


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    # private: torch has no public way to ask it of tensors without memory
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
