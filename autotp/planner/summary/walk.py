"""What a cut along one axis of a parameter meets: the op that cannot take it, and where that is.

The walk follows the axis forward, by the strategies that were posed: where no strategy of an op
takes its operand cut, the cut must end before it, by a collective; where one contracts the axis, it
ends in partial sums. A parameter is left whole because of what stands here.
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

__all__ = ["Stop", "Walk", "describe_place"]


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a cut ends.

    - `node`: the op there; None where the axis reaches an output of the model.
    - `why`: what that op does to the axis; empty if it contracts it.
    - `value`: what would have to be gathered, or is a partial sum.
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
        """Where a cut of `dim` of parameter `name` along `axis` ends; None if nothing reads it."""
        start = ((self.analysis.parameters[name], 0), dim)
        seen, todo, ends = {start}, [start], list[Stop]()
        while todo:
            value, at = todo.pop(0)
            for use, k in self.analysis.readers[value]:
                ways = [s for s in self.ways[use.node] if _list_splits(s.operands[k], at, axis)]
                if not ways:
                    return Stop(use.node, self._explain_refusal(use, k, at, axis), value)
                found = dict.fromkeys(cut for s in ways for cut in _list_results(use.node, s, axis))
                ends += [] if found else [Stop(use.node, "", (use.node, 0))]
                todo += [cut for cut in found if cut not in seen]
                seen.update(found)
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
                        todo += [cut for cut in results if cut[0] in self.analysis.weights]
        return None

    def _has_activation_axis(self, use: Use, factor: Factor, k: int, axis: Atom) -> bool:
        """Whether an activation brings `axis` along in `factor`, beside operand `k`."""
        others = [(use.operands[s], d) for s, d in factor.slots if s >= 0 and s != k]
        others = [(o, d) for o, d in others if o.value not in self.analysis.weights]
        contains = self.analysis.forest.contains
        return factor.kind == "pass" and any(contains(o.dims[d], axis) for o, d in others)

    def _explain_refusal(self, use: Use, k: int, dim: int, axis: Atom) -> str:
        """Why no strategy of `use` takes `dim` of operand `k` cut along `axis`."""
        if not use.rule.ruled:
            return "has no rule" if use.row is None else "has no rule for arguments like its own"
        contains = self.analysis.forest.contains
        touched = [f for f in use.rule.factors if (k, dim) in f.slots and contains(f.dim, axis)]
        if not touched:
            return "keeps no track of it"
        if any(f.kind == "unshardable" for f in touched):
            return "needs it whole"
        if any(f.block or f.aligned for f in touched):
            return "takes parts of consecutive elements only, aligned ones in some kernels"
        if any(f.kind == "reduce" for f in touched):
            return "sums over it beside pieces that are not cut with it"
        return "cannot be cut along it with its other operands"


def describe_place(node: fx.Node) -> str:
    """An op and where it stands: `aten.mean.dim at model.norm (modeling_x.py:62)`."""
    line = find_source_line(node)
    return f"{node.target} at {find_module_path(node) or node.name}{f' ({line.place})' if line else ''}"


def _list_splits(placement: Placement, dim: int, axis: Atom) -> bool:
    here = placement.dim == dim or placement.kind == "SS"
    return here and placement.is_split and axis.name in placement.partition.axes


def _list_results(node: fx.Node, strategy: Strategy, axis: Atom) -> Iterator[tuple[Value, int]]:
    """The results, with the dim, that a strategy makes cut along `axis`."""
    for number, placement in enumerate(strategy.results):
        if _list_splits(placement, placement.dim, axis):
            yield (node, number), placement.dim
