"""What it costs to change one value's placement, and which way of several is the cheapest.

A cost is (forbidden, time in picoseconds, collectives, conversions), compared as a tuple. The
solver prices edges with it and the rewriter asks it again which conversions were meant, so both
must agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import TypeAlias

from autotp.algebra.placement import CONVERSIONS, IDENTITY, SUMS, Placement, Primitive
from autotp.cost.collectives import estimate_time_ps
from autotp.cost.machine import Machine

__all__ = ["Cost", "Delivered", "Prices", "count_moved_bytes", "list_primitives"]

Cost: TypeAlias = tuple[int, int, int, int]
Delivered: TypeAlias = tuple[Placement, ...]
"""One or two placements that a value with several readers is brought to."""

_FREE: Cost = (0, 0, 0, 0)
_NEVER: Cost = (1, 0, 0, 0)


_UNPRICED = {("R~", "R"), ("S", "R~")}
"""Right for activations, but left out of the search (docs/solver.md): they would trade half of one
all-reduce a step for a residual stream whose gradient, and every norm's, is partial in all
layers."""


def list_primitives(
    source: Placement,
    target: Placement,
    *,
    weight: bool,
    keep: bool,
    training: bool,
    everything: bool = False,
) -> tuple[Primitive, Primitive] | None:
    """The (forward, backward) primitives of a conversion, or None if it is forbidden.

    - `weight`: the value is a parameter or computed from parameters alone.
    - `keep`: the reader is a bias slot, where R may become P, as a weight may anywhere.
    - `everything`: conversions that the search leaves out are open too.
    """
    if source == target:
        return IDENTITY, IDENTITY
    if source.kind == target.kind and source.dim == target.dim:
        return None  # two axes of one dim: gathered first
    conversion = CONVERSIONS.get((source.kind, target.kind))
    if conversion is None:
        return None
    if (source.kind, target.kind) == ("R", "P") and not (keep or weight):
        return None
    if not (weight or everything) and (source.kind, target.kind) in _UNPRICED:
        return None
    if weight and not _may_convert_weight(source, target, training=training):
        return None
    return conversion.forward, conversion.backward


def _may_convert_weight(source: Placement, target: Placement, *, training: bool) -> bool:
    """Whether a weight may change so: no collective forward or backward, outside the bucket."""
    pairs = {("R", "P"), ("R~", "R"), ("R~", "S"), ("R~", "S~")}
    return (source.kind, target.kind) in (pairs if training else pairs | {("R", "S")})


def count_moved_bytes(kind: str, size: int, tp: int, padding: Fraction) -> int:
    """The largest tensor on a rank when a collective moves a value of `size` bytes."""
    if kind == "all_reduce":
        return size
    padded = ceil(size * padding)
    return padded // tp if kind == "all_to_all" else padded


@dataclass(slots=True)
class Prices:
    """Costs of conversions of one value of `size` bytes.

    - `summed`: its bytes where it is summed over the group, in a wider dtype perhaps.
    - `flows`: a gradient flows through it; `weight`: it is computed from parameters alone.
    - `padding`: how many bytes ranks exchange a byte of a value cut so; more than 1 where parts are
      uneven, since collectives move parts of one length.
    """

    size: int
    summed: int
    flows: bool
    weight: bool
    training: bool
    tp: int
    machine: Machine
    everything: bool = False
    padding: Callable[[Placement], Fraction] = lambda _: Fraction(1)
    cache: dict[tuple[Placement, Placement, bool], Cost] = field(
        default_factory=dict[tuple[Placement, Placement, bool], Cost]
    )

    def between(self, source: Placement, target: Placement, *, keep: bool = False) -> Cost:
        """The cost of one conversion."""
        key = (source, target, keep)
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = self._price(source, target, keep)
        return found

    def _price(self, source: Placement, target: Placement, keep: bool) -> Cost:
        if source == target:
            return _FREE
        steps = list_primitives(
            source,
            target,
            weight=self.weight,
            keep=keep,
            training=self.training,
            everything=self.everything,
        )
        if steps is None:
            return _NEVER
        both = steps if self.flows and self.training else steps[:1]
        run = [kind for step in both if (kind := step.collective)]
        cut = source if source.is_split else target
        return 0, sum(self._time(kind, cut) for kind in run), len(run), 1

    def _time(self, kind: str, cut: Placement) -> int:
        own = self.summed if kind in SUMS else self.size
        size = count_moved_bytes(kind, own, self.tp, self.padding(cut))
        return estimate_time_ps(kind, size, self.tp, self.machine)

    def tree(self, source: Placement, targets: Delivered) -> Cost:
        """The cost of the cheapest way to have every one of `targets`."""
        return self.cheapest(source, targets)[0]

    def cheapest(self, source: Placement, targets: Delivered) -> tuple[Cost, tuple[int, ...]]:
        """The cheapest tree: its cost, and for each target its parent among them (-1: the
        source).
        """
        if len(targets) == 1:
            return self.between(source, targets[0]), (-1,)
        one, two = targets
        first, second = self.between(source, one), self.between(source, two)
        return min(
            (_add_costs(first, second), (-1, -1)),
            (_add_costs(first, self.between(one, two)), (-1, 0)),
            (_add_costs(second, self.between(two, one)), (1, -1)),
        )

    def nearest(
        self, sources: Delivered, target: Placement, *, keep: bool = False
    ) -> tuple[Cost, Placement]:
        """The cheapest conversion to `target` from any of `sources`, and from which."""
        costs = [(self.between(s, target, keep=keep), k) for k, s in enumerate(sources)]
        cost, best = min(costs)
        return cost, sources[best]


def _add_costs(one: Cost, two: Cost) -> Cost:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2], one[3] + two[3]
