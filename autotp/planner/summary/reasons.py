"""Why a pair, or a parameter, stays model on every rank: a true reason, in words.

A reason names what stands in the way: an axis with its size, or an op with its place. Vectors that
scale or shift and are together below `DETAIL` of the bytes are told so in one line.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from autotp.algebra.axis import Atom
from autotp.algebra.placement import PARTIAL, REPLICATED
from autotp.algebra.split import Split
from autotp.capture.sizes import Pricing
from autotp.capture.source_model import SourceModel
from autotp.planner.analysis import AxisPair
from autotp.planner.layouts import Layouts, matches_glob
from autotp.planner.offers import factor_pair
from autotp.planner.summary.findings import Call, Findings
from autotp.planner.summary.walk import Stop, Walk, describe_place
from autotp.records.replication import star_layers

__all__ = ["Reasons"]

DETAIL: Final = 0.001
"""The share of the bytes, repeats over layers together, above which every reason has its place."""


class Reasons:
    """The reasons of one decision; `names` are those of the pairs' axes."""

    def __init__(
        self,
        model: SourceModel,
        findings: Findings,
        pricing: Pricing,
        call: Call,
        layouts: Layouts,
        names: Mapping[str, str],
    ) -> None:
        self.model, self.found, self.pricing, self.call = model, findings, pricing, call
        self.layouts, self.names = layouts, names
        self.walk = Walk(findings.analysis, findings.ways)
        self.repeated: dict[str, int] = defaultdict(int)
        for name, tensor in model.parameters.items():
            self.repeated[star_layers(name)] += tensor.nbytes

    def explain_pair(self, pair: AxisPair) -> str:
        """Why a pair stays model, with the tp sizes that would split it."""
        if self._has_too_few_units(pair.axes, pair):
            return self._explain_too_few_units(pair)
        names = (*pair.openers, *pair.closers)
        others = [a for n in names for a in self._list_split_axes(n)]
        if others:
            told = ", ".join(dict.fromkeys(self._name_axis(a) for a in others))
            return f"its parameters are cut along another axis: {told}"
        return self._explain_paired(max(names, key=self._count_bytes), pair.axes)

    def explain_parameter(self, name: str, layout: str) -> str:
        """Why every rank holds a parameter model."""
        if self.call.tp == 1:
            return "there is one rank"
        if name not in self.found.analysis.parameters:
            return f"unused: no op of the captured graph ({self.call.variant}) reads it"
        if any(self._is_requested(name, glob) for glob in self.call.overrides):
            return "an override asks for it"
        pair = self.found.matching.pair_of.get(name)
        if pair is not None:
            home = self.found.matching.home[name]
            return (
                self._explain_too_few_units(pair)
                if self._has_too_few_units(home, pair)
                else self._explain_paired(name, home)
            )
        if product := self._find_summed_product(name):
            return f"bias of the row-parallel {product}: added once, after the sum"
        if (
            layout == "norm"
            and self.repeated[star_layers(name)] <= DETAIL * self._count_all_bytes()
        ):
            return "it scales or shifts what every rank holds model"
        return self._explain_unpaired(name)

    def explain_segments(self, split: Split, dim: int, axis: str) -> str:
        """Why every rank holds a part of a parameter that is cut; empty if there is none."""
        if not split.whole():
            return ""
        word = axis.rpartition(".")[2]
        return (
            f"segments of dim {dim} without {word} are model on every rank: {split.whole()} of its "
            f"{split.length()} elements"
        )

    def _has_too_few_units(self, axes: Sequence[Atom], pair: AxisPair) -> bool:
        """Whether `axes` have too few units, and their pair no way to share them."""
        few = all(a.units < self.call.tp for a in axes)
        return few and not factor_pair(pair, self.call.tp)

    def _explain_too_few_units(self, pair: AxisPair) -> str:
        sizes = {a: a.units for a in pair.axes}
        named = ", ".join(
            f"{self.names[a.name].rpartition('.')[2]} ({s})" for a, s in sizes.items()
        )
        most = max(n for n in range(1, prod(sizes.values()) + 1) if _can_split(pair, n))
        return (
            f"{named}: too few for tp {self.call.tp}; tp sizes that split it: {_format_sizes(most)}"
        )

    def _list_split_axes(self, name: str) -> tuple[str, ...]:
        """What a parameter is cut along."""
        return self.found.decision.parameters.get(name, REPLICATED).partition.axes

    def _find_summed_product(self, name: str) -> str:
        """Where the products are that a bias is added to, if they are partial sums before it."""
        strategies = self.found.decision.strategies
        products = self.layouts.find_products(name) if len(self._list_dims(name)) == 1 else []
        partial = bool(products) and all(PARTIAL in strategies[n].results for n in products)
        return describe_place(products[0]) if partial else ""

    def _explain_paired(self, name: str, axes: Sequence[Atom]) -> str:
        """Why a parameter stays model that its pair's axes would cut."""
        size = self._count_bytes(name)
        least = self.call.shard_threshold * max(t.nbytes for t in self.model.parameters.values())
        if size < least:
            return f"its {size} bytes are below the threshold of {int(least)}"
        if self.call.overrides:
            return "other layouts were call for"
        return self._explain_axes(name, axes)

    def _explain_unpaired(self, name: str) -> str:
        """Why a parameter of no pair stays model: it is cut where that costs nothing."""
        axes = [
            a for dim in self._list_dims(name) for a in self.layouts.analysis.forest.leaves(dim)
        ]
        fitting = [a for a in axes if self._divides(a)]
        if not fitting:
            sizes = ", ".join(dict.fromkeys(str(a.size) for a in axes))
            return f"it is in no pair, and tp {self.call.tp} divides none of its axes ({sizes})"
        return f"it is in no pair: {self._explain_axes(name, fitting)}"

    def _divides(self, axis: Atom) -> bool:
        return axis.is_splittable and axis.units % self.call.tp == 0

    def _explain_axes(self, name: str, axes: Sequence[Atom]) -> str:
        """Where cuts of a parameter along `axes` end, those that end alike together."""
        found: dict[str, list[str]] = defaultdict(list)
        contains = self.layouts.analysis.forest.contains
        for number, dim in enumerate(self._list_dims(name)):
            for axis in (a for a in dict.fromkeys(axes) if contains(dim, a)):
                found[self._explain_axis(name, number, axis)].append(f"dim {number} ({axis.size})")
        return "; ".join(
            f"along {' and '.join(dict.fromkeys(dims))}: {end}" for end, dims in found.items()
        )

    def _explain_axis(self, name: str, dim: int, axis: Atom) -> str:
        """Where a cut of a dim along one axis ends."""
        met, stop = self.walk.find_meeting_op(name, dim, axis), self.walk.find_stop(name, dim, axis)
        if met is not None and (stop is None or stop.node is not met):
            return f"{describe_place(met)} meets it with what is model"
        if stop is None:
            return "nothing reads it"
        if stop.node is None:
            return f"an output of the model needs it model, {self._describe_collective('gather', stop)}"
        if not stop.why:
            return f"{describe_place(stop.node)} leaves a partial sum, {self._describe_collective('reduce', stop)}"
        price = f", {self._describe_collective('gather', stop)}"
        weight = stop.value in self.found.analysis.weights
        return f"{describe_place(stop.node)} {stop.why}" + ("" if weight else price)

    def _describe_collective(self, kind: str, stop: Stop) -> str:
        size = self.pricing.count_bytes(self.found.analysis.metas[stop.value])
        return f"an all-{kind} of {size} bytes there"

    def _list_dims(self, name: str) -> tuple[tuple[Atom, ...], ...]:
        analysis = self.found.analysis
        return analysis.dims[(analysis.parameters[name], 0)]

    def _name_axis(self, axis: str) -> str:
        return self.names.get(axis, axis)

    def _count_bytes(self, name: str) -> int:
        return self.model.parameters[name].nbytes

    def _count_all_bytes(self) -> int:
        return sum(self.repeated.values())

    def _is_requested(self, name: str, glob: str) -> bool:
        return self.call.overrides[glob] == "replicated" and matches_glob(name, glob)


def _can_split(pair: AxisPair, tp: int) -> bool:
    """Whether `tp` ranks can share the pair's axes."""
    return any(a.units >= tp for a in pair.axes) or bool(factor_pair(pair, tp))


def _format_sizes(most: int) -> str:
    if most < 3:
        return "2" if most == 2 else "none"
    return f"2 to {most}"
