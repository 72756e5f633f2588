"""Why a collective is there, and where: the axes whose cut makes it necessary, and a place to name.

A partial sum comes from an op that contracts a cut axis, perhaps through additions; a partial
gradient from an op that has a cut axis where its operand has none, perhaps through a norm.
"""

from collections import defaultdict

from torch import fx

from autotp.algebra.partition import Partition
from autotp.algebra.placement import PARTIAL, SHARED, Placement
from autotp.capture.graph_facts import Value
from autotp.planner.analysis import Analysis, Decision, Use

__all__ = ["Causes"]


class Causes:
    """What one decision makes necessary."""

    def __init__(self, analysis: Analysis, decision: Decision) -> None:
        self.analysis, self.decision = analysis, decision
        self.readers: dict[Value, list[tuple[Use, int]]] = defaultdict(list)
        for use in analysis.uses.values():
            for k, operand in enumerate(use.operands):
                self.readers[operand.value].append((use, k))
        paths = (_paths(node) for node in analysis.program.graph.nodes)
        self.parents = {path for stack in paths for path in stack[:-1]}

    def forward(self, value: Value, source: Placement, target: Placement) -> tuple[str, ...]:
        """The axes for which a conversion of `value` communicates forward."""
        if source != PARTIAL:
            return self._axes(source.axis or target.axis)
        return tuple(self._summed(value))

    def backward(self, source: Placement, target: Placement, reader: fx.Node) -> tuple[str, ...]:
        """The axes for which a conversion for `reader` communicates backward."""
        if target.kind != "R~":
            return self._axes(target.axis or source.axis)
        return self._axes(source.axis) or tuple(self._read(reader))

    def _axes(self, text: str) -> tuple[str, ...]:
        """The axes of a partition; with grouped rows, that of their groups."""
        forest = self.analysis.forest
        axes = [forest.named(name) for name in Partition.of(text).axes]
        groups = [forest.named(a.groups.axis) for a in axes if a.groups]
        return tuple(a.name for a in (*axes, *groups))

    def where(self, node: fx.Node) -> str:
        """The module path of a node; with its op where the module is more than that op's."""
        path = (_paths(node) or [""])[-1]
        if not path:
            return node.name
        return f"{path}.({_op(node)})" if path in self.parents else path

    def _summed(self, value: Value) -> dict[str, None]:
        """The axes over which a partial sum is to be completed, in the order of its terms."""
        strategy = self.decision.strategies.get(value[0])
        if strategy is None or strategy.axis:
            return dict.fromkeys(Partition.of(strategy.axis).axes if strategy else ())
        found: dict[str, None] = {}
        operands = self.analysis.uses[value[0]].operands
        for operand, placement in zip(operands, strategy.operands, strict=True):
            if placement == PARTIAL:
                found |= self._summed(operand.value)
        return found

    def _read(self, reader: fx.Node) -> dict[str, None]:
        """The axes for which a reader gives a partial gradient."""
        strategy = self.decision.strategies.get(reader)
        if strategy is None or strategy.axis:
            return dict.fromkeys(Partition.of(strategy.axis).axes if strategy else ())
        for result in range(len(strategy.results)):
            for use, k in self.readers[(reader, result)]:
                placement = self.decision.strategies[use.node].operands[k]
                if placement == SHARED:
                    return self._read(use.node)
                if placement.is_grouped:
                    return dict.fromkeys(self._axes(placement.axis))
        return {}


def _paths(node: fx.Node) -> list[str]:
    """The module paths that a node lies in, outermost first."""
    return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]


def _op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]
