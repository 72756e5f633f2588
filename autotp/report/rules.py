"""The printed rulebook: one line per op."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotp.oprules.rule import Row
from autotp.records.rule_verdict import Verdict
from autotp.report.dotted import Dotted
from autotp.report.table import make_table

_RULE, _FORM = 22, 8  # least widths; the names of ops wrap at their dots instead


def render_rules(rows: Iterable[Row]) -> RenderableType:
    """Build what rich prints for `rows`, sorted by op name."""
    ordered = sorted(rows, key=lambda row: row.op)
    names = ["op", "rule", "reductions", "linear in", "local form"]
    table = make_table(f"{len(ordered)} ops", names, first=True)
    table.columns[1].min_width, table.columns[-1].min_width = _RULE, _FORM
    for row in ordered:
        rule = str(row.signature) if row.signature else f"by arguments: {row.derive}"
        cells = map(Text, (rule, _describe_reductions(row), _describe_linear(row), row.emit))
        table.add_row(Dotted([row.op]), *cells)
    return table


def _describe_reductions(row: Row) -> str:
    reductions = [f"{factor}: {kind}" for factor, kind in sorted(row.reduce.items())]
    return ", ".join([*reductions, *(f"{factor}: unshardable" for factor in sorted(row.whole))])


def _describe_linear(row: Row) -> str:
    return " | ".join(", ".join(map(str, sorted(operands))) for operands in row.linear)


def render_verdicts(verdicts: Sequence[Verdict]) -> RenderableType:
    """Build what rich prints for the verdicts on rows, with the count of each."""
    names = ["op", "rule", "calls", "strategies", "verdict"]
    table = make_table("Rules checked on shards", names, first=True, right=("calls", "strategies"))
    table.columns[1].min_width = _RULE
    for v in verdicts:
        verdict = f"{v.verdict}: {v.reason}" if v.reason else v.verdict
        counts = Text(str(v.calls)), Text(str(v.strategies))
        table.add_row(Dotted([v.op]), Text(v.rule), *counts, Text(verdict))
    tally = Counter(v.verdict for v in verdicts)
    counts = ", ".join(f"{tally[kind]} {kind}" for kind in ("right", "wrong", "untested"))
    return Group(table, Text(f"\n{len(verdicts)} rows: {counts}"))
