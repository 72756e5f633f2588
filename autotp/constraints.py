"""What overrides, or a plan given to follow, leave to each parameter."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path

from autotp.analysis import Analysis, Matching
from autotp.core.placement import Placement
from autotp.core.plan import Plan
from autotp.errors import PlanError
from autotp.layouts import LAYOUTS, Layouts, overridden
from autotp.whole import Whole, fingerprint

__all__ = ["Allowed", "as_overridden", "as_planned", "followed"]

Allowed = dict[str, Callable[[Placement], bool]]
"""For each parameter that is not free: which placements it may take."""


def followed(given: Plan | str | Path, whole: Whole, tp: int, *, training: bool) -> Plan:
    """The plan given to follow; PlanError if it is of another model, size or mode."""
    drawn = given if isinstance(given, Plan) else Plan.from_json(Path(given))
    where = f"plan= (for {drawn.model}, tp {drawn.tp})"
    if drawn.tp != tp:
        raise PlanError(f"{where}: tp is {tp} here. Give a plan for tp {tp}, or tp={drawn.tp}.")
    if drawn.fingerprint != fingerprint(whole):
        raise PlanError(
            f"{where}: its {len(drawn.parameters)} parameters are not the "
            f"{len(whole.parameters)} of {whole.name}{_difference(drawn, whole)}. "
            "Give the plan of this very model, or none."
        )
    if drawn.training != training:
        raise PlanError(
            f"{where}: was made with training={drawn.training}, asked for is "
            f"training={training}. Pass training={drawn.training}, or make another plan."
        )
    return drawn


def as_planned(plan: Plan, analysis: Analysis) -> Allowed:
    """Every parameter split as `plan` says; a whole one stays whole, however its gradient is summed."""
    return {name: _planned(plan, analysis, name) for name in analysis.parameters}


def as_overridden(
    overrides: Mapping[str, str], whole: Whole, analysis: Analysis, matching: Matching
) -> Allowed:
    """What `overrides` (globs to layouts) leave to the parameters they name; later ones win."""
    allowed: Allowed = {}
    layouts = Layouts(analysis, matching)
    for glob, layout in overrides.items():
        for name in _chosen(glob, layout, whole, analysis):
            allowed[name] = _having(layouts, name, layout)
    return allowed


def _planned(plan: Plan, analysis: Analysis, name: str) -> Callable[[Placement], bool]:
    record = plan.parameters[name]
    dims = analysis.dims[(analysis.parameters[name], 0)]
    forest = analysis.forest

    def same(placement: Placement) -> bool:
        if placement.kind != "S":
            return record.dim is None
        if placement.dim != record.dim:
            return False
        atom = forest.find(forest.atoms[int(placement.axis[1:])])
        split = forest.split(dims[placement.dim], atom)
        return split is not None and split.encode() == record.split

    return same


def _chosen(glob: str, layout: str, whole: Whole, analysis: Analysis) -> list[str]:
    """The parameters that a glob names."""
    if layout not in LAYOUTS:
        close = get_close_matches(layout, LAYOUTS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PlanError(
            f"overrides: {glob!r} asks for layout {layout!r}; layouts are "
            f"{', '.join(LAYOUTS)}.{hint}"
        )
    names = [n for n in analysis.parameters if overridden(n, glob)]
    if not names:
        every = list(whole.parameters)
        close = get_close_matches(glob, every, 3, 0.3) or every[:3]
        raise PlanError(
            f"overrides: {glob!r} matches none of the {len(every)} parameters of "
            f"{whole.name}. Names are such as {', '.join(close)}."
        )
    return names


def _having(layouts: Layouts, name: str, layout: str) -> Callable[[Placement], bool]:
    return lambda placement: layouts.fits(name, placement, layout)


def _difference(drawn: Plan, whole: Whole) -> str:
    for name, record in drawn.parameters.items():
        tensor = whole.parameters.get(name)
        if tensor is None:
            return f" (the model has no {name})"
        if tuple(tensor.shape) != record.shape:
            return f" ({name} is {list(record.shape)} in the plan, {list(tensor.shape)} in the model)"
    return ""
