"""A variant as a readable Python module: the root's code, then each distinct layer once.

The module can be imported and run: its functions take the modules that store the parameters.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotp.capture.graph_facts import find_module_path
from autotp.runtime.codegen.tidy import name_device, tidy_code, wrap_lines
from autotp.runtime.variant import Variant

_LINE = re.compile(r"^    (?:(?P<name>\w+) = )?(?P<value>.*?)(?:;  (?:\w+ = )+None)?$")
_INDEX = re.compile(r'getattr\(([\w.\[\]]+), "(\d+)"\)')
_CALL = re.compile(r"^(self\.[\w.\[\]]+)\((.*)\)$")
_WORD = re.compile(r"(?<![\w.])\w+(?![\w=])")  # no name of an argument
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_IMPORTS = {
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
}
_OWN_OPS = "torch.ops.autotp."


def write_source(variant: Variant) -> str:
    """Write a Python module with `forward(self, …)`, `layer_0(self, …)` and so on.

    Each function takes the module that stores its parameters, then the graph's inputs. Comments at
    the ends of lines give shapes; letters for sizes that depend on the inputs are explained at the
    top.
    """
    layers = _Layers(variant.outlined.layers)
    sizes = _Sizes(variant.outlined.root)
    root = _Text("forward", variant.outlined.root, sizes, layers.names)
    texts = [root.write(_name_results(variant.program.out_spec))]
    for name, paths in layers.used_by.items():
        body = _Text(name, layers.graphs[name], sizes, {}).write("")
        texts.append(f"# {_list_names(paths)}\n{body}")
    body, device = name_device("\n\n\n".join(texts))
    head = [f"# {variant.key}", "#", *sizes.list_legend(), "", *_write_imports(variant, body)]
    return "\n".join([*head, *(["", device] if device else []), "", "", body]) + "\n"


class _Layers:
    """The distinct layers of a variant, `layer_0` first, and the paths that use each."""

    def __init__(self, graphs: Mapping[str, fx.Graph]) -> None:
        self.names: dict[str, str] = {}
        self.graphs: dict[str, fx.Graph] = {}
        self.used_by: dict[str, list[str]] = {}
        known: dict[str, str] = {}
        for path, graph in graphs.items():
            name = known.setdefault(graph.python_code("self").src, f"layer_{len(known)}")
            self.names[path] = name
            self.graphs.setdefault(name, graph)
            self.used_by.setdefault(name, []).append(path)


class _Sizes:
    """Letters for symbolic sizes: `b` and `s` for the first input's two dims, then `n3`, `n4`."""

    def __init__(self, root: fx.Graph) -> None:
        self.letters: dict[str, str] = {}
        self.places: dict[str, str] = {}
        for node in root.nodes:
            if node.op == "placeholder" and isinstance(val := node.meta.get("val"), torch.Tensor):
                for dim, size in enumerate(val.shape):
                    self._add_symbol(str(size), f"{node.name}.shape[{dim}]")

    def _add_symbol(self, symbol: str, place: str) -> None:
        if not _SYMBOL.fullmatch(symbol) or symbol in self.letters:
            return
        count = len(self.letters)
        letter = "bs"[count] if count < 2 and place.endswith(f"[{count}]") else f"n{count + 1}"
        self.letters[symbol] = letter
        self.places[letter] = place

    def list_legend(self) -> Iterator[str]:
        """List the comment lines that explain the letters."""
        yield "# Comments give shapes. Each function takes the module that stores its parameters."
        for letter, place in self.places.items():
            yield f"# {letter} = {place}"

    def format_shape(self, node: fx.Node) -> str:
        """Format the shape of the node's value, e.g. `(b, s, 64)`; empty if it is not a tensor."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return ""
        return f"({', '.join(self._format_size(str(size)) for size in val.shape)})"

    def _format_size(self, size: str) -> str:
        return _SYMBOL.sub(lambda match: self.letters.get(match[0], match[0]), size)


@dataclass(slots=True)
class _Text:
    """Writes one function."""

    name: str
    graph: fx.Graph
    sizes: _Sizes
    calls: Mapping[str, str]

    def write(self, results: str) -> str:
        """Write the function's code; `results` names what it returns."""
        header, *body = self.graph.python_code("self").src.strip().split("\n")
        lines = [header.replace("def forward(", f"def {self.name}("), *self._list_inputs()]
        nodes = {node.name: node for node in self.graph.nodes}
        attributes: dict[str, str] = {}
        place = ""
        for name, value in map(_split_line, body):
            node = nodes.get(name)
            value = tidy_code(_inline_attributes(_INDEX.sub(r"\1[\2]", value), attributes))
            if node is not None and node.op == "get_attr":
                attributes[name] = value
                continue
            if node is not None and (new := self._find_module(node) or place) != place:
                place = new
                lines += ["", f"    # {place}"]
            lines.append(self._write_line(node, value, results))
        return "\n".join(lines)

    def _list_inputs(self) -> Iterator[str]:
        """List a comment with the shapes of the function's inputs."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        shapes = [f"{node.name} {self.sizes.format_shape(node)}" for node in inputs]
        if shapes:
            yield f"    # {', '.join(shapes)}"

    def _write_line(self, node: fx.Node | None, value: str, results: str) -> str:
        if node is None:
            return f"    {value}" + (f"  # {results}" if results else "")
        if node.op == "call_module":
            value = _CALL.sub(rf"{self.calls[str(node.target)]}(\1, \2)", value)
        return wrap_lines(node.name, value, self.sizes.format_shape(node))

    def _find_module(self, node: fx.Node) -> str:
        """Find the module of the node: in a layer, the layer's child."""
        if node.op == "call_module":
            return str(node.target).rpartition(".")[0]
        path = find_module_path(node)
        if self.calls:
            return path
        inner = re.sub(r"^.*?\.\d+(\.|$)", "", path)
        return inner.split(".")[0]


