"""Why a pair, or a parameter, is replicated on every rank.

A reason names the obstacle: an axis with its size, or an op with its source line. Norm vectors that
together have less than `DETAIL` of the parameter bytes share one short reason.
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
from autotp.planner.summary.walk import Walk, describe_place
from autotp.records.replication import star_layers

DETAIL: Final = 0.001
"""The share of all parameter bytes, summed over layers, above which a reason names the op."""


class Reasons:
    """The reasons of one decision; `names` gives the printed name of each axis."""

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
        """Why a pair is not sharded, with the tp sizes that would shard it."""
        if self._has_too_few_units(pair.axes, pair):
            return self._explain_too_few_units(pair)
        names = (*pair.openers, *pair.closers)
        others = [a for n in names for a in self._list_split_axes(n)]
        if others:
            axes = ", ".join(dict.fromkeys(self._name_axis(a) for a in others))
            return f"its parameters are sharded along another axis: {axes}"
        return self._explain_paired(max(names, key=self._count_bytes), pair.axes)

    def explain_parameter(self, name: str, layout: str) -> str:
        """Why a parameter is replicated."""
        if self.call.tp == 1:
            return "tp is 1"
        if name not in self.found.analysis.parameters:
            return f"unused: no op of the captured graph ({self.call.variant}) reads it"
        if any(self._is_requested(name, glob) for glob in self.call.overrides):
            return "an override requests it"
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
            return "it scales or shifts a replicated value"
        return self._explain_unpaired(name)

    def explain_segments(self, split: Split, dim: int, axis: str) -> str:
        """Why some segments of a sharded parameter are replicated; empty if none are."""
        if not split.count_replicated():
            return ""
        word = axis.rpartition(".")[2]
        return (
            f"segments of dim {dim} without {word} are replicated: {split.count_replicated()} of "
            f"its {split.length()} elements"
        )

    def _has_too_few_units(self, axes: Sequence[Atom], pair: AxisPair) -> bool:
        """Whether `axes` have fewer units than ranks, and the group cannot be factored."""
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
        """The axes along which a parameter is sharded."""
        return self.found.decision.parameters.get(name, REPLICATED).partition.axes

    def _find_summed_product(self, name: str) -> str:
        """The place of the row-parallel product that a bias is added to; empty without one."""
        strategies = self.found.decision.strategies
        products = self.layouts.find_products(name) if len(self._list_dims(name)) == 1 else []
        partial = bool(products) and all(PARTIAL in strategies[n].results for n in products)
        return describe_place(products[0]) if partial else ""

    def _explain_paired(self, name: str, axes: Sequence[Atom]) -> str:
        """Why a parameter is replicated although it is in a pair."""
        size = self._count_bytes(name)
        least = self.call.shard_threshold * max(t.nbytes for t in self.model.parameters.values())
        if size < least:
            return f"its {size:,} bytes are below the shard threshold of {int(least):,} bytes"
        if self.call.overrides:
            return "the overrides request other layouts"
        return self._explain_axes(name, axes)

    def _explain_unpaired(self, name: str) -> str:
        """Why a parameter in no pair is replicated: sharding it would cost communication."""
        axes = [
            a
            for dim in self._list_dims(name)
            for a in self.layouts.analysis.forest.list_leaves(dim)
        ]
        fitting = [a for a in axes if self._divides(a)]
        if not fitting:
            sizes = ", ".join(dict.fromkeys(str(a.size) for a in axes))
            return (
                f"not in a column/row pair, and tp {self.call.tp} divides none of its axes "
                f"({sizes})"
            )
        return f"not in a column/row pair: {self._explain_axes(name, fitting)}"

    def _divides(self, axis: Atom) -> bool:
        return axis.is_splittable and axis.units % self.call.tp == 0

    def _explain_axes(self, name: str, axes: Sequence[Atom]) -> str:
        """What sharding a parameter along each of `axes` would cost; equal costs are merged."""
        found: dict[str, list[str]] = defaultdict(list)
        contains = self.layouts.analysis.forest.contains
        for number, dim in enumerate(self._list_dims(name)):
            for axis in (a for a in dict.fromkeys(axes) if contains(dim, a)):
                found[self._explain_axis(name, number, axis)].append(f"dim {number} ({axis.size})")
        return "; ".join(
            f"sharding {' and '.join(dict.fromkeys(dims))} {end}" for end, dims in found.items()
        )

    def _explain_axis(self, name: str, dim: int, axis: Atom) -> str:
        """What sharding a dim along one axis would cost, or what prevents it."""
        meeting = self.walk.find_meeting_op(name, dim, axis)
        stop = self.walk.find_stop(name, dim, axis)
        if meeting is not None and (stop is None or stop.node is not meeting):
            return f"is prevented by {describe_place(meeting)}, whose other operand is replicated"
        if stop is None:
            return "has no use: no op reads it"
        size = f"{self.pricing.count_bytes(self.found.analysis.metas[stop.value]):,}-byte"
        if stop.node is None:
            return f"needs a {size} all-gather before it is an output of the model"
        place = describe_place(stop.node)
        if not stop.why:
            return f"needs a {size} all-reduce after {place}, which leaves partial sums"
        if stop.value in self.found.analysis.weights:
            return f"is prevented by {place}, which {stop.why}"
        return f"needs a {size} all-gather before {place}, which {stop.why}"

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
