"""Several placement problems as one: phases of a run that share weights and what they leave behind.

Each phase keeps its own variables and edges, times what its calls cost counted as often as it runs.
A tie makes a variable of one phase and one of another agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from autotp.solver.problem import Edge, Problem, Solution, Variable

__all__ = ["Phase", "Tie", "merge_phases", "split_solution"]

_PER_CALL = ("time_ps", "collectives", "conversions")
"""The levels that every call costs anew; what is held is held once."""


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """One problem, how often it runs, and those of its variables that an earlier phase counts."""

    problem: Problem
    calls: int = 1
    counted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """Two variables, each as (phase, index), of which `agree[i, j]` says whether choices fit."""

    first: tuple[int, int]
    second: tuple[int, int]
    agree: NDArray[np.bool_]


def merge_phases(phases: Sequence[Phase], ties: Sequence[Tie]) -> Problem:
    """The one problem of all phases, in their order."""
    starts = _find_starts(phases)
    variables: list[Variable] = []
    edges: list[Edge] = []
    for number, (phase, start) in enumerate(zip(phases, starts, strict=False)):
        scaled = _Scaled(_count_calls(phase))
        for index, variable in enumerate(phase.problem.variables):
            costs = scaled.of(variable.costs)
            if index in phase.counted:
                costs = _drop_costs(phase.problem.levels, costs)
            name = f"{number}: {variable.name}" if number else variable.name
            variables.append(replace(variable, name=name, costs=costs))
        for edge in phase.problem.edges:
            edges.append(Edge(edge.first + start, edge.second + start, scaled.of(edge.costs)))
    levels = phases[0].problem.levels
    edges += [_build_edge(tie, starts, levels) for tie in ties]
    return Problem(levels, tuple(variables), tuple(edges))


def split_solution(phases: Sequence[Phase], solution: Solution) -> list[Solution]:
    """The solution's choices phase by phase; each has the cost and the proof of the whole."""
    starts = _find_starts(phases)
    return [
        replace(solution, choice=solution.choice[start:stop]) for start, stop in pairwise(starts)
    ]


def _find_starts(phases: Sequence[Phase]) -> list[int]:
    return list(accumulate((len(p.problem.variables) for p in phases), initial=0))


class _Scaled:
    """Tables times what each level counts; one that several share stays shared."""

    def __init__(self, often: NDArray[np.int64]) -> None:
        self.often = often
        self.known: dict[int, NDArray[np.int64]] = {}

    def of(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The table scaled, itself where there is nothing to scale."""
        if (self.often == 1).all():
            return costs
        found = self.known.get(id(costs))
        if found is None:
            often = self.often.reshape(-1, *[1] * (costs.ndim - 1))
            found = self.known[id(costs)] = costs * often
        return found


def _count_calls(phase: Phase) -> NDArray[np.int64]:
    levels = phase.problem.levels
    return np.array([phase.calls if level in _PER_CALL else 1 for level in levels], np.int64)


def _drop_costs(levels: Sequence[str], costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The costs without what an earlier phase counts: the order of choices alone is kept."""
    kept = np.zeros_like(costs)
    for number, level in enumerate(levels):
        if level in ("forbidden", "index"):
            kept[number] = costs[number]
    return kept


def _build_edge(tie: Tie, starts: Sequence[int], levels: Sequence[str]) -> Edge:
    costs = np.zeros((len(levels), *tie.agree.shape), np.int64)
    costs[levels.index("forbidden")] = ~tie.agree
    (phase, variable), (other, its) = tie.first, tie.second
    return Edge(starts[phase] + variable, starts[other] + its, costs)
