"""Why a pair, or a parameter, stays whole on every rank: a true reason, in words."""

from collections.abc import Mapping, Sequence
from math import prod

from autotp.analysis import AxisPair
from autotp.core.axis import Atom
from autotp.core.placement import PARTIAL, REPLICATED
from autotp.layouts import Layouts, overridden
from autotp.offers import factored
from autotp.passes.account_found import Asked, Found
from autotp.whole import Whole

__all__ = ["Reasons"]


class Reasons:
    """The reasons of one decision; `names` are those of the pairs' axes."""

    def __init__(
        self,
        whole: Whole,
        found: Found,
        asked: Asked,
        layouts: Layouts,
        names: Mapping[str, str],
    ) -> None:
        self.whole, self.found, self.asked = whole, found, asked
        self.layouts, self.names = layouts, names

    def pair(self, pair: AxisPair) -> str:
        """Why a pair stays whole, with the tp sizes that would split it."""
        tp = self.asked.tp
        sizes = {a: a.size.static or 0 for a in pair.axes}
        if any(self._is_split(n) for n in (*pair.openers, *pair.closers)):
            return "its parameters are cut along another axis"
        if max(sizes.values()) >= tp:
            return self._barred((*pair.openers, *pair.closers))
        named = ", ".join(
            f"{self.names[a.name].rpartition('.')[2]} ({s})" for a, s in sizes.items()
        )
        most = max(n for n in range(1, prod(sizes.values()) + 1) if _fits(pair, n))
        return f"{named}: too few for tp {tp}; tp sizes that split it: {_up_to(most)}"

    def parameter(self, name: str, layout: str) -> str:
        """Why every rank holds a parameter whole."""
        if self.asked.tp == 1:
            return "there is one rank"
        if name not in self.found.analysis.parameters:
            return "the captured graph does not use it"
        if any(self._matches(name, glob) for glob in self.asked.overrides):
            return "an override asks for it"
        pair = self.found.matching.pair_of.get(name)
        if pair is not None:
            return self._in_pair(name, pair)
        if self._is_added_after(name):
            return "a row-parallel layer adds its bias once, after the sum"
        if layout == "norm":
            return "a norm needs its whole dim on every rank"
        return self._alone(name)

    def _is_split(self, name: str) -> bool:
        return self.found.decision.parameters.get(name, REPLICATED).is_split

    def _in_pair(self, name: str, pair: AxisPair) -> str:
        home = self.found.matching.home[name]
        if any((a.size.static or 0) >= self.asked.tp for a in home):
            return self._barred((name,))
        return self.pair(pair)

    def _is_added_after(self, name: str) -> bool:
        """Whether a parameter is the bias of products that are partial sums before it is added."""
        strategies = self.found.decision.strategies
        products = self.layouts.products(name) if len(self._dims(name)) == 1 else []
        return bool(products) and all(PARTIAL in strategies[n].results for n in products)

    def _alone(self, name: str) -> str:
        """Why a parameter of no pair stays whole: it is cut where that costs nothing."""
        tp = self.asked.tp
        axes = [a for dim in self._dims(name) for a in self.layouts.analysis.forest.leaves(dim)]
        if not any((a.size.static or 1) % tp == 0 and not a.data for a in axes):
            sizes = ", ".join(dict.fromkeys(str(a.size) for a in axes))
            return f"it is in no pair, and tp {tp} divides none of its axes ({sizes})"
        if self._size((name,)) < self._least():
            return self._barred((name,))
        return "it is in no pair, and to cut it would cost a collective"

    def _dims(self, name: str) -> tuple[tuple[Atom, ...], ...]:
        analysis = self.found.analysis
        return analysis.dims[(analysis.parameters[name], 0)]

    def _barred(self, names: Sequence[str]) -> str:
        """Why parameters stay whole that could be cut evenly."""
        size, least = self._size(names), self._least()
        if size < least:
            return f"its {size} bytes are below the threshold of {int(least)}"
        if self.asked.overrides:
            return "other layouts were asked for"
        return "an op that reads it needs it whole, or joins it with pieces cut along another axis"

    def _size(self, names: Sequence[str]) -> int:
        return max(self.whole.parameters[n].nbytes for n in names)

    def _least(self) -> float:
        """The bytes below which a parameter is free to stay whole."""
        return self.asked.shard_threshold * max(t.nbytes for t in self.whole.parameters.values())

    def _matches(self, name: str, glob: str) -> bool:
        return self.asked.overrides[glob] == "replicated" and overridden(name, glob)


def _fits(pair: AxisPair, tp: int) -> bool:
    """Whether `tp` ranks can share the pair's axes."""
    return any((a.size.static or 0) >= tp for a in pair.axes) or bool(factored(pair, tp))


def _up_to(most: int) -> str:
    if most < 3:
        return "2" if most == 2 else "none"
    return f"2 to {most}"
