"""The node meta of the graphs that run, with each distinct value stored once.

The layers of a model have equal shapes and source lines: stored per node, they would take more
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


@dataclass(slots=True)
class MetaPool:
    """The distinct meta values so far, by their contents.

    Example: `pool.share_meta(node)` has the same `val` object as an earlier node of that shape.
    """

    known: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])

    def share_meta(self, node: fx.Node) -> dict[str, Any]:
        """The meta to store for `node`: `val`, `stack_trace`, `nn_module_stack`."""
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
    """The contents of a fake tensor, with sizes as expressions; None for other values.

    Storage identity is left out: whatever reads the graphs that run makes samples of its own.
    """
    if type(val) is not FakeTensor or val.layout != torch.strided:
        return None
    numbers = (*val.shape, *val.stride(), val.storage_offset())
    sizes = tuple(find_expression(n) for n in numbers)
    return (sizes, val.dtype, val.device, val.requires_grad, id(val.fake_mode))
