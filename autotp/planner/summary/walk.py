"""Where the shards of a parameter would have to be gathered: the op that cannot run on them.

The walk follows one axis of the parameter forward through the strategies of each op. If no strategy
of an op takes its operand sharded along the axis, a collective must gather it before that op; if
the op contracts the axis, its result is a partial sum. Plans quote the result as the reason why a
parameter is replicated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autotp.algebra.axis import Atom
from autotp.algebra.placement import Placement
from autotp.capture.graph_facts import Value, find_module_path, find_source_line
from autotp.oprules.rule import Factor
from autotp.planner.analysis import Analysis, Use, list_model_outputs
from autotp.planner.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the shards end.

    - `node`: the op there; None where the axis reaches an output of the model.
    - `why`: what that op does to the axis; empty if it contracts it.
    - `value`: the value that would have to be gathered, or reduced.
    """

    node: fx.Node | None
    why: str
    value: Value


class Walk:
    """The walks of one program; `ways` are the strategies of each op."""

    def __init__(self, analysis: Analysis, ways: Mapping[fx.Node, tuple[Strategy, ...]]) -> None:
        self.analysis, self.ways = analysis, ways
        self.outputs = list_model_outputs(analysis)

    def find_stop(self, name: str, dim: int, axis: Atom) -> Stop | None:
        """Where shards of `dim` of parameter `name` along `axis` end; None if no op reads it."""
        start = ((self.analysis.parameters[name], 0), dim)
        seen, todo, ends = {start}, [start], list[Stop]()
        while todo:
            value, at = todo.pop(0)
            for use, k in self.analysis.readers[value]:
                ways = [s for s in self.ways[use.node] if _list_splits(s.operands[k], at, axis)]
                if not ways:
                    return Stop(use.node, self._explain_refusal(use, k, at, axis), value)
                reached = dict.fromkeys(r for s in ways for r in _list_results(use.node, s, axis))
                ends += [] if reached else [Stop(use.node, "", (use.node, 0))]
                todo += [result for result in reached if result not in seen]
                seen.update(reached)
            if value in self.outputs:
                ends.append(Stop(None, "", value))
        return next(iter(ends), None)

    def find_meeting_op(self, name: str, dim: int, axis: Atom) -> fx.Node | None:
        """The first op where `dim` of `name` meets an activation that has `axis` as well."""
        todo = [((self.analysis.parameters[name], 0), dim)]
        while todo:
            value, at = todo.pop(0)
            for use, k in self.analysis.readers[value]:
                for factor in use.rule.factors:
                    if (k, at) in factor.slots and self._has_activation_axis(use, factor, k, axis):
                        return use.node
                    if (k, at) in factor.slots:
                        results = [((use.node, ~s), d) for s, d in factor.slots if s < 0]
                        todo += [r for r in results if r[0] in self.analysis.weights]
        return None

    def _has_activation_axis(self, use: Use, factor: Factor, k: int, axis: Atom) -> bool:
        """Whether another operand of `factor` than `k` is an activation with `axis`."""
        others = [(use.operands[s], d) for s, d in factor.slots if s >= 0 and s != k]
        others = [(o, d) for o, d in others if o.value not in self.analysis.weights]
        contains = self.analysis.forest.contains
        return factor.kind == "pass" and any(contains(o.dims[d], axis) for o, d in others)

    def _explain_refusal(self, use: Use, k: int, dim: int, axis: Atom) -> str:
        """Why no strategy of `use` takes `dim` of operand `k` sharded along `axis`."""
        if not use.rule.ruled:
            return "has no rule" if use.row is None else "has no rule for these arguments"
        contains = self.analysis.forest.contains
        touched = [f for f in use.rule.factors if (k, dim) in f.slots and contains(f.dim, axis)]
        if not touched:
            return "has no rule for this dim"
        if any(f.kind == "unshardable" for f in touched):
            return "needs it unsharded"
        if any(f.block or f.aligned for f in touched):
            return "takes contiguous shards only, which some kernels need aligned"
        if any(f.kind == "reduce" for f in touched):
            return "sums over it together with elements that are not sharded"
        return "cannot take it sharded together with its other operands"


def describe_place(node: fx.Node) -> str:
    """An op and its place: `aten.mean.dim at model.norm (modeling_x.py:62)`."""
    line = find_source_line(node)
    source = f" ({line.place})" if line else ""
    return f"{node.target} at {find_module_path(node) or node.name}{source}"


def _list_splits(placement: Placement, dim: int, axis: Atom) -> bool:
    here = placement.dim == dim or placement.kind == "SS"
    return here and placement.is_split and axis.name in placement.partition.axes


def _list_results(node: fx.Node, strategy: Strategy, axis: Atom) -> Iterator[tuple[Value, int]]:
    """The results, with the dim, that a strategy shards along `axis`."""
    for number, placement in enumerate(strategy.results):
        if _list_splits(placement, placement.dim, axis):
            yield (node, number), placement.dim
