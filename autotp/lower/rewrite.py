"""Rewrite: the program on one rank's shards, with a collective wherever a placement changes.

Nodes keep their order and names. Each operand is converted to the placement that its reader's
strategy requires: first to the delivered set of its value, then further if needed; each conversion
is written once and shared. A graph without gradients has plain functional collectives; one with
gradients has `torch.ops.autotp` ops, whose backward is the conjugate. Ops take the rank from their
group when they run; only local sizes are written into the graph, so with even shards it is the same
on all ranks.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from autotp.algebra.axis import Dim
from autotp.algebra.partition import Partition
from autotp.algebra.placement import CONVERSIONS, PARTIAL, REPLICATED, SHARED, Placement
from autotp.algebra.split import Split
from autotp.capture.graph_facts import (
    Value,
    find_expression,
    find_module_path,
    find_source,
    list_module_paths,
)
from autotp.cost.conversions import Delivered
from autotp.lower.conversion import Target, emit_conversion
from autotp.lower.gradient_bucket import share_gradients
from autotp.lower.local_ops import FORMS, Site
from autotp.oprules.rule import Operand
from autotp.planner.analysis import (
    Analysis,
    Decision,
    EmittedCollective,
    Use,
    find_differentiated_nodes,
)
from autotp.planner.strategy import Strategy
from autotp.records.trace import TracedValue

_IN_ANY_STRIDES: Mapping[object, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""A sharded or gathered value has other strides, for which a view may not exist."""


@dataclass(slots=True)
class Rewritten:
    """The rewritten graph, its collectives in program order, and the placement of each value.

    - `uneven`: some shards are longer than others, so the graph is valid for one rank only.
    """

    graph: fx.Graph
    collectives: list[EmittedCollective] = field(default_factory=list[EmittedCollective])
    values: dict[str, TracedValue] = field(default_factory=dict[str, TracedValue])
    uneven: bool = False


def rewrite(analysis: Analysis, decision: Decision, target: Target) -> Rewritten:
    """The rewritten program."""
    writer = _Writer(analysis, decision, target)
    writer.write()
    return writer.result


