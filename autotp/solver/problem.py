"""A placement problem, free of any model: variables with domains, costs on variables and on pairs.

A cost is a tuple of integers compared lexicographically, one entry per *level*; the total cost is
the level-wise sum over variables and edges. Level 0 counts forbidden choices, so a solution is
legal exactly when its level 0 is 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVELS = (
    "forbidden",
    "home_bytes",
    "time_ps",
    "collectives",
    "parameter_bytes",
    "conversions",
    "index",
)


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """One choice to make.

    `domain` has one printable label per choice; `costs` is int64 of shape (levels, len(domain)).
    """

    name: str
    domain: tuple[str, ...]
    costs: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The cost of two choices together.

    `costs` is int64 of shape (levels, domain of `first`, domain of `second`); several edges may
    connect the same two variables (their costs add); arrays may be shared between edges.
    """

    first: int
    second: int
    costs: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Choose one value per variable so that the level-wise sum of the cost tuples is least."""

    levels: tuple[str, ...]
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]

    def compute_cost(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """Compute the total cost tuple of `choice`, in exact integers."""
        total = [0] * len(self.levels)
        for variable, k in zip(self.variables, choice, strict=True):
            _add(total, variable.costs[:, k])
        for edge in self.edges:
            _add(total, edge.costs[:, choice[edge.first], choice[edge.second]])
        return tuple(total)


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per variable.

    `cost` is its exact cost tuple; `bound` is a proven lower bound of the same form (equal to
    `cost` if the solution is optimal); `method` is "elimination" or "milp"; `width` the largest
    number of variables, less one, in one elimination table (0 for milp).
    """

    choice: tuple[int, ...]
    cost: tuple[int, ...]
    bound: tuple[int, ...]
    method: str
    width: int


def _add(total: list[int], column: NDArray[np.int64]) -> None:
    for level, value in enumerate(column.tolist()):
        total[level] += value
