"""Which axes are sharded together, and into how many shards each.

Nearly always one axis with one shard per rank: `a17`. Two other forms are needed:

    a17/2:4+a18/4:1   a factored group: 2 key-value heads over 2 groups of 4 ranks, and the query
                      heads of each over the 4; a value with `a17` alone has 4 copies
    a17+a40           two axes next to each other in one fused weight, one shard each per rank

A value is sharded along those of the axes that it has: its partition is the restriction to them.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, total_ordering
from typing import NamedTuple


class Part(NamedTuple):
    """An axis in `parts` (0: one per rank), of which rank r has `r // stride % parts`."""

    axis: str
    parts: int = 0
    stride: int = 1

    def __str__(self) -> str:
        """`a17`, or `a17/2:4`."""
        return f"{self.axis}/{self.parts}:{self.stride}" if self.parts else self.axis


@total_ordering
@dataclass(frozen=True)
class Partition:
    """Parts of several axes, in a fixed order; partitions are sorted by their notation."""

    parts: tuple[Part, ...]

    def __lt__(self, other: "Partition") -> bool:
        """Whether the notation of `self` comes first."""
        return str(self) < str(other)

    def __str__(self) -> str:
        """The notation, e.g. `a17/2:4+a18/4:1`."""
        return "+".join(str(p) for p in self.parts)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(p.axis for p in self.parts)

    def part(self, axis: str) -> Part | None:
        """How `axis` is sharded, None if it is not."""
        return next((p for p in self.parts if p.axis == axis), None)

    def among(self, axes: Container[str]) -> "Partition":
        """The restriction to `axes`."""
        kept = tuple(p for p in self.parts if p.axis in axes)
        return self if len(kept) == len(self.parts) else Partition(kept)

    def without(self, axes: Container[str]) -> "Partition":
        """The partition without `axes`."""
        return Partition(tuple(p for p in self.parts if p.axis not in axes))


UNCUT = Partition(())
"""The partition of a value that is not split."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What may be sharded besides the axes that the group size divides.

    - `uneven`: axes that are sharded into complete units, although the group size does not divide
      them.
    - `joint`: partitions of several axes.
    """

    uneven: frozenset[str] = frozenset()
    joint: tuple[Partition, ...] = ()