def _split_line(line: str) -> tuple[str, str]:
    """Split a generated line into the assigned name, if any, and the value without `x = None`."""
    match = _LINE.match(line)
    assert match is not None
    return match["name"] or "", match["value"]


def _inline_attributes(value: str, attributes: Mapping[str, str]) -> str:
    def substitute(match: re.Match[str]) -> str:
        return attributes.get(match[0], match[0])

    return re.sub(r"""(?<![\w.'"])\w+\b(?! = |\()""", substitute, value) if attributes else value


def _name_results(spec: pytree.TreeSpec) -> str:
    context = spec.context
    named = isinstance(context, list) and all(isinstance(name, str) for name in context)
    return ", ".join(context) if named else ""


def _list_names(paths: list[str]) -> str:
    """List the paths, a range in short: `model.layers.0 … model.layers.31 (32 layers)`."""
    if len(paths) < 3:
        return ", ".join(paths)
    parts = [path.rpartition(".") for path in paths]
    numbers = [int(number) for _, _, number in parts]
    row = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    one_list = len({parent for parent, _, _ in parts}) == 1
    shown = f"{paths[0]} … {paths[-1]}" if row and one_list else ", ".join(paths)
    return f"{shown} ({len(paths)} layers)"


def _write_imports(variant: Variant, text: str) -> Iterator[str]:
    found: dict[str, object] = {}
    for graph in (variant.outlined.root, *variant.outlined.layers.values()):
        found |= graph.python_code("self").globals
    names = set(_WORD.findall(text))
    used = sorted(names & found.keys() - {"torch"})
    yield from (_write_import(name, found[name]) for name in used)
    yield "import torch"
    if _OWN_OPS in text:
        yield "import autotp  # defines torch.ops.autotp"


def _write_import(name: str, found: object) -> str:
    module, attribute = getattr(found, "__module__", ""), getattr(found, "__name__", name)
    return _IMPORTS.get(name) or f"from {module} import {attribute} as {name}"
