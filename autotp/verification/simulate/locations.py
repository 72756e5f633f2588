"""Where a node comes from, in words: for every message about a graph."""

from torch import fx

from autotp.capture.graph_facts import module_path, op_name, source_line

__all__ = ["whereabouts"]


def whereabouts(node: fx.Node, flat: str = "") -> str:
    """Where a node comes from: its name and op, its module's path, the model's source line.

    Example: `down = aten.linear at model.layers.0.mlp (mlp.py:9: `return self.down(x)`)`; where its
    name in the flat graph, `flat`, is another, that stands in front.
    """
    op = op_name(node.target).replace("::", ".") or str(node.target)
    path, line = module_path(node), source_line(node)
    source = f" ({line})" if line else ""
    name = node.name if flat in ("", node.name) else f"{flat} ({node.name})"
    return f"{name} = {op}{f' at {path}' if path else ''}{source}"