class _Writer:
    """The new graph while it is written."""

    def __init__(self, analysis: Analysis, decision: Decision, target: Target) -> None:
        self.analysis, self.forest = analysis, analysis.forest
        self.decision, self.target = decision, target
        self.causes = Causes(analysis, decision)
        self.named = {node.name: node for node in analysis.program.graph.nodes}
        self.graph = fx.Graph()
        self.result = Rewritten(self.graph)
        self.noted: list[tuple[fx.Node | None, EmittedCollective]] = []
        self.plain: dict[fx.Node, fx.Node] = {}
        self.placed: dict[Value, dict[Placement, fx.Node]] = {}
        self.made: dict[Value, Placement] = {}
        self.locals: dict[object, torch.Tensor] = {}
        self.constants: dict[object, fx.Node] = {}

    def write(self) -> None:
        """All nodes in program order."""
        nodes = list(self.analysis.program.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self._copy_node(node)
        self._share_gradients()
        for node in nodes:
            if node.op == "output":
                self._write_output(node)
            elif node in self.analysis.uses:
                self._write_use(self.analysis.uses[node])
            elif find_source(node) in self.analysis.dims:
                self._write_item(node)
            elif node.op != "placeholder":
                self._copy_node(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        reached = find_differentiated_nodes(self.graph, self.analysis)
        self.result.collectives += [e for n, e in self.noted if n is None or n in reached]

    # ── nodes ────────────────────────────────────────────────────────────────────────────────

    def _copy_node(self, node: fx.Node) -> None:
        """Copy a node that depends on no parameter, or an input, unchanged."""
        new = self.graph.node_copy(node, lambda n: self._find_copy(n))
        new.meta = dict(node.meta)
        self.plain[node] = new
        if (node, 0) in self.analysis.dims:
            placement = self.decision.caches.get(node.name, REPLICATED)
            self._record((node, 0), placement, new)
            self.made[(node, 0)] = placement

    def _find_copy(self, node: fx.Node) -> fx.Node:
        """The new node of `node` in any placement: for sizes, which are never sharded."""
        if node in self.plain:
            return self.plain[node]
        return self.placed[find_source(node)][self.made[find_source(node)]]

    def _share_gradients(self) -> None:
        """Parameters with a partial gradient, behind the one bucket that sums their gradients."""
        placed = {n: p for n, p in self.decision.parameters.items() if self._is_shared(n, p)}
        if not placed:
            return
        values: list[Value] = [(self.analysis.parameters[n], 0) for n in placed]
        nodes = [self._write_parameter(node) for node, _ in values]
        cuts = [
            (p.dim, self._find_split(self.analysis.dims[v], p)) if p.is_split else None
            for v, p in zip(values, placed.values(), strict=True)
        ]
        wholes = [self.analysis.metas[v] for v in values]
        shared, runs = share_gradients(nodes, wholes, cuts, self.target)
        self.noted += [(shared, run) for run in runs]
        for k, (value, placement) in enumerate(zip(values, placed.values(), strict=True)):
            item = self.graph.call_function(operator.getitem, (shared, k))
            self._record(value, placement, item)

    def _is_shared(self, name: str, placement: Placement) -> bool:
        partial = placement.kind in ("R~", "S~")
        return partial and (self.analysis.parameters[name], 0) in self.analysis.differentiable

    def _write_parameter(self, old: fx.Node) -> fx.Node:
        new = self.graph.create_node("get_attr", old.target, name=old.name)
        new.meta = dict(old.meta)
        placement = self.decision.parameters[str(old.target)]
        new.meta["val"] = self._make_local_meta(
            old.meta["val"], placement, self.analysis.dims[(old, 0)]
        )
        return new

    def _write_item(self, node: fx.Node) -> None:
        """A parameter, or one result of a node with several."""
        value = find_source(node)
        if node.op == "get_attr":
            placement = self.decision.parameters[str(node.target)]
            self.made[value] = placement
            if not self._is_shared(str(node.target), placement):
                self._record(value, placement, self._write_parameter(node))
            return
        if value not in self.placed:
            origin = self.plain[value[0]]
            placement = self.decision.strategies[value[0]].results[value[1]]
            new = self.graph.create_node(
                "call_function", operator.getitem, (origin, value[1]), name=node.name
            )
            new.meta = dict(node.meta)
            self._record(value, placement, new)
            self.made[value] = placement

    def _write_use(self, use: Use) -> None:
        strategy = self.decision.strategies[use.node]
        args, kwargs = _copy_lists(use.node.args), dict(use.node.kwargs)
        for k, operand in enumerate(use.operands):
            new = self._convert_operand(use, operand, strategy.operands[k], keep=k in use.rule.bias)
            _replace_operand(args, kwargs, operand, new)
        args = [map_arg(a, self._map_argument) for a in args]
        kwargs = {k: map_arg(v, self._map_argument) for k, v in kwargs.items()}
        before = next(iter(reversed(self.graph.nodes)), None)
        new = self._write_local_form(use, strategy, args, kwargs)
        self._inherit_stacks(before, use.node)
        self.plain[use.node] = new
        has_items = not isinstance(use.node.meta.get("val"), torch.Tensor)
        if (use.node, 0) in self.analysis.metas and not has_items:
            self._record((use.node, 0), strategy.results[0], new)
            self.made[(use.node, 0)] = strategy.results[0]
        else:
            new.meta = dict(use.node.meta)

    def _map_argument(self, node: fx.Node) -> fx.Node:
        return node if node.graph is self.graph else self._find_copy(node)

    def _write_local_form(
        self, use: Use, strategy: Strategy, args: list[Any], kwargs: dict[str, Any]
    ) -> fx.Node:
        partition = strategy.partition
        form = FORMS[use.rule.emit if partition.parts else ""]
        self.result.uneven |= self._is_uneven(partition)
        made = next(iter(strategy.results), REPLICATED)
        bounds = self._find_bounds(use.rule.results[0][made.dim]) if made.is_grouped else None
        site = (self.graph, use, strategy, partition, self.forest, self.target, args, kwargs)
        new = form(Site(*site, bounds))
        new.target = _IN_ANY_STRIDES.get(new.target, new.target)
        return new

    def _is_uneven(self, partition: Partition) -> bool:
        axes = [(self.forest.find_axis(p.axis), p.parts) for p in partition.parts]
        cut = [(a.size.coefficient, parts) for a, parts in axes if not a.groups]
        return any(size % (parts or self.target.tp) for size, parts in cut)

    def _inherit_stacks(self, before: fx.Node | None, origin: fx.Node) -> None:
        """Give every node written after `before` the stack of the node it was written for."""
        for new in reversed(self.graph.nodes):
            if new is before:
                return
            _inherit_meta(new, origin)

    def _write_output(self, node: fx.Node) -> None:
        kept = self.decision.caches

        def write(old: Any, number: int) -> Any:
            if not isinstance(old, fx.Node):
                return old
            if find_source(old) not in self.analysis.dims:
                return self.plain[old]
            wanted = kept.get(number, REPLICATED)
            return self._convert(find_source(old), wanted, keep=False, reader=node)

        outputs = cast("tuple[Any, ...]", node.args[0])
        new = self.graph.output(tuple(write(old, k) for k, old in enumerate(outputs)))
        new.meta = dict(node.meta)

    # ── conversions ──────────────────────────────────────────────────────────────────────────

    def _convert_operand(
        self, use: Use, operand: Operand, wanted: Placement, *, keep: bool
    ) -> fx.Node:
        if operand.value in self.analysis.dims:
            return self._convert(operand.value, wanted, keep=keep, reader=use.node)
        return self._slice_constant(operand, wanted, use.node)

    def _slice_constant(self, operand: Operand, wanted: Placement, reader: fx.Node) -> fx.Node:
        """A value without parameters: replicated, and sliced for a reader that needs a shard."""
        node = self.plain[operand.value[0]]
        if not wanted.is_split and wanted.kind not in ("P", "G"):
            return node
        steps = self._list_single_splits(wanted, operand.dims)
        cut = [(p.dim, self._find_split(operand.dims, p).encode()) for p in steps if p.is_split]
        key = (node, wanted.kind, tuple(cut))
        if key not in self.constants:
            new = node
            for step in self._list_single_splits(wanted, operand.dims):
                new = self._write_conversion(new, REPLICATED, step, operand.dims)
                _inherit_meta(new, reader)
            new.meta["val"] = self._make_local_meta(node.meta["val"], wanted, operand.dims)
            self.constants[key] = new
        return self.constants[key]

    def _list_single_splits(self, placement: Placement, dims: tuple[Dim, ...]) -> list[Placement]:
        """One placement for each sharded dim."""
        if placement.kind != "SS":
            return [placement]
        cut = placement.partition
        places = [d for d, dim in enumerate(dims) if self.forest.restrict((dim,), cut).parts]
        return [Placement("S", d, cut) for d in places]

    def _convert(self, value: Value, wanted: Placement, *, keep: bool, reader: fx.Node) -> fx.Node:
        """`value` in the placement `wanted`, through its delivered set."""
        if wanted not in self.placed[value]:
            source = self.made[value]
            delivered = self.decision.delivered.get(value)
            if delivered is not None:
                _, source = self.decision.prices[value].find_nearest(delivered, wanted, keep=keep)
                self._deliver(value, source, delivered, reader)
            self._convert_step(value, source, wanted, reader)
        return self.placed[value][wanted]

    def _deliver(
        self, value: Value, wanted: Placement, delivered: Delivered, reader: fx.Node
    ) -> None:
        """Write the member `wanted` of a delivered set, after the one that it comes from."""
        _, parents = self.decision.prices[value].find_cheapest_tree(self.made[value], delivered)
        parent = parents[delivered.index(wanted)]
        source = self.made[value] if parent < 0 else delivered[parent]
        if parent >= 0:
            self._deliver(value, source, delivered, reader)
        self._convert_step(value, source, wanted, reader)

    def _convert_step(
        self, value: Value, source: Placement, target: Placement, reader: fx.Node
    ) -> None:
        """Write one conversion, if it is not there yet, and note its collectives."""
        known = self.placed[value]
        if target in known:
            return
        change = CONVERSIONS[(source.kind, target.kind)]
        forward, backward = change.forward.collective, change.backward.collective
        before = next(iter(reversed(self.graph.nodes)), None)
        new = self._write_conversion(known[source], source, target, self.analysis.dims[value])
        self._inherit_stacks(before, value[0] if forward else reader)
        self._record(value, target, new)
        meta = (self.analysis.metas[value],)
        where = self.causes.describe_place(value[0] if forward else reader)
        cut = source if source.is_split else target
        shares = (self.forest.compute_padding(cut.partition, self.target.tp),)
        if forward:
            axes = self.causes.list_forward_axes(value, source, target)
            self.noted.append(
                (None, EmittedCollective(forward, "forward", where, meta, shares, axes=axes))
            )
        if self.target.training and backward:
            axes = self.causes.list_backward_axes(source, target, reader)
            self.noted.append(
                (new, EmittedCollective(backward, "backward", where, meta, shares, axes=axes))
            )

    def _write_conversion(
        self, node: fx.Node, source: Placement, target: Placement, dims: tuple[Dim, ...]
    ) -> fx.Node:
        grouped = [p for p in (source, target) if p.is_grouped]
        bounds = self._find_bounds(dims[grouped[0].dim]) if grouped else None
        return emit_conversion(
            node, source, target, lambda p: self._find_split(dims, p), self.target, bounds
        )

    def _find_bounds(self, dim: Dim) -> fx.Node:
        """The new node of the bounds by which a dim's rows are grouped."""
        groups = self.forest.flatten(dim)[0].groups
        assert groups, "rows are grouped by their bounds"
        node = self.named[groups.bounds]
        value = find_source(node)
        if value not in self.analysis.dims:
            return self.plain[node]
        return self._convert(value, REPLICATED, keep=False, reader=node)

    def _find_split(self, dims: tuple[Dim, ...], placement: Placement) -> Split:
        cut = self.forest.split(dims[placement.dim], placement.partition)
        assert cut is not None, f"{placement} has no split"
        return cut

    # ── facts of each new value ──────────────────────────────────────────────────────

    def _record(self, value: Value, placement: Placement, new: fx.Node) -> None:
        meta, dims = self.analysis.metas[value], self.analysis.dims[value]
        self.placed.setdefault(value, {})[placement] = new
        new.meta["val"] = self._make_local_meta(meta, placement, dims)
        split = self._find_split(dims, placement).encode() if placement.is_split else None
        traced = TracedValue(value[0].name, value[1], placement, split)
        self.result.values[new.name] = traced

    def _make_local_meta(
        self, meta: torch.Tensor, placement: Placement, dims: tuple[Dim, ...]
    ) -> torch.Tensor:
        """The meta tensor of one rank's shard."""
        if not placement.is_split:
            return meta
        shape: list[Any] = list(meta.shape)
        for step in self._list_single_splits(placement, dims):
            shape[step.dim] = self._find_local_size(shape[step.dim], self._find_split(dims, step))
        key = (meta.dtype, tuple(find_expression(n) for n in shape))
        found = self.locals.get(key)
        if found is None:
            found = self.locals[key] = meta.new_empty(shape)
        return found

    def _find_local_size(self, size: Any, split: Split) -> Any:
        rank, tp = self.target.rank, self.target.tp
        if split.is_known:
            return split.local_length(rank, tp)
        cuts = split.segments[0].cuts
        return size // prod(e.size for e in cuts) * prod(e.part(rank, tp)[1] for e in cuts)


def _copy_lists(args: tuple[Any, ...]) -> list[Any]:
    return [list(cast("list[Any]", a)) if isinstance(a, list | tuple) else a for a in args]


def _replace_operand(
    args: list[Any], kwargs: dict[str, Any], operand: Operand, new: fx.Node
) -> None:
    """Replace an operand by its converted node."""
    at = operand.argument
    holder: Any = args if isinstance(at, int) else kwargs
    if operand.item >= 0:
        holder[at] = list(holder[at])
        holder[at][operand.item] = new
    else:
        holder[at] = new


def _inherit_meta(new: fx.Node, origin: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace"):
        if key in origin.meta and key not in new.meta:
            new.meta[key] = origin.meta[key]


class Causes:
    """The axes and modules that make a collective necessary."""

    def __init__(self, analysis: Analysis, decision: Decision) -> None:
        self.analysis, self.decision = analysis, decision
        paths = (list_module_paths(node) for node in analysis.program.graph.nodes)
        self.parents = {path for stack in paths for path in stack[:-1]}

    def list_forward_axes(
        self, value: Value, source: Placement, target: Placement
    ) -> tuple[str, ...]:
        """The axes for which a conversion of `value` communicates forward."""
        if source != PARTIAL:
            return self._list_axes(source) or self._list_axes(target)
        return tuple(self._list_summed_axes(value))

    def list_backward_axes(
        self, source: Placement, target: Placement, reader: fx.Node
    ) -> tuple[str, ...]:
        """The axes for which a conversion for `reader` communicates backward."""
        if target.kind != "R~":
            return self._list_axes(target) or self._list_axes(source)
        return self._list_axes(source) or tuple(self._list_read_axes(reader))

    def _list_axes(self, placement: Placement) -> tuple[str, ...]:
        """The axes along which a value is sharded; with grouped rows, also their groups' axis."""
        forest = self.analysis.forest
        axes = [forest.find_axis(name) for name in placement.partition.axes]
        groups = [forest.find_axis(a.groups.axis) for a in axes if a.groups]
        return tuple(a.name for a in (*axes, *groups))

    def describe_place(self, node: fx.Node) -> str:
        """The module path of a node, with its op unless the module is a leaf."""
        path = find_module_path(node)
        if not path:
            return node.name
        return f"{path}.({_name_op(node)})" if path in self.parents else path

    def _list_summed_axes(self, value: Value) -> dict[str, None]:
        """The axes over which a partial sum must be reduced, in the order of its terms."""
        strategy = self.decision.strategies.get(value[0])
        if strategy is None or strategy.partition.parts:
            return dict.fromkeys(strategy.partition.axes if strategy else ())
        found: dict[str, None] = {}
        operands = self.analysis.uses[value[0]].operands
        for operand, placement in zip(operands, strategy.operands, strict=True):
            if placement == PARTIAL:
                found |= self._list_summed_axes(operand.value)
        return found

    def _list_read_axes(self, reader: fx.Node) -> dict[str, None]:
        """The axes for which a reader gives a partial gradient."""
        strategy = self.decision.strategies.get(reader)
        if strategy is None or strategy.partition.parts:
            return dict.fromkeys(strategy.partition.axes if strategy else ())
        for result in range(len(strategy.results)):
            for use, k in self.analysis.readers[(reader, result)]:
                placement = self.decision.strategies[use.node].operands[k]
                if placement == SHARED:
                    return self._list_read_axes(use.node)
                if placement.is_grouped:
                    return dict.fromkeys(self._list_axes(placement))
        return {}


def _name_op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]
