"""What `verify` found, for people: each figure beside what it is held to."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from autotp.records.evidence import Evidence
from autotp.report.table import make_table
from autotp.report.units import format_count, format_share

__all__ = ["render_evidence"]

_WORST = 3


def render_evidence(evidence: Evidence) -> RenderableType:
    """What rich prints for `evidence`: the verdict, the figures, the first wrong node if any."""
    verdict = "equals the whole model" if evidence.ok else "DIFFERS from the whole model"
    title = f"tp {evidence.tp}: {verdict} ({evidence.dtype})"
    table = make_table(title, ["figure", "value"], first=True)
    for name, value in _render_figures(evidence):
        table.add_row(Text(name), Text(value))
    table.show_header = False
    return Group(table, *(Text(f"  {line}") for line in _render_remarks(evidence)))


def _render_figures(evidence: Evidence) -> Iterable[tuple[str, str]]:
    yield "largest relative error", f"{evidence.max_rel_error:.2e}"
    yield "tolerance", f"{evidence.tolerance:.2e} ({evidence.tolerance_reason})"
    yield "largest absolute error", f"{evidence.max_abs_error:.2e}"
    if evidence.gradients:
        worst = sorted(evidence.gradients.items(), key=lambda item: -item[1])[:_WORST]
        yield "gradients compared", format_count(len(evidence.gradients))
        yield "largest gradient errors", ", ".join(f"{name} {error:.2e}" for name, error in worst)
    yield "collectives predicted", _render_counts(evidence.collectives_predicted)
    yield "collectives executed", _render_counts(evidence.collectives_seen)
    yield "parameters on every rank", format_share(evidence.replicated_fraction, 1)


def _render_counts(counts: Mapping[str, int]) -> str:
    shown = [f"{format_count(n)} {name.replace('_', '-')}" for name, n in sorted(counts.items())]
    return ", ".join(shown) or "none"


def _render_remarks(evidence: Evidence) -> Iterable[str]:
    if evidence.first_divergence is not None:
        yield f"first wrong node: {evidence.first_divergence}"
    yield from evidence.notes
