"""What every value of a rewritten graph is: which value of the captured program, lying how."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotp.algebra.placement import Placement

__all__ = ["Trace", "TracedValue"]


@dataclass(frozen=True, slots=True)
class TracedValue:
    """One emitted value.

    - `origin`, `item`: the program's node name, and which of its results.
    - `placement`, and `split` (a flat `algebra.split.Split` of the placement's dim) when it is S.
    """

    origin: str
    item: int
    placement: Placement
    split: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Trace:
    """Emitted node name (of the flat rewritten graph) to what it is."""

    values: Mapping[str, TracedValue]
