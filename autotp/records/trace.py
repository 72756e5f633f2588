"""For every value of a rewritten graph: the captured value it represents, and its placement."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotp.algebra.placement import Placement


@dataclass(frozen=True, slots=True)
class TracedValue:
    """One emitted value.

    - `origin`, `item`: the name of the program's node, and the index of its result.
    - `placement`, and `split` (a flat `algebra.split.Split` of the placement's dim) when it is S.
    """

    origin: str
    item: int
    placement: Placement
    split: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Trace:
    """The name of each emitted node of the flat rewritten graph to its value."""

    values: Mapping[str, TracedValue]
