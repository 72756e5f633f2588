"""The printed report of `verify`: each figure with its tolerance."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from autotp.records.evidence import Evidence
from autotp.report.table import make_table
from autotp.report.units import format_count, format_share

_WORST = 3


def render_evidence(evidence: Evidence) -> RenderableType:
    """Build what rich prints for `evidence`: verdict, figures, and the first wrong node if any."""
    verdict = "matches the unsharded model" if evidence.ok else "DIFFERS from the unsharded model"
    title = f"tp {evidence.tp}: {verdict} ({evidence.dtype})"
    table = make_table(title, ["figure", "value"], first=True)
    for name, value in _list_figures(evidence):
        table.add_row(Text(name), Text(value))
    table.show_header = False
    return Group(table, *(Text(f"  {line}") for line in _list_remarks(evidence)))


def _list_figures(evidence: Evidence) -> Iterable[tuple[str, str]]:
    yield "largest relative error", f"{evidence.max_rel_error:.2e}"
    yield "tolerance", f"{evidence.tolerance:.2e} ({evidence.tolerance_reason})"
    yield "largest absolute error", f"{evidence.max_abs_error:.2e}"
    if evidence.gradients:
        worst = sorted(evidence.gradients.items(), key=lambda item: -item[1])[:_WORST]
        yield "gradients compared", format_count(len(evidence.gradients))
        yield "largest gradient errors", ", ".join(f"{name} {error:.2e}" for name, error in worst)
    yield "collectives predicted", _format_counts(evidence.collectives_predicted)
    yield "collectives executed", _format_counts(evidence.collectives_seen)
    yield "replicated parameter bytes", format_share(evidence.replicated_fraction, 1)


def _format_counts(counts: Mapping[str, int]) -> str:
    shown = [f"{format_count(n)} {name.replace('_', '-')}" for name, n in sorted(counts.items())]
    return ", ".join(shown) or "none"


def _list_remarks(evidence: Evidence) -> Iterable[str]:
    if evidence.first_divergence is not None:
        yield f"first wrong node: {evidence.first_divergence}"
    yield from evidence.notes
