"""Dotted paths that wrap at their dots in a narrow column."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Dotted:
    """Paths, one below the other; a continuation line is indented and starts with a dot.

        model.layers.*
         .self_attn.o_proj

    Constraints: a part that is longer than the column is folded, never truncated.
    """

    paths: Sequence[str]
    heading: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Give the smallest and the largest useful width."""
        widest = max(len(path) for path in (self.heading, *self.paths))
        least = max(len(part) + 2 for path in self.paths for part in path.split("."))
        return Measurement(min(widest, least), widest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines."""
        if self.heading:
            yield Text(self.heading, style="bold")
        for path in self.paths:
            for line in _wrap_path(path, options.max_width):
                yield Text(line, overflow="fold")


def _wrap_path(path: str, width: int) -> Iterator[str]:
    first, *rest = path.split(".")
    line = first
    for part in rest:
        if len(line) + 1 + len(part) > width:
            yield line
            line = f" .{part}"
        else:
            line += f".{part}"
    yield line
