"""What `verify` found, for people: each figure beside what it is held to."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from autotp.records.evidence import Evidence
from autotp.report.table import titled_table
from autotp.report.units import count_text, share_text

__all__ = ["render_evidence"]

_WORST = 3


def render_evidence(evidence: Evidence) -> RenderableType:
    """What rich prints for `evidence`: the verdict, the figures, the first wrong node if any."""
    verdict = "equals the whole model" if evidence.ok else "DIFFERS from the whole model"
    title = f"tp {evidence.tp}: {verdict} ({evidence.dtype})"
    table = titled_table(title, ["figure", "value"], first=True)
    for name, value in _figures(evidence):
        table.add_row(Text(name), Text(value))
    table.show_header = False
    return Group(table, *(Text(f"  {line}") for line in _remarks(evidence)))


def _figures(evidence: Evidence) -> Iterable[tuple[str, str]]:
    yield "largest relative error", f"{evidence.max_rel_error:.2e}"
    yield "tolerance", f"{evidence.tolerance:.2e} ({evidence.tolerance_reason})"
    yield "largest absolute error", f"{evidence.max_abs_error:.2e}"
    if evidence.gradients:
        worst = sorted(evidence.gradients.items(), key=lambda item: -item[1])[:_WORST]
        yield "gradients compared", count_text(len(evidence.gradients))
        yield "largest gradient errors", ", ".join(f"{name} {error:.2e}" for name, error in worst)
    yield "collectives predicted", _counts(evidence.collectives_predicted)
    yield "collectives executed", _counts(evidence.collectives_seen)
    yield "parameters on every rank", share_text(evidence.replicated_fraction, 1)


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{count_text(n)} {name.replace('_', '-')}" for name, n in sorted(counts.items())]
    return ", ".join(shown) or "none"


def _remarks(evidence: Evidence) -> Iterable[str]:
    if evidence.first_divergence is not None:
        yield f"first wrong node: {evidence.first_divergence}"
    yield from evidence.notes
