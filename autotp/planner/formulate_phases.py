"""Formulate prefill and decode together: weights have one placement in all phases, and a cache
keeps the placement that the previous phase gave it. Activations are placed freely in each phase.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotp.algebra.placement import Placement
from autotp.capture.graph_facts import Value
from autotp.planner.analysis import Analysis, list_cache_outputs
from autotp.planner.formulate import PlacementProblem
from autotp.solver.joint import Phase, Tie, merge_phases
from autotp.solver.problem import Problem

_PlacedVariable = tuple[int, tuple[Placement, ...], Value]
"""A variable with its domain, and the value that it places."""


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """One phase: its analysed program, its problem, and how often it runs."""

    analysis: Analysis
    problem: PlacementProblem
    calls: int


def formulate_phases(phases: Sequence[PlannedPhase]) -> tuple[list[Phase], Problem]:
    """The problem of each phase with its number of calls, and the merged problem."""
    counted: set[str] = set()
    parts: list[Phase] = []
    for phase in phases:
        parameters = phase.problem.parameters
        again = frozenset(v for name, (v, _) in parameters.items() if name in counted)
        counted |= {*parameters}
        parts.append(Phase(phase.problem.problem, phase.calls, again))
    return parts, merge_phases(parts, list(_tie_phases(phases)))


def _tie_phases(phases: Sequence[PlannedPhase]) -> Iterator[Tie]:
    """Tie weights to their first phase, and cache inputs to the previous phase's outputs."""
    weights: dict[str, tuple[int, Analysis, _PlacedVariable]] = {}
    left: dict[str, tuple[int, Analysis, _PlacedVariable]] = {}
    for number, phase in enumerate(phases):
        analysis = phase.analysis
        for name, held in _list_weights(phase).items():
            yield from _tie_variables(
                weights.setdefault(name, (number, analysis, held)), number, phase, held
            )
        taken, given = _list_caches(phase)
        for path, held in taken.items():
            if path in left:
                yield from _tie_variables(left[path], number, phase, held)
        left |= {path: (number, analysis, held) for path, held in given.items()}


def _tie_variables(
    before: tuple[int, Analysis, _PlacedVariable],
    number: int,
    phase: PlannedPhase,
    held: _PlacedVariable,
) -> Iterator[Tie]:
    first, analysis, (variable, domain, value) = before
    if first == number:
        return
    ours, choices, here = held
    cuts = [analysis.encode_split(value, p) for p in domain]
    agree = [[cut == phase.analysis.encode_split(here, p) for p in choices] for cut in cuts]
    yield Tie((first, variable), (number, ours), np.array(agree))


def _list_weights(phase: PlannedPhase) -> dict[str, _PlacedVariable]:
    nodes = phase.analysis.parameters
    return {name: (v, d, (nodes[name], 0)) for name, (v, d) in phase.problem.parameters.items()}


def _list_caches(
    phase: PlannedPhase,
) -> tuple[dict[str, _PlacedVariable], dict[str, _PlacedVariable]]:
    """The cache tensors that a phase reads, and those that it returns, by path."""
    kept: Mapping[str | int, tuple[int, tuple[Placement, ...]]] = phase.problem.caches
    outputs = list_cache_outputs(phase.analysis)
    taken = {
        k.path: (*kept[k.replaces.name], (k.replaces, 0)) for k in outputs if k.replaces is not None
    }
    return taken, {k.path: (*kept[k.number], k.value) for k in outputs}
