"""What overrides, or a plan given to follow, leave to each parameter."""

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

__all__ = [
    "OverrideConstraint",
    "PlanConstraint",
    "constrain_to_overrides",
    "constrain_to_plan",
    "check_followed_plan",
]

_NO_SUCH_DIM = {
    "column": "no op that reads it turns a dim of it into one of its result",
    "row": "no op that reads it contracts a dim of it",
    "vocabulary": "it is neither a looked-up table nor a head over classes",
    "expert": "no op chooses among parts of it",
}


def check_followed_plan(plan: Plan, model: SourceModel, tp: int, *, training: bool) -> Plan:
    """The plan given to follow; PlanError if it is of another model, size or mode."""
    where = f"plan= (for {plan.model}, tp {plan.tp})"
    if plan.tp != tp:
        raise PlanError(f"{where}: tp is {tp} here. Give a plan for tp {tp}, or tp={plan.tp}.")
    if plan.fingerprint != compute_fingerprint(model):
        raise PlanError(
            f"{where}: its {len(plan.parameters)} parameters are not the "
            f"{len(model.parameters)} of {model.name}{_describe_difference(plan, model)}. "
            "Give the plan of this very model, or none."
        )
    if plan.training != training:
        raise PlanError(
            f"{where}: was made with training={plan.training}, asked for is "
            f"training={training}. Pass training={plan.training}, or make another plan."
        )
    return plan


def constrain_to_plan(plan: Plan, analysis: Analysis) -> dict[str, "PlanConstraint"]:
    """Every parameter split as `plan` says; model ones stay model, however gradients are summed."""
    return {name: PlanConstraint(plan, analysis, name) for name in analysis.parameters}


def constrain_to_overrides(
    overrides: Mapping[str, str],
    model: SourceModel,
    analysis: Analysis,
    matching: Matching,
    tp: int,
) -> dict[str, "OverrideConstraint"]:
    """What `overrides` (globs to layouts) leave to the parameters they name; later ones win.

    A bias follows its product: where a glob names it beside a weight that is to be cut along a
    contracted axis or the vocabulary, it is left free. So is what a glob names beside experts.
    """
    allowed: dict[str, OverrideConstraint] = {}
    layouts = Layouts(analysis, matching)
    for glob, layout in overrides.items():
        chosen = _match_glob(glob, layout, model, analysis)
        several = matching.experts.keys() & {*chosen}
        for name in chosen:
            follows = name != glob and layout not in ("column", "replicated")
            beside = layout == "expert" and several and name not in several
            if not (follows and (beside or layouts.is_bias(name))):
                allowed[name] = OverrideConstraint(layouts, name, glob, layout, tp)
    return allowed


@dataclass(frozen=True, slots=True)
class PlanConstraint:
    """One parameter, split as a plan says."""

    plan: Plan
    analysis: Analysis
    name: str

    def __call__(self, placement: Placement) -> bool:
        """Whether `placement` cuts the parameter as the plan does."""
        record = self.plan.parameters[self.name]
        if not placement.is_split:
            return record.dim is None
        if placement.dim != record.dim:
            return False
        cut = self.analysis.split((self.analysis.parameters[self.name], 0), placement)
        return cut is not None and cut.encode() == record.split

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """That no op of this graph can read the parameter as the plan cuts it."""
        record = self.plan.parameters[self.name]
        return (
            f"plan= (for {self.plan.model}, tp {self.plan.tp}): it cuts {self.name} "
            f"{list(record.shape)} along dim {record.dim} ({record.axis}), but of the "
            f"{len(possible)} placements that the ops of this graph leave to it none does. "
            "Make the plan with these inputs as example_inputs=, or give an override."
        )


@dataclass(frozen=True, slots=True)
class OverrideConstraint:
    """One parameter, laid out as an override asks."""

    layouts: Layouts
    name: str
    glob: str
    layout: str
    tp: int

    def __call__(self, placement: Placement) -> bool:
        """Whether `placement` is of the layout asked for."""
        return self.layouts.fits(self.name, placement, self.layout)

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """Why the layout is impossible, which others are possible, and which tp sizes would do."""
        node = self.layouts.analysis.parameters[self.name]
        shape = list(self.layouts.analysis.metas[(node, 0)].shape)
        return (
            f"overrides: {self.glob!r} asks for layout {self.layout!r}, which {self.name} {shape} "
            f"cannot have over {self.tp} ranks: {self._explain()}. "
            f"Possible for it are {', '.join(self._list_alternatives(possible))}."
        )

    def _explain(self) -> str:
        axes = [axis for placement, axis in self._list_splits() if self(placement)]
        if not axes:
            return _NO_SUCH_DIM[self.layout]
        named = f"its axis {self._name_axes(axes)}"
        fitting = sorted({n for axis in axes for n in self._list_fitting_sizes(axis)})
        if self.tp in fitting:
            return f"no op that reads it can run on parts of {named}"
        numbers = ", ".join(map(str, fitting[:12]))
        return f"{named} has no parts for {self.tp} ranks; tp sizes that split it: {numbers}"

    def _list_fitting_sizes(self, axis: Atom) -> Iterator[int]:
        """The tp sizes that an axis can be cut for: up to its size in a pair, else its divisors."""
        size = axis.units
        matching = self.layouts.matching
        paired = axis in {a for p in matching.pairs for a in p.axes} | {*matching.experts.values()}
        return (n for n in range(2, size + 1) if paired or size % n == 0)

    def _list_splits(self) -> Iterator[tuple[Placement, Atom]]:
        """Every cut of the parameter along one of its axes, at any tp."""
        analysis = self.layouts.analysis
        for number, dim in enumerate(analysis.dims[(analysis.parameters[self.name], 0)]):
            for axis in analysis.forest.leaves(dim):
                if axis.is_splittable:
                    yield split(number, axis.name), axis

    def _list_alternatives(self, possible: Sequence[Placement]) -> list[str]:
        forest = self.layouts.analysis.forest
        axes: dict[tuple[str, int], list[Atom]] = {}
        for placement in possible:
            if placement.is_split:
                cut = self.layouts.name_layout(self.name, placement), placement.dim
                names = placement.partition.axes
                axes.setdefault(cut, []).extend(forest.named(name) for name in names)
        cuts = (
            f"{of} (dim {dim}, its axis {self._name_axes(found)})"
            for (of, dim), found in axes.items()
        )
        return [*cuts, "replicated"]

    def _name_axes(self, axes: Iterable[Atom]) -> str:
        """The axes by name and size, those in no pair by size: `heads (8) or one of 64`."""
        words = {a: w for pair in self.layouts.matching.pairs for a, w in pair.words.items()}
        sized = sorted((a.units, words.get(a.name, "")) for a in set(axes))
        told = [f"{word} ({size})" if word else f"one of {size}" for size, word in sized]
        return " or ".join(dict.fromkeys(told)).removeprefix("one ")


def _match_glob(glob: str, layout: str, model: SourceModel, analysis: Analysis) -> list[str]:
    """The parameters that a glob names."""
    check_layout(glob, layout)
    names = [n for n in analysis.parameters if matches_glob(n, glob)]
    if not names:
        every = list(model.parameters)
        close = get_close_matches(glob, every, 3, 0.3) or every[:3]
        raise PlanError(
            f"overrides: {glob!r} matches none of the {len(every)} parameters of "
            f"{model.name}. Names are such as {', '.join(close)}."
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
