"""The cost of converting a value between placements, and the cheapest of several ways.

A cost is (forbidden, time in picoseconds, collectives, conversions), compared as a tuple. Both the
placement problem and the rewrite use these functions, so that they agree on the conversions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import TypeAlias

from autotp.algebra.placement import CONVERSIONS, IDENTITY, SUMS, Placement, Primitive
from autotp.cost.collectives import estimate_time_ps
from autotp.cost.machine import Machine

Cost: TypeAlias = tuple[int, int, int, int]
Delivered: TypeAlias = tuple[Placement, ...]
"""One or two placements to which a value with several readers is converted."""

_FREE: Cost = (0, 0, 0, 0)
_NEVER: Cost = (1, 0, 0, 0)


_UNPRICED = {("R~", "R"), ("S", "R~")}
"""Correct for activations, but excluded from the search (docs/explanation/solver.md): they would
save half of one all-reduce per step, and make the gradients of the residual stream and of every
norm partial in all layers."""


def list_primitives(
    source: Placement,
    target: Placement,
    *,
    weight: bool,
    keep: bool,
    training: bool,
    everything: bool = False,
) -> tuple[Primitive, Primitive] | None:
    """List the (forward, backward) primitives of a conversion, or None if it is forbidden.

    - `weight`: the value is a parameter, or computed from parameters alone.
    - `keep`: the reader is a bias operand, where R may become P, as a weight may anywhere.
    - `everything`: conversions that the search excludes are allowed too.
    """
    if source == target:
        return IDENTITY, IDENTITY
    if source.kind == target.kind and source.dim == target.dim:
        return None  # two axes of one dim: it must be gathered first
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
    """Whether a weight may be converted so: without a collective outside the gradient bucket."""
    pairs = {("R", "P"), ("R~", "R"), ("R~", "S"), ("R~", "S~")}
    return (source.kind, target.kind) in (pairs if training else pairs | {("R", "S")})


def count_moved_bytes(kind: str, size: int, tp: int, padding: Fraction) -> int:
    """Count the bytes of the largest tensor on a rank when a collective moves `size` bytes."""
    if kind == "all_reduce":
        return size
    padded = ceil(size * padding)
    return padded // tp if kind == "all_to_all" else padded


@dataclass(slots=True)
class Prices:
    """The costs of converting one value of `size` bytes.

    - `summed`: its bytes when it is summed over the group, perhaps in a wider dtype.
    - `flows`: a gradient flows through it; `weight`: it is computed from parameters alone.
    - `padding`: bytes exchanged per byte of a value with a given placement; more than 1 for uneven
      shards, since collectives move shards of equal length.
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

    def price_conversion(self, source: Placement, target: Placement, *, keep: bool = False) -> Cost:
        """Estimate the cost of one conversion."""
        key = (source, target, keep)
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = self._compute_cost(source, target, keep)
        return found

    def _compute_cost(self, source: Placement, target: Placement, keep: bool) -> Cost:
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
        split = source if source.is_split else target
        return 0, sum(self._estimate_time(kind, split) for kind in run), len(run), 1

    def _estimate_time(self, kind: str, split: Placement) -> int:
        own = self.summed if kind in SUMS else self.size
        size = count_moved_bytes(kind, own, self.tp, self.padding(split))
        return estimate_time_ps(kind, size, self.tp, self.machine)

    def price_tree(self, source: Placement, targets: Delivered) -> Cost:
        """Estimate the cost of the cheapest way to deliver all `targets`."""
        return self.find_cheapest_tree(source, targets)[0]

    def find_cheapest_tree(
        self, source: Placement, targets: Delivered
    ) -> tuple[Cost, tuple[int, ...]]:
        """Find the cheapest tree: its cost, and the parent of each target (-1: the source)."""
        if len(targets) == 1:
            return self.price_conversion(source, targets[0]), (-1,)
        one, two = targets
        first, second = self.price_conversion(source, one), self.price_conversion(source, two)
        return min(
            (_add_costs(first, second), (-1, -1)),
            (_add_costs(first, self.price_conversion(one, two)), (-1, 0)),
            (_add_costs(second, self.price_conversion(two, one)), (1, -1)),
        )

    def find_nearest(
        self, sources: Delivered, target: Placement, *, keep: bool = False
    ) -> tuple[Cost, Placement]:
        """Find the cheapest conversion to `target` from any of `sources`: cost and source."""
        costs = [(self.price_conversion(s, target, keep=keep), k) for k, s in enumerate(sources)]
        cost, best = min(costs)
        return cost, sources[best]


def _add_costs(one: Cost, two: Cost) -> Cost:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2], one[3] + two[3]
