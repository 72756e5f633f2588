"""Facts about nodes of an FX graph: the tensors they make, their modules and their source lines."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload

TORCH: Final = os.path.dirname(torch.__file__) + os.sep
"""The folder with torch's own code."""

_CALL = re.compile(r"@\d+")
_NO_STACK = "_empty_nn_module_stack_from_metadata_hook"
# not the generated code of a nested graph, whose file name differs between processes
_FRAME = re.compile(r'File "([^"<]+)", line (\d+), in .*(?:\n +(?!File ")(\S.*))?')

Value: TypeAlias = tuple[fx.Node, int]
"""A tensor: the node that makes it, and the number of the result."""


class SourceLine(NamedTuple):
    """A line of source code."""

    file: str
    number: int
    code: str

    @property
    def place(self) -> str:
        """File and line, e.g. `mlp.py:9`."""
        return f"{PurePath(self.file).name}:{self.number}"

    def __str__(self) -> str:
        """With the code, e.g. ``mlp.py:9: `return self.down(x)` ``."""
        return f"{self.place}: `{self.code}`" if self.code else self.place


def find_source(node: fx.Node) -> Value:
    """The value that `node` is: its own, or for a getitem the result that it selects."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        origin = node.args[0]
        if isinstance(origin, fx.Node) and isinstance(node.args[1], int):
            return origin, node.args[1]
    return node, 0


def list_results(node: fx.Node) -> dict[int, torch.Tensor]:
    """The tensors that a node makes, by result number."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return {0: val}
    if isinstance(val, tuple | list):
        items = cast("Sequence[object]", val)
        return {k: item for k, item in enumerate(items) if isinstance(item, torch.Tensor)}
    return {}


def read_argument(node: fx.Node, name: str) -> Any:
    """The value of the argument called `name`; its default if the call omits it."""
    schema: Any = getattr(node.target, "_schema", None)
    for at, known in enumerate(schema.arguments if schema else ()):
        if known.name == name:
            default = known.default_value
            return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)
    return None


def find_expression(size: Any) -> Any:
    """The sympy expression of a symbolic size; a plain number unchanged."""
    symbolic = isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)
    return size.node.expr if symbolic else size


def spell_sizes(node: fx.Node) -> list[str]:
    """The sizes of the tensor that a node makes, as text: comparing symbols adds no guard.

    Example: `["s0", "8"]`.
    """
    return [str(size) for size in node.meta["val"].shape]


def name_op(target: object) -> str:
    """The name of an op without its overload, e.g. `aten::linear`; empty for other targets."""
    return target.name().split(".")[0] if isinstance(target, OpOverload) else ""


def list_module_paths(node: fx.Node) -> list[str]:
    """The paths of the modules in which `node` was made, outermost first; empty if none is known.

    Example: `["", "model", "model.layers.0", "model.layers.0.mlp"]`.
    """
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return [_CALL.sub("", path) for key, (path, _) in stack.items() if key != _NO_STACK]


def find_module_path(node: fx.Node) -> str:
    """The path of the innermost module in which `node` was made; empty for the root, or if none is
    known.

    Example: `model.layers.0.mlp`.
    """
    return next(reversed(list_module_paths(node)), "")


def find_source_line(node: fx.Node) -> SourceLine | None:
    """The line of the model's code that made `node`; a line of torch if there is no other.

    Example: `SourceLine("/models/mlp.py", 9, "return self.down(x)")`.
    """
    frames = cast("list[tuple[str, str, str]]", _FRAME.findall(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    return SourceLine(own[-1][0], int(own[-1][1]), own[-1][2]) if own else None


def describe_node(node: fx.Node, flat: str = "") -> str:
    """Where a node comes from: its name and op, the path of its module, the model's source line.

    Example: `down = aten.linear at model.layers.0.mlp (mlp.py:9: `return self.down(x)`)`. If its
    name in the flat graph, `flat`, differs, that name comes first.
    """
    op = name_op(node.target).replace("::", ".") or str(node.target)
    path, line = find_module_path(node), find_source_line(node)
    source = f" ({line})" if line else ""
    name = node.name if flat in ("", node.name) else f"{flat} ({node.name})"
    return f"{name} = {op}{f' at {path}' if path else ''}{source}"
