"""One graph per layer, for sharding, checkpointing and compiling layers, and for reading them.

A region (see `outline_regions`) becomes a graph of its own and one `call_module` node of the root.
Identical layers get identical code: fresh graphs, names from modules and ops, inputs `x0, x1, …`,
parameters by their name below the layer, and sizes read inside from the tensors at hand, so that no
integer crosses.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx
from torch.fx.node import Argument, Target, map_arg

from autotp.capture.graph_facts import find_module_path, list_module_paths, name_op
from autotp.lower.node_meta import MetaPool
from autotp.lower.regions import ROOT, SYM_SIZE, Flat, order_regions
from autotp.runtime.layered_graph import LayeredGraph

Arguments: TypeAlias = tuple[Argument, ...]
Named: TypeAlias = dict[str, Argument]


def outline(graph: fx.Graph, kept: MetaPool | None = None) -> LayeredGraph:
    """The flat `graph` as a root and layers; equal meta values are shared through the pool `kept`.

    Example: `outline(program.graph).layers["model.layers.0"].python_code("self").src`.

    Constraints:
    - `graph` is free of mutation: nodes of different regions may change order.
    - The symbolic sizes of `meta["val"]` are this rank's.
    - A layer that cannot run in one piece absorbs the root's nodes in between; layers that depend
      on each other cyclically stay in the root.
    """
    flat = Flat(graph)
    units = order_regions(flat)
    names, kept = _name_nodes(graph), kept or MetaPool()
    root = _Writer(flat, ROOT, names, kept)
    layers: dict[str, fx.Graph] = {}
    origin = root.origin
    for unit in units:
        if isinstance(unit, fx.Node):
            root.copy_node(unit)
        else:
            layer = _Writer(flat, unit, names, kept)
            layers[unit] = layer.write_layer()
            origin |= layer.origin
            root.write_call(unit)
    root.graph.lint()
    return LayeredGraph(root.graph, layers, origin)


@dataclass(slots=True)
class _Writer:
    """Writes the graph of one region."""

    flat: Flat
    path: str
    names: Mapping[fx.Node, str]
    kept: MetaPool
    graph: fx.Graph = field(default_factory=fx.Graph)
    origin: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    new: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def write_layer(self) -> fx.Graph:
        """The complete graph of this layer."""
        for i, node in enumerate(self.flat.needs[self.path]):
            self._record(node, self.graph.create_node("placeholder", f"x{i}"))
        for node in self.flat.members[self.path]:
            self.copy_node(node)
        results = tuple(self.new[node] for node in self.flat.outputs[self.path])
        self.graph.output(results[0] if len(results) == 1 else results)
        self.graph.lint()
        return self.graph

    def copy_node(self, node: fx.Node) -> None:
        """Copy `node` itself."""
        args = map_arg(node.args, self._find_input)
        kwargs = map_arg(node.kwargs, self._find_input)
        self._add_node(node, node.op, node.target, args, kwargs)

    def write_call(self, path: str) -> None:
        """Write a call of the layer at `path`, and its results."""
        args = tuple(self._find_input(node) for node in self.flat.needs[path])
        call = self.graph.create_node("call_module", path, args)
        results = self.flat.outputs[path]
        if len(results) == 1:
            self._record(results[0], call)
            return
        for i, node in enumerate(results):
            self._record(node, self.graph.call_function(operator.getitem, (call, i)))

    def _find_input(self, node: fx.Node) -> fx.Node:
        if node in self.new:
            return self.new[node]
        if node.op == "get_attr":
            target = str(node.target).removeprefix(f"{self.path}.")
            return self._add_node(node, "get_attr", target, (), {})
        source = self.flat.find_source(node, self.path)
        if source is None:
            self.copy_node(node)
            return self.new[node]
        tensor, dim = source
        return self._add_node(node, "call_function", SYM_SIZE, (self._find_input(tensor), dim), {})

    def _add_node(
        self, node: fx.Node, op: str, target: Target, args: Arguments, kwargs: Named
    ) -> fx.Node:
        new = self.graph.create_node(op, target, args, kwargs, name=self.names.get(node))
        self._record(node, new)
        return new

    def _record(self, node: fx.Node, new: fx.Node) -> None:
        new.meta = self.kept.share_meta(node)
        if not list_module_paths(node):
            new.meta.pop("nn_module_stack", None)
        self.origin[new] = node.name
        self.new[node] = new


def _name_nodes(graph: fx.Graph) -> dict[fx.Node, str]:
    """The name of each result: its module's if a leaf module returns it, else its op's."""
    parents = {path for node in graph.nodes for path in list_module_paths(node)[:-1]}
    names = {n: n.name for n in graph.nodes if n.op == "placeholder"}
    for node in graph.nodes:
        if node.op == "call_function":
            names[node] = _name_by_module(node, parents) or _name_by_op(node)
        elif node.target == "self":  # what generated code calls the module itself
            names[node] = "own"
    return names


def _name_by_op(node: fx.Node) -> str:
    name = name_op(node.target) or getattr(node.target, "__name__", "")
    return name.split("::")[-1].strip("_")


def _name_by_module(node: fx.Node, parents: set[str]) -> str:
    path = find_module_path(node)
    name = path.rpartition(".")[2]
    leaves = path not in parents and all(find_module_path(user) != path for user in node.users)
    return name if leaves and name != "self" and not name.isdigit() else ""
