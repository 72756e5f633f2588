"""Standard output: as wide as the terminal, in colour only there, in letters that it can take."""

import shutil
import sys

from rich.console import Console, RenderableType

__all__ = ["print_to_terminal"]

_LEAST_WIDTH = 60
_PLAIN = str.maketrans({"×": "x", "µ": "u", "·": "-", "…": "."})


def print_to_terminal(renderable: RenderableType) -> None:
    """Writes `renderable` to standard output; COLUMNS, or else 100, is its width in a pipe."""
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
