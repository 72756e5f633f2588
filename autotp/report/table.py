"""The one kind of table that reports use: plain ASCII lines, so that it survives any pipe."""

from collections.abc import Sequence

from rich.box import Box
from rich.table import Table
from rich.text import Text

__all__ = ["make_table"]

_PLAIN = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def make_table(
    title: str, columns: Sequence[str], right: Sequence[str] = (), *, first: bool = False
) -> Table:
    """An empty table under `title`; numbers stand right, and no cell is ever cut off.

    - `first`: nothing stands above it that an empty line would set it apart from.
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
