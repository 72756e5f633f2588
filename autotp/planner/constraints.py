"""Constraints on the placement of a parameter: from overrides, or from a plan to follow."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from autotp.algebra.axis import Atom
from autotp.algebra.placement import Placement, split
from autotp.capture.source_model import SourceModel, compute_fingerprint
from autotp.errors import PlanError
from autotp.planner.analysis import Analysis, Matching
from autotp.planner.layouts import Layouts, check_layout, matches_glob
from autotp.records.plan import Plan

_NO_SUCH_DIM = {
    "column": "no op that reads it maps one of its dims to a dim of the result",
    "row": "no op that reads it contracts one of its dims",
    "vocabulary": "it is neither an embedding nor a classification head",
    "expert": "it is not one weight of several experts",
}


def check_followed_plan(plan: Plan, model: SourceModel, tp: int, *, training: bool) -> Plan:
    """Return `plan`; raise PlanError if it is for another model, tp size or mode."""
    where = f"plan= (for {plan.model}, tp {plan.tp})"
    if plan.tp != tp:
        raise PlanError(f"{where}: tp is {tp} here. Pass a plan for tp {tp}, or tp={plan.tp}.")
    if plan.fingerprint != compute_fingerprint(model):
        raise PlanError(
            f"{where}: its {len(plan.parameters)} parameters are not the "
            f"{len(model.parameters)} of {model.name}{_describe_difference(plan, model)}. "
            "Pass the plan of this very model, or none."
        )
    if plan.training != training:
        raise PlanError(
            f"{where}: the plan was made with training={plan.training}, but training={training} is "
            f"requested. Pass training={plan.training}, or make another plan."
        )
    return plan


def constrain_to_plan(plan: Plan, analysis: Analysis) -> dict[str, "PlanConstraint"]:
    """Shard every parameter as `plan` does; the kind of gradient of a replicated one is free."""
    return {name: PlanConstraint(plan, analysis, name) for name in analysis.parameters}


def constrain_to_overrides(
    overrides: Mapping[str, str],
    model: SourceModel,
    analysis: Analysis,
    matching: Matching,
    tp: int,
) -> dict[str, "OverrideConstraint"]:
    """The constraints of `overrides` (globs to layouts) by parameter; later globs win.

    A bias follows its product: if a glob matches it together with a weight that is to be sharded
    along a contracted axis or the vocabulary, the bias stays free. So does a parameter that an
    `expert` glob matches together with experts, but that is not an expert itself.
    """
    allowed: dict[str, OverrideConstraint] = {}
    layouts = Layouts(analysis, matching)
    for glob, layout in overrides.items():
        chosen = _match_glob(glob, layout, model, analysis)
        several = matching.experts.keys() & {*chosen}
        for name in chosen:
            follows = name != glob and layout not in ("column", "replicated")
            not_expert = layout == "expert" and several and name not in several
            if not (follows and (not_expert or layouts.is_bias(name))):
                allowed[name] = OverrideConstraint(layouts, name, glob, layout, tp)
    return allowed


@dataclass(frozen=True, slots=True)
class PlanConstraint:
    """One parameter, split as a plan says."""

    plan: Plan
    analysis: Analysis
    name: str

    def __call__(self, placement: Placement) -> bool:
        """Whether `placement` shards the parameter as the plan does."""
        record = self.plan.parameters[self.name]
        if not placement.is_split:
            return record.dim is None
        if placement.dim != record.dim:
            return False
        sharded = self.analysis.split((self.analysis.parameters[self.name], 0), placement)
        return sharded is not None and sharded.encode() == record.split

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """That no op of this graph can read the parameter as the plan shards it."""
        record = self.plan.parameters[self.name]
        return (
            f"plan= (for {self.plan.model}, tp {self.plan.tp}): it shards {self.name} "
            f"{list(record.shape)} along dim {record.dim} ({record.axis}), but none of the "
            f"{len(possible)} placements that the ops of this graph allow does so. "
            "Make the plan with these inputs as example_inputs=, or add an override."
        )


@dataclass(frozen=True, slots=True)
class OverrideConstraint:
    """One parameter, laid out as an override requests."""

    layouts: Layouts
    name: str
    glob: str
    layout: str
    tp: int

    def __call__(self, placement: Placement) -> bool:
        """Whether `placement` has the requested layout."""
        return self.layouts.fits(self.name, placement, self.layout)

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """Why the layout is impossible, which others are possible, and which tp sizes allow it."""
        node = self.layouts.analysis.parameters[self.name]
        shape = list(self.layouts.analysis.metas[(node, 0)].shape)
        return (
            f"overrides: {self.glob!r} requests layout {self.layout!r}, which {self.name} {shape} "
            f"cannot have over {self.tp} ranks: {self._explain()}. "
            f"Its possible layouts are {', '.join(self._list_alternatives(possible))}."
        )

    def _explain(self) -> str:
        axes = [axis for placement, axis in self._list_splits() if self(placement)]
        if not axes:
            return _NO_SUCH_DIM[self.layout]
        named = f"its axis {self._name_axes(axes)}"
        fitting = sorted({n for axis in axes for n in self._list_fitting_sizes(axis)})
        if self.tp in fitting:
            return f"no op that reads it can run on shards of {named}"
        numbers = ", ".join(map(str, fitting[:12]))
        return f"{named} cannot be sharded over {self.tp} ranks; tp sizes that split it: {numbers}"

    def _list_fitting_sizes(self, axis: Atom) -> Iterator[int]:
        """The tp sizes that can shard an axis: up to its size in a pair, else its divisors."""
        size = axis.units
        matching = self.layouts.matching
        paired = axis in {a for p in matching.pairs for a in p.axes} | {*matching.experts.values()}
        return (n for n in range(2, size + 1) if paired or size % n == 0)

    def _list_splits(self) -> Iterator[tuple[Placement, Atom]]:
        """Every way to shard the parameter along one of its axes, at any tp."""
        analysis = self.layouts.analysis
        for number, dim in enumerate(analysis.dims[(analysis.parameters[self.name], 0)]):
            for axis in analysis.forest.list_leaves(dim):
                if axis.is_splittable:
                    yield split(number, axis.name), axis

    def _list_alternatives(self, possible: Sequence[Placement]) -> list[str]:
        forest = self.layouts.analysis.forest
        axes: dict[tuple[str, int], list[Atom]] = {}
        for placement in possible:
            if placement.is_split:
                cut = self.layouts.name_layout(self.name, placement), placement.dim
                names = placement.partition.axes
                axes.setdefault(cut, []).extend(forest.find_axis(name) for name in names)
        cuts = (
            f"{of} (dim {dim}, its axis {self._name_axes(found)})"
            for (of, dim), found in axes.items()
        )
        return [*cuts, "replicated"]

    def _name_axes(self, axes: Iterable[Atom]) -> str:
        """The axes by name and size, those in no pair by size: `heads (8) or one of 64`."""
        names = {a: w for pair in self.layouts.matching.pairs for a, w in pair.names.items()}
        sized = sorted((a.units, names.get(a.name, "")) for a in set(axes))
        texts = [f"{name} ({size})" if name else f"one of {size}" for size, name in sized]
        return " or ".join(dict.fromkeys(texts)).removeprefix("one ")


def _match_glob(glob: str, layout: str, model: SourceModel, analysis: Analysis) -> list[str]:
    """The parameters that a glob matches."""
    check_layout(glob, layout)
    names = [n for n in analysis.parameters if matches_glob(n, glob)]
    if not names:
        every = list(model.parameters)
        close = get_close_matches(glob, every, 3, 0.3) or every[:3]
        raise PlanError(
            f"overrides: {glob!r} matches none of the {len(every)} parameters of "
            f"{model.name}. Similar names are {', '.join(close)}."
        )
    return names


def _describe_difference(plan: Plan, model: SourceModel) -> str:
    for name, record in plan.parameters.items():
        tensor = model.parameters.get(name)
        if tensor is None:
            return f" (the model has no {name})"
        if tuple(tensor.shape) != record.shape:
            return (
                f" ({name} is {list(record.shape)} in the plan, {list(tensor.shape)} in the model)"
            )
    return ""
