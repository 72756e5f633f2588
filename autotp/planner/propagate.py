"""Propagate: the dims and rule of every node that depends on a parameter.

One pass forward over the program: a parameter's dims are fresh, a rule unites and refines dims, and
the forest carries refinements back. Nodes that depend on no parameter (masks, positions, rotary
tables) need no rule: they are replicated, and each use of one gets dims of its own, so that a
table shared by all layers does not unite their axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from autotp.algebra.axis import Dim, Forest
from autotp.capture.graph_facts import (
    Value,
    find_module_path,
    find_source,
    find_source_line,
    list_results,
)
from autotp.capture.program import Program
from autotp.capture.sizes import Sizes
from autotp.errors import UnknownOpError
from autotp.oprules.derive.derive import Call, apply_row
from autotp.oprules.derive.order import Orders
from autotp.oprules.discover.call import OpaqueCall, describe_call
from autotp.oprules.discover.discover import bind_row, discover_rule
from autotp.oprules.rule import Discovery, Factor, NodeRule, Operand, Row
from autotp.oprules.rulebook import Rulebook
from autotp.planner.analysis import Analysis, Use, find_gradient_targets


def propagate(
    program: Program,
    parameters: Sequence[str],
    rulebook: Rulebook,
    *,
    strict: bool = False,
    gradients: bool = True,
) -> Analysis:
    """The analysis of `program`, whose `parameters` are the get_attr targets to be laid out.

    The rule of an op without a row is discovered by running it, for the backward pass too with
    `gradients`. In strict mode such an op raises UnknownOpError.
    """
    discover = None if strict else partial(discover_rule, gradients=gradients)
    reader = _Reader(program, frozenset(parameters), rulebook, discover)
    for node in program.graph.nodes:
        reader.visit(node)
    if strict and reader.analysis.unruled:
        raise UnknownOpError(_describe_unknown_ops(reader.analysis.unruled))
    analysis = reader.analysis
    returning = find_gradient_targets(program.graph, analysis)
    analysis.differentiable = {v for v in analysis.differentiable if v[0] in returning}
    return analysis


def _describe_unknown_ops(nodes: Sequence[fx.Node]) -> str:
    first = nodes[0]
    path, line = find_module_path(first) or "the root", find_source_line(first)
    source = f" ({line})" if line else ""
    others = sorted({str(n.target) for n in nodes} - {str(first.target)})
    more = f"; other ops without a rule: {', '.join(others)}" if others else ""
    return (
        f"node {first.name} in {path}{source}: op {first.target} has no rule, and "
        f"strict=True{more}. Pass a TOML file with a row for it as rules= "
        "(docs/how-to/add-a-rule.md), or leave strict off: autotp then runs the op to "
        "discover a rule, and runs it on replicated operands if it finds none."
    )


class _Reader:
    """The state of one pass over a program."""

    def __init__(
        self,
        program: Program,
        parameters: frozenset[str],
        rulebook: Rulebook,
        discover: Callable[[OpaqueCall], Discovery] | None,
    ) -> None:
        stops = {op: row.stops for op, row in rulebook.rows.items() if row.stops}
        self.analysis = Analysis(program, Forest(), stops=stops, differing=rulebook.differing)
        self.forest = self.analysis.forest
        self.parameters, self.rulebook, self.discover = parameters, rulebook, discover
        self.orders = Orders(rulebook.rows)
        self.sizes = Sizes()
        self.data = {n.replace(".", "_"): set(dims) for n, dims in program.data_dims.items()}
        self.cache_inputs = {c.taken.replace(".", "_") for c in program.carried.values()}
        self.from_input: set[fx.Node] = set()  # values, not sizes, of an input reach these nodes

    def visit(self, node: fx.Node) -> None:
        """Record one node."""
        if node.op == "placeholder" or (
            list_results(node) and any(n in self.from_input for n in node.all_input_nodes)
        ):
            self.from_input.add(node)
        if node.op == "get_attr" and node.target in self.parameters:
            self._define_parameter(node)
        elif node.op == "placeholder":
            self._define_input(node)
        elif node.op == "call_function" and find_source(node)[0] is node:
            self._visit_call(node)

    def _define_parameter(self, node: fx.Node) -> None:
        meta = cast(torch.Tensor, node.meta["val"])
        value = (node, 0)
        self._define(value, meta, tuple(self.forest.add_dim(s) for s in self.sizes.read(meta)))
        self.analysis.parameters[str(node.target)] = node
        self.analysis.weights.add(value)
        if meta.is_floating_point():
            self.analysis.differentiable.add(value)

    def _define_input(self, node: fx.Node) -> None:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            return
        kept = node.target in self.cache_inputs and meta.is_floating_point() and 0 not in meta.shape
        if meta.requires_grad or kept:
            data = self.data.get(str(node.target), set())
            dims = [
                self.forest.add_dim(s, data=i in data) for i, s in enumerate(self.sizes.read(meta))
            ]
            self._define((node, 0), meta, tuple(dims))
        if meta.requires_grad:
            self.analysis.differentiable.add((node, 0))

    def _define(self, value: Value, meta: torch.Tensor, dims: tuple[Dim, ...]) -> None:
        self.analysis.dims[value] = dims
        self.analysis.metas[value] = meta

    def _visit_call(self, node: fx.Node) -> None:
        if node.target is torch.ops.aten.sym_size.int:
            return  # symbolic sizes are of the data, which is never sharded
        found = list(_list_tensors(node))
        if not any(find_source(n) in self.analysis.dims for n, _, _ in found):
            return
        row = self.rulebook.rows.get(str(node.target))
        operands = tuple(self._read_operand(n, argument, item) for n, argument, item in found)
        metas = list_results(node)
        rule = apply_row(self._describe_call(node, operands, metas, row)) if row else None
        if rule is None and self.discover and metas:
            rule = self._discover_rule(node, operands, metas, self.discover)
        if rule is None:
            rule = self._build_unruled_rule(node, operands, metas)
        self.analysis.uses[node] = Use(node, operands, rule, row)
        self._define_results(node, operands, rule, metas)

    def _read_operand(self, node: fx.Node, argument: int | str, item: int) -> Operand:
        value = find_source(node)
        dims = self.analysis.dims.get(value)
        if dims is None:
            value = (node, 0)  # a value that no parameter reaches gets dims per use
            sizes = self.sizes.read(cast(torch.Tensor, node.meta["val"]))
            data = (
                self.data.get(str(node.target), set()) if node.op == "placeholder" else set[int]()
            )
            dims = tuple(self.forest.add_dim(s, data=i in data) for i, s in enumerate(sizes))
        return Operand(value, dims, argument, item)

    def _describe_call(
        self,
        node: fx.Node,
        operands: tuple[Operand, ...],
        metas: dict[int, torch.Tensor],
        row: Row,
    ) -> Call:
        count = max(metas, default=-1) + 1
        sizes = [self.sizes.read(metas[k]) if k in metas else () for k in range(count)]
        arguments, positions = list_arguments(node, operands)
        dims = [o.dims for o in operands]
        return Call(self.forest, dims, sizes, positions, arguments, row, self.orders)

    def _discover_rule(
        self,
        node: fx.Node,
        operands: tuple[Operand, ...],
        metas: dict[int, torch.Tensor],
        discover: Callable[[OpaqueCall], Discovery],
    ) -> NodeRule | None:
        """The rule found by running the op, or None."""
        call = describe_call(node, operands, metas, self.sizes)
        unfit = isinstance(call, str)
        found = Discovery(str(node.target), None, call) if unfit else discover(call)
        row = found.row
        rule = row and bind_row(row, self._describe_call(node, operands, metas, row))
        if row and rule is None:
            found = Discovery(found.op, None, f"the rule found, {row}, does not fit its sizes")
        self.analysis.discovered[node] = found
        return rule

    def _build_unruled_rule(
        self, node: fx.Node, operands: tuple[Operand, ...], metas: dict[int, torch.Tensor]
    ) -> NodeRule:
        if metas:
            self.analysis.unruled.append(node)
        count = max(metas, default=-1) + 1
        results = [
            tuple(self.forest.add_dim(s) for s in self.sizes.read(metas[k])) if k in metas else ()
            for k in range(count)
        ]
        factors = [
            Factor("unshardable", dim, ((k, i),))
            for k, o in enumerate(operands)
            for i, dim in enumerate(o.dims)
        ]
        return NodeRule(tuple(factors), tuple(results), ruled=False)

    def _define_results(
        self,
        node: fx.Node,
        operands: tuple[Operand, ...],
        rule: NodeRule,
        metas: dict[int, torch.Tensor],
    ) -> None:
        analysis = self.analysis
        read = [o.value for o in operands if o.value in analysis.dims]
        weights = all(v in analysis.weights for v in read) and not any(
            o.value[0] in self.from_input for o in operands
        )
        stops = analysis.stops.get(str(node.target), ())
        flows = any(o.value in analysis.differentiable for o in operands if o.argument not in stops)
        for k, meta in metas.items():
            self._define((node, k), meta, rule.results[k])
            if weights:
                analysis.weights.add((node, k))
            if flows and (meta.is_floating_point() or meta.is_complex()):
                analysis.differentiable.add((node, k))


def _list_tensors(node: fx.Node) -> Iterator[tuple[fx.Node, int | str, int]]:
    """Every tensor operand with its position."""
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for place, argument in places:
        if isinstance(argument, fx.Node):
            if _is_tensor(argument):
                yield argument, place, -1
        elif isinstance(argument, list | tuple):
            for k, item in enumerate(cast("Sequence[object]", argument)):
                if isinstance(item, fx.Node) and _is_tensor(item):
                    yield item, place, k


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def list_arguments(
    node: fx.Node, operands: Sequence[Operand]
) -> tuple[Mapping[str, Any], tuple[int | None, ...]]:
    """Arguments by schema name, and the operand number of each tensor argument of the schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}, tuple(range(len(operands)))
    numbers = {(o.argument, o.item): k for k, o in enumerate(operands)}
    arguments: dict[str, Any] = {}
    positions: list[int | None] = []
    for at, argument in enumerate(schema.arguments):
        given: Any = argument.default_value
        place: int | str = argument.name
        if at < len(node.args):
            given, place = node.args[at], at
        elif argument.name in node.kwargs:
            given = node.kwargs[argument.name]
        arguments[argument.name] = given
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            literal = None if given is None else -1
            positions.append(numbers.get((place, -1), literal))
    return arguments, tuple(positions)
