"""The rulebook, for people: one line an op."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from autotp.core.rule import Row
from autotp.show.dotted import Dotted
from autotp.show.table import titled_table

__all__ = ["render_rules"]

_RULE, _FORM = 22, 8  # columns to be read in; names of ops fold at their dots instead


def render_rules(rows: Iterable[Row]) -> RenderableType:
    """What rich prints for `rows`, by op name."""
    ordered = sorted(rows, key=lambda row: row.op)
    names = ["op", "rule", "joins", "linear in", "local form"]
    table = titled_table(f"{len(ordered)} ops", names, first=True)
    table.columns[1].min_width, table.columns[-1].min_width = _RULE, _FORM
    for row in ordered:
        rule = str(row.signature) if row.signature else f"by arguments: {row.derive}"
        cells = map(Text, (rule, _joins(row), _linear(row), row.emit))
        table.add_row(Dotted([row.op]), *cells)
    return table


def _joins(row: Row) -> str:
    joins = [f"{factor}: {join}" for factor, join in sorted(row.reduce.items())]
    return ", ".join([*joins, *(f"{factor}: whole" for factor in sorted(row.whole))])


def _linear(row: Row) -> str:
    return " | ".join(", ".join(map(str, sorted(operands))) for operands in row.linear)
