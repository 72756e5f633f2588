"""What a parameter's layout costs: bytes off its home axis, a share of the bucket, bytes held."""

from typing import NamedTuple

from autotp.algebra.partition import Partition
from autotp.algebra.placement import Placement
from autotp.algebra.split import Split
from autotp.capture.graph_facts import Value
from autotp.cost.collectives import time_ps
from autotp.planner.analysis import Analysis, Matching
from autotp.planner.terms import Terms

__all__ = ["Weights"]


class Cost(NamedTuple):
    """Levels of one layout: `home` and `held` in bytes, `time` in picoseconds."""

    home: int
    time: int
    held: int


class Weights:
    """The parameters of one program under one set of terms."""

    def __init__(self, analysis: Analysis, matching: Matching, terms: Terms) -> None:
        self.analysis, self.matching, self.terms = analysis, matching, terms
        self.largest = max((self._bytes((n, 0)) for n in analysis.parameters.values()), default=0)

    def cost(self, name: str, value: Value, placement: Placement) -> Cost:
        """What parameter `name` costs in `placement`."""
        size, split = self._bytes(value), self._split(value, placement)
        home, off = self._home(name, size), 0
        if home and home.isdisjoint(Partition.of(placement.axis).axes):
            off = size
        elif home and split is not None:  # segments without the axis stay whole
            off = size * split.whole() // split.length()
        summed = self.terms.summed(self.analysis.metas[value])
        return Cost(off, self._bucket(placement, split, summed), self._held(split, size))

    def _bytes(self, value: Value) -> int:
        meta = self.analysis.metas[value]
        return meta.numel() * meta.element_size()

    def _held(self, split: Split | None, size: int) -> int:
        """The bytes that the fullest rank holds."""
        if split is None:
            return size
        return size * split.local_length(0, self.terms.tp) // split.length()

    def _split(self, value: Value, placement: Placement) -> Split | None:
        """How a parameter is cut; None if it is whole."""
        if not placement.is_split:
            return None
        dim = self.analysis.dims[value][placement.dim]
        return self.analysis.forest.split(dim, Partition.of(placement.axis))

    def _home(self, name: str, size: int) -> frozenset[str]:
        """Names of the axes one of which the parameter should be split along; empty if it is
        free.
        """
        if size < self.terms.shard_threshold * self.largest:
            return frozenset()
        offers, tp = self.terms.offers, self.terms.tp
        open_axes = offers.uneven.union(*(p.axes for p in offers.joint))
        axes = self.matching.home.get(name, ())
        return frozenset(
            a.name for a in axes if (a.size.static or 0) % tp == 0 or a.name in open_axes
        )

    def _bucket(self, placement: Placement, split: Split | None, size: int) -> int:
        """The time of a partial gradient's share of the bucket: its bytes, no latency."""
        if placement.kind == "R~":
            return self._moving(size, self.terms.tp)
        if placement.kind != "S~" or split is None:
            return 0
        shared = split.copied(self.terms.tp).items()
        return sum(self._moving(size * n // split.length(), p.count) for p, n in shared)

    def _moving(self, size: int, ranks: int) -> int:
        machine = self.terms.machine
        nothing = time_ps("all_reduce", 0, ranks, machine)
        return time_ps("all_reduce", size, ranks, machine) - nothing
