"""The table style of all reports: plain ASCII lines, safe in any pipe."""

from collections.abc import Sequence

from rich.box import Box
from rich.table import Table
from rich.text import Text

_PLAIN = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def make_table(
    title: str, columns: Sequence[str], right: Sequence[str] = (), *, first: bool = False
) -> Table:
    """Make an empty table; columns of `right` are right-aligned, and no cell is truncated.

    - `first`: the table starts the report, so no empty line precedes it.
    """
    table = Table(
        title=Text(title if first else f"\n{title}", style="bold"),
        title_justify="left",
        box=_PLAIN,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        justify = "right" if name in ("×", *right) else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=False)
    return table
