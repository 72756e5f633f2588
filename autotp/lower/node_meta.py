"""What graphs that run keep of their nodes' meta, each distinct value once.

The layers of a model say the same: kept node by node, shapes and source lines would take more
memory than the code.
"""

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from autotp.capture.graph_facts import find_expression

__all__ = ["MetaPool"]


@dataclass(slots=True)
class MetaPool:
    """The values kept so far: what a value says to the value.

    Example: `kept.share_meta(node)` has the very `val` that an earlier node of the same shape has.
    """

    known: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])

    def share_meta(self, node: fx.Node) -> dict[str, Any]:
        """The part of `node.meta` that is kept: `val`, `stack_trace`, `nn_module_stack`."""
        kept = dict[str, Any]()
        if "val" in node.meta:
            val = node.meta["val"]
            key = _describe_value(val)
            kept["val"] = val if key is None else self.known.setdefault(key, val)
        if trace := node.meta.get("stack_trace"):
            kept["stack_trace"] = sys.intern(trace)
        if stack := node.meta.get("nn_module_stack"):
            kept["nn_module_stack"] = self.known.setdefault(tuple(stack.items()), stack)
        return kept


def _describe_value(val: object) -> Hashable:
    """All that a fake tensor says, its sizes as expressions; None for other values.

    Whose memory it is, it says no more: what reads graphs that run makes samples of their own.
    """
    if type(val) is not FakeTensor or val.layout != torch.strided:
        return None
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    sizes = tuple(find_expression(n) for n in numbers)
    return (sizes, val.dtype, val.device, val.requires_grad, id(val.fake_mode))
