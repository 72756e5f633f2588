"""The flat rewritten graph as JSON, for the dry run."""

from typing import Any

import torch
from torch import fx

from autotp.capture.graph_facts import find_module_path
from autotp.records.trace import TracedValue


def graph_to_json(graph: fx.Graph, values: dict[str, TracedValue]) -> list[dict[str, Any]]:
    """List one entry per node, with the value's module, local shape and placement."""
    return [_describe_node(node, values.get(node.name)) for node in graph.nodes]


def _describe_node(node: fx.Node, traced: TracedValue | None) -> dict[str, Any]:
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
