"""What an FX graph says of its nodes: which tensors a node makes, and which value it stands for."""

from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import fx

__all__ = ["Value", "results_of", "source_of"]

Value: TypeAlias = tuple[fx.Node, int]
"""A tensor: the node that makes it and which of its results it is."""


def source_of(node: fx.Node) -> Value:
    """The value that `node` stands for: itself, or a result of the node it takes an item of."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        origin = node.args[0]
        if isinstance(origin, fx.Node) and isinstance(node.args[1], int):
            return origin, node.args[1]
    return node, 0


def results_of(node: fx.Node) -> dict[int, torch.Tensor]:
    """The tensors that a node makes, by result number."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return {0: val}
    if isinstance(val, tuple | list):
        items = cast("Sequence[object]", val)
        return {k: item for k, item in enumerate(items) if isinstance(item, torch.Tensor)}
    return {}
