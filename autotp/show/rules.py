"""The rulebook, for people: one line an op."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from autotp.core.rule import Row
from autotp.show.table import titled_table

__all__ = ["render_rules"]


def render_rules(rows: Iterable[Row]) -> RenderableType:
    """What rich prints for `rows`, by op name."""
    ordered = sorted(rows, key=lambda row: row.op)
    table = titled_table(f"{len(ordered)} ops", ["op", "rule", "joins", "linear in", "local form"])
    table.columns[0].no_wrap = True  # a name is looked for, so it stays whole
    for row in ordered:
        rule = str(row.signature) if row.signature else f"by arguments: {row.derive}"
        table.add_row(*map(Text, (row.op, rule, _joins(row), _linear(row), row.emit)))
    return table


def _joins(row: Row) -> str:
    joins = [f"{factor}: {join}" for factor, join in sorted(row.reduce.items())]
    return ", ".join([*joins, *(f"{factor}: whole" for factor in sorted(row.whole))])


def _linear(row: Row) -> str:
    return " | ".join(", ".join(map(str, sorted(operands))) for operands in row.linear)
