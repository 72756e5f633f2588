"""The ops in a plan: unruled ones, discovered rules, results that may differ between ranks."""

from torch import fx

from autotp.capture.graph_facts import find_module_path
from autotp.oprules.rule import Discovery
from autotp.oprules.rulebook import Differing
from autotp.planner.analysis import Analysis
from autotp.planner.summary.findings import Findings
from autotp.records.plan import DifferingRecord, DiscoveredRecord

_UNKNOWN = Discovery("", None, "")


def list_unruled_ops(analysis: Analysis) -> tuple[str, ...]:
    """The nodes without a rule, as `op at module path`, each with the reason why none was found."""
    found = [(n, analysis.discovered.get(n, _UNKNOWN).reason) for n in analysis.unruled]
    return tuple(
        f"{n.target} at {find_module_path(n) or n.name}{f': {why}' if why else ''}"
        for n, why in found
    )


def list_discovered_rules(analysis: Analysis) -> tuple[DiscoveredRecord, ...]:
    """The rules found by running ops, with the modules that use each."""
    where: dict[tuple[str, str], list[str]] = {}
    for node, found in analysis.discovered.items():
        if found.row is not None:
            where.setdefault((found.op, str(found.row)), []).append(
                find_module_path(node) or node.name
            )
    return tuple(DiscoveredRecord(op, rule, tuple(at)) for (op, rule), at in where.items())


def list_differing_ops(
    findings: Findings, *, tp: int, training: bool
) -> tuple[DifferingRecord, ...]:
    """The ops that all ranks run on equal values, although their results may differ."""
    where: dict[Differing, dict[str, list[str]]] = {}
    for node in findings.analysis.program.graph.nodes if tp > 1 else ():
        for entry in findings.analysis.differing.get(str(node.target), ()):
            if _is_replicated(node, entry.phase, findings, training):
                ops = where.setdefault(entry, {})
                ops.setdefault(str(node.target), []).append(find_module_path(node) or node.name)
    return tuple(
        DifferingRecord(op, entry.phase, entry.why, tuple(at))
        for entry, ops in where.items()
        for op, at in ops.items()
    )


def _is_replicated(node: fx.Node, phase: str, findings: Findings, training: bool) -> bool:
    """Whether the results of `node` in that pass are assumed equal on all ranks."""
    strategy = findings.decision.strategies.get(node)
    if phase == "forward":
        return strategy is None or any(p.kind in ("R", "R~") for p in strategy.results)
    if strategy is None or not training:
        return False
    analysis = findings.analysis
    pairs = zip(analysis.uses[node].operands, strategy.operands, strict=True)
    return any(p.kind in ("R", "P") and o.value in analysis.differentiable for o, p in pairs)
