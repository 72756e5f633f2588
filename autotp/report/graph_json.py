"""The flat rewritten graph as JSON, for the dry run."""

from typing import Any

import torch
from torch import fx

from autotp.capture.graph_facts import find_module_path
from autotp.records.trace import TracedValue

__all__ = ["graph_to_json"]


def graph_to_json(graph: fx.Graph, values: dict[str, TracedValue]) -> list[dict[str, Any]]:
    """The graph, a node an entry, with each value's module, shape on a rank, and placement."""
    return [_entry(node, values.get(node.name)) for node in graph.nodes]


def _entry(node: fx.Node, traced: TracedValue | None) -> dict[str, Any]:
    val = node.meta.get("val")
    return {
        "name": node.name,
        "op": node.op,
        "target": str(node.target),
        "args": [str(a) for a in node.args],
        "kwargs": {k: str(v) for k, v in node.kwargs.items()},
        "module": find_module_path(node),
        "shape": [str(s) for s in val.shape] if isinstance(val, torch.Tensor) else None,
        "placement": str(traced.placement) if traced else None,
        "origin": traced.origin if traced else None,
    }
