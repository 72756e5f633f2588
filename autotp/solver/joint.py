"""Several placement problems as one: phases of a run that share weights and caches.

Each phase keeps its own variables and edges, and its costs per call are multiplied by its calls. A
tie makes a variable of one phase agree with one of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from autotp.solver.problem import Edge, Problem, Solution, Variable

_PER_CALL = ("time_ps", "collectives", "conversions")
"""The levels that are multiplied by the calls; memory counts once."""


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """One problem, its number of calls, and the variables whose costs an earlier phase counts."""

    problem: Problem
    calls: int = 1
    counted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """Two variables, as (phase, index): `agree[i, j]` says whether choices i and j agree."""

    first: tuple[int, int]
    second: tuple[int, int]
    agree: NDArray[np.bool_]


def merge_phases(phases: Sequence[Phase], ties: Sequence[Tie]) -> Problem:
    """Merge all phases, in order, into one problem."""
    starts = _find_starts(phases)
    variables: list[Variable] = []
    edges: list[Edge] = []
    for number, (phase, start) in enumerate(zip(phases, starts, strict=False)):
        scaler = _CostScaler(_count_calls(phase))
        for index, variable in enumerate(phase.problem.variables):
            costs = scaler.scale(variable.costs)
            if index in phase.counted:
                costs = _drop_costs(phase.problem.levels, costs)
            name = f"{number}: {variable.name}" if number else variable.name
            variables.append(replace(variable, name=name, costs=costs))
        for edge in phase.problem.edges:
            edges.append(Edge(edge.first + start, edge.second + start, scaler.scale(edge.costs)))
    levels = phases[0].problem.levels
    edges += [_build_edge(tie, starts, levels) for tie in ties]
    return Problem(levels, tuple(variables), tuple(edges))


def split_solution(phases: Sequence[Phase], solution: Solution) -> list[Solution]:
    """Split the choices by phase; each solution has the cost and bound of the merged problem."""
    starts = _find_starts(phases)
    return [
        replace(solution, choice=solution.choice[start:stop]) for start, stop in pairwise(starts)
    ]


def _find_starts(phases: Sequence[Phase]) -> list[int]:
    return list(accumulate((len(p.problem.variables) for p in phases), initial=0))


class _CostScaler:
    """Multiplies cost tables by a factor per level; shared tables stay shared."""

    def __init__(self, factors: NDArray[np.int64]) -> None:
        self.factors = factors
        self.known: dict[int, NDArray[np.int64]] = {}

    def scale(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Scale the table; if all factors are 1, it is returned itself."""
        if (self.factors == 1).all():
            return costs
        found = self.known.get(id(costs))
        if found is None:
            factors = self.factors.reshape(-1, *[1] * (costs.ndim - 1))
            found = self.known[id(costs)] = costs * factors
        return found


def _count_calls(phase: Phase) -> NDArray[np.int64]:
    levels = phase.problem.levels
    return np.array([phase.calls if level in _PER_CALL else 1 for level in levels], np.int64)


def _drop_costs(levels: Sequence[str], costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zero the costs that an earlier phase counts, all but the order of choices."""
    kept = np.zeros_like(costs)
    for number, level in enumerate(levels):
        if level in ("forbidden", "index"):
            kept[number] = costs[number]
    return kept


def _build_edge(tie: Tie, starts: Sequence[int], levels: Sequence[str]) -> Edge:
    costs = np.zeros((len(levels), *tie.agree.shape), np.int64)
    costs[levels.index("forbidden")] = ~tie.agree
    (phase, variable), (other, partner) = tie.first, tie.second
    return Edge(starts[phase] + variable, starts[other] + partner, costs)
