"""Relates the nodes of a rewritten graph to the values of the captured program."""

from collections.abc import Iterator
from typing import TypeAlias

from torch import fx, nn

from autotp.algebra.placement import REPLICATED
from autotp.capture.graph_facts import describe_node, name_op
from autotp.capture.program import Program
from autotp.records.trace import Trace, TracedValue
from autotp.runtime.variant import Variant
from autotp.verification.simulate import OUTPUT, RankGraph, find_flat_name

Value: TypeAlias = tuple[str, int]
"""A value of the captured program: the node, and the number of the result."""


def build_full_graph(model: nn.Module, program: Program) -> RankGraph:
    """The captured program on the unsharded model, as the graph of a single rank."""
    graph = program.graph
    return RankGraph(model, graph, {}, {node: node.name for node in graph.nodes}, program.lifted)


class EmittedGraph:
    """The emitted nodes: which values of the program they are, and which nodes read them."""

    def __init__(self, variant: Variant, program: Program, trace: Trace) -> None:
        """The nodes of `variant`, related to `program` by `trace`."""
        self.variant, self.traced = variant, trace.values
        self.program = {node.name: node for node in program.graph.nodes}
        self.values = {node.name: _find_value(node) for node in program.graph.nodes}
        self.placed = {self.find_value(traced) for traced in trace.values.values()}
        self.nodes: dict[str, fx.Node] = {}
        self.readers: dict[str, list[str]] = {}
        outlined = variant.outlined
        for path, graph in (*outlined.layers.items(), ("", outlined.root)):
            self._add(path, graph)

    def find_traced(self, name: str) -> TracedValue | None:
        """The traced value of an emitted node; None if it has no counterpart or undefined values.

        Constraints: nodes that the program has but the trace does not (values that depend on no
        parameter, parameters as stored) are replicated.
        """
        node, same = self.nodes.get(name), self.program.get(name)
        if node is None or "::empty" in name_op(node.target) or "_empty" in name_op(node.target):
            return None
        if name in self.traced or same is None or same.op != node.op:
            return self.traced.get(name)
        stored = node.op == "get_attr"
        kept = self.values[name] not in self.placed and same.target == node.target
        return TracedValue(name, 0, REPLICATED, None) if stored or kept else None

    def find_value(self, traced: TracedValue) -> Value:
        """The value of the program that corresponds to an emitted one."""
        own = self.values.get(traced.origin, (traced.origin, 0))
        return (own[0], traced.item) if own[1] == 0 else own

    def _add(self, path: str, graph: fx.Graph) -> None:
        origin = self.variant.outlined.origin
        for node in graph.nodes:
            if not _is_layer_boundary(path, node):
                name = find_flat_name(origin, path, node)
                self.nodes.setdefault(name, node)
                for operand in node.all_input_nodes:
                    self.readers.setdefault(find_flat_name(origin, path, operand), []).append(name)

    def find_consumers(self, value: Value, reader: str) -> frozenset[str]:
        """The nodes of the program that read `value` through the emitted node `reader`."""
        traced = self.traced.get(reader)
        if reader == OUTPUT:
            return frozenset([reader])
        if traced is not None and self.find_value(traced) != value:
            return frozenset([self.find_value(traced)[0]])
        if name_op(self.nodes[reader].target) == "aten::sym_size":
            return frozenset()
        found = (self.find_consumers(value, further) for further in self.readers.get(reader, ()))
        return frozenset().union(*found)

    def is_conversion(self, traced: TracedValue, reader: str) -> bool:
        """Whether the emitted node `reader` only changes the placement of what it reads."""
        result = self.traced.get(reader)
        return result is not None and self.find_value(result) == self.find_value(traced)

    def describe(self, name: str) -> str:
        """The emitted node `name`: its op, module path, source line, and the values it reads."""
        traced = self.find_traced(name)
        if self.nodes[name].op == "get_attr" and traced is not None:
            return f"{name} = {self.program[traced.origin].target}"
        text = describe_node(self.nodes[name], name)
        placed = [(n, t) for n in self._list_operands(name) if (t := self.find_traced(n))]
        if not placed:
            return text
        gone = self._find_missing({self.find_value(traced) for _, traced in placed})
        missing = f" (planned, but not in the graph: {', '.join(gone)})" if gone else ""
        return f"{text}, which reads {', '.join(f'{n} {t.placement}' for n, t in placed)}{missing}"

    def _find_missing(self, values: set[Value]) -> list[str]:
        """Planned conversions of `values` that the graph does not contain."""
        absent = ((n, t) for n, t in self.traced.items() if n not in self.nodes)
        return [f"{name} {t.placement}" for name, t in absent if self.find_value(t) in values]

    def _list_operands(self, name: str) -> Iterator[str]:
        return (value for value, readers in self.readers.items() if name in readers)


def _find_value(node: fx.Node) -> Value:
    """The value of a node of the program: its own, or for a getitem the result that it selects."""
    origin = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if isinstance(origin, fx.Node) and isinstance(index := node.args[1], int):
        return origin.name, index
    return node.name, 0


def _is_layer_boundary(path: str, node: fx.Node) -> bool:
    """Whether a node only passes values into or out of a layer."""
    return node.op == "call_module" or bool(path and node.op in ("placeholder", "output"))
