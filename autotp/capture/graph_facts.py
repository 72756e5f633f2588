"""What an FX graph says of its nodes: which tensors a node makes, which value it stands for, and
where in the model it comes from.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = ["Value", "op_name", "results_of", "source_of", "whereabouts"]

_LIBRARY = str(PurePath(str(torch.__file__)).parent)
_CODE_LINE = re.compile(r'File "([^"]+)", line (\d+), in .*\n\s*(\S.*)')

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


def op_name(target: object) -> str:
    """The name of an op without its overload, e.g. `autotp::copy`; empty for what is not one."""
    return target.name().split(".")[0] if isinstance(target, OpOverload) else ""


def whereabouts(node: fx.Node, flat: str = "") -> str:
    """Where a node comes from: its name and op, its module's path, the model's source line.

    Example: `down = aten.linear at model.layers.0.mlp (mlp.py:9: `return self.down(x)`)`; where its
    name in the flat graph, `flat`, is another, that stands in front.
    """
    op = op_name(node.target).replace("::", ".") or str(node.target)
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    source = _source_line(node.meta.get("stack_trace") or "")
    name = node.name if flat in ("", node.name) else f"{flat} ({node.name})"
    return f"{name} = {op}{f' at {path}' if path else ''}{source}"


def _source_line(trace: str) -> str:
    """The last line of the model's own code, of a library's if there is no other."""
    lines: list[tuple[str, str, str]] = _CODE_LINE.findall(trace)
    own = [line for line in lines if _LIBRARY not in line[0]] or lines
    return f" ({PurePath(own[-1][0]).name}:{own[-1][1]}: `{own[-1][2]}`)" if own else ""
