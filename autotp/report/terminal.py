"""Printing to standard output: as wide as the terminal, in characters that its encoding has."""

import shutil
import sys

from rich.console import Console, RenderableType

_LEAST_WIDTH = 60
_PLAIN = str.maketrans({"×": "x", "µ": "u", "·": "-", "…": "."})


def print_to_terminal(renderable: RenderableType) -> None:
    """Write `renderable` to standard output; in a pipe the width is COLUMNS, or 100."""
    width = max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH)
    console = Console(
        file=sys.stdout, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False
    )
    with console.capture() as capture:
        console.print(renderable)
    lines = (line.rstrip() for line in capture.get().splitlines())
    sys.stdout.write(_replace_unwritable("\n".join(lines) + "\n", sys.stdout.encoding or "ascii"))
    sys.stdout.flush()


def _replace_unwritable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text
