"""What the nodes of a rewritten graph are: which values of the captured program, read by whom."""

from collections.abc import Iterator
from typing import TypeAlias

from torch import fx, nn

from autotp.algebra.placement import REPLICATED
from autotp.capture.graph_facts import describe_node, name_op
from autotp.capture.program import Program
from autotp.records.trace import Trace, TracedValue
from autotp.runtime.variant import Variant
from autotp.verification.simulate import OUTPUT, RankGraph, find_flat_name

__all__ = ["EmittedGraph", "Value", "build_full_graph"]

Value: TypeAlias = tuple[str, int]
"""A value of the captured program: node and which of its results."""


def build_full_graph(whole: nn.Module, program: Program) -> RankGraph:
    """The captured program on the whole model, as the one part of a walk."""
    graph = program.graph
    return RankGraph(whole, graph, {}, {node: node.name for node in graph.nodes}, program.lifted)


class EmittedGraph:
    """What the emitted nodes are: of which values of the program, and who reads them."""

    def __init__(self, variant: Variant, program: Program, trace: Trace) -> None:
        """The nodes of `variant`, which `trace` says what they are of `program`."""
        self.variant, self.traced = variant, trace.values
        self.program = {node.name: node for node in program.graph.nodes}
        self.values = {node.name: _find_value(node) for node in program.graph.nodes}
        self.placed = {self.value(traced) for traced in trace.values.values()}
        self.nodes: dict[str, fx.Node] = {}
        self.readers: dict[str, list[str]] = {}
        outlined = variant.outlined
        for path, graph in (*outlined.layers.items(), ("", outlined.root)):
            self._add(path, graph)

    def of(self, name: str) -> TracedValue | None:
        """What the emitted node is; None for one without a counterpart, or a defined value.

        Constraints: what the trace does not name, yet stands in the program as well (values that
        depend on no parameter, parameters as stored), is whole on every rank.
        """
        node, same = self.nodes.get(name), self.program.get(name)
        if node is None or "::empty" in name_op(node.target) or "_empty" in name_op(node.target):
            return None
        if name in self.traced or same is None or same.op != node.op:
            return self.traced.get(name)
        stored = node.op == "get_attr"
        kept = self.values[name] not in self.placed and same.target == node.target
        return TracedValue(name, 0, REPLICATED, None) if stored or kept else None

    def value(self, traced: TracedValue) -> Value:
        """The value of the program that an emitted one is."""
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

    def consumers(self, value: Value, reader: str) -> frozenset[str]:
        """The nodes of the program that read `value` by way of the emitted node `reader`."""
        traced = self.traced.get(reader)
        if reader == OUTPUT:
            return frozenset([reader])
        if traced is not None and self.value(traced) != value:
            return frozenset([self.value(traced)[0]])
        if name_op(self.nodes[reader].target) == "aten::sym_size":
            return frozenset()
        found = (self.consumers(value, further) for further in self.readers.get(reader, ()))
        return frozenset().union(*found)

    def converts(self, traced: TracedValue, reader: str) -> bool:
        """Whether the emitted node `reader` only changes the placement of what it reads."""
        result = self.traced.get(reader)
        return result is not None and self.value(result) == self.value(traced)

    def described(self, name: str) -> str:
        """The emitted node `name`: op, module path, source line, and what it reads."""
        traced = self.of(name)
        if self.nodes[name].op == "get_attr" and traced is not None:
            return f"{name} = {self.program[traced.origin].target}"
        text = describe_node(self.nodes[name], name)
        placed = [(n, t) for n in self._operands(name) if (t := self.of(n))]
        if not placed:
            return text
        gone = self._gone({self.value(traced) for _, traced in placed})
        missing = f" (planned, but not in the graph: {', '.join(gone)})" if gone else ""
        return f"{text}, which reads {', '.join(f'{n} {t.placement}' for n, t in placed)}{missing}"

    def _gone(self, values: set[Value]) -> list[str]:
        """Conversions of `values` that were planned, of which the graph has no node."""
        absent = ((n, t) for n, t in self.traced.items() if n not in self.nodes)
        return [f"{name} {t.placement}" for name, t in absent if self.value(t) in values]

    def _operands(self, name: str) -> Iterator[str]:
        return (value for value, readers in self.readers.items() if name in readers)


def _find_value(node: fx.Node) -> Value:
    """The value that a node of the program is: itself, or a result of the node it takes it from."""
    origin = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if isinstance(origin, fx.Node) and isinstance(index := node.args[1], int):
        return origin.name, index
    return node.name, 0


def _is_layer_boundary(path: str, node: fx.Node) -> bool:
    """Whether a node only hands values in or out of a layer."""
    return node.op == "call_module" or bool(path and node.op in ("placeholder", "output"))
