"""The placement problem and its exact solution.

Variables: x_i in D_i, one choice for each parameter, node and delivered value
(`solver.problem.Variable`).

Objective: the least, in lexicographic order over the levels l, of

    C_l(x) = sum_i u_i,l(x_i) + sum_(i,j) w_ij,l(x_i, x_j)           integers, not negative

Level 0 counts forbidden choices, so x is legal exactly when C_0(x) = 0 (`_raise_if_forbidden`).

Elimination (nonserial dynamic programming, Bertele & Brioschi 1972) is exact because + distributes
over min in every ordered group, cost tuples under lexicographic order included. With N(i) the
neighbours of i,

    min_x sum = min_(x without i) [ the terms without i + m_i(x_N(i)) ],
    m_i(x_N(i)) = min_(x_i) sum of the terms that contain i          `solver.elimination.eliminate`

The best x_i for every x_N(i) is kept; reading these tables backwards gives x. Tuples are packed
into a few int64 integers that sum and compare exactly (`solver.elimination.pack_costs`): no float
is involved.

Complexity: O(n d^(w+1)) for n variables of at most d choices, where w, the width of the order
(`solver.elimination.order_variables`, least degree first), is 2 to 4 on Transformers; layers
repeat, and repeated eliminations are looked up. If one table would pass `table_limit` entries, in
this order and in that of the least table, the problem falls to HiGHS (`_solve_integer_program`), as
the integer program

    min c_l z,  z = (x_ik, y_ij,km), each 0 or 1                              `_build_program`
    sum_k x_ik = 1,  sum_m y_ij,km = x_ik,  sum_k y_ij,km = x_jm              `_build_marginals`
    c_j z <= the value reached, for j < l             (the earlier levels)    `_Pins`

level by level, each rounded and recomputed in integers; then the bound tells what HiGHS has proven.
"""

from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

from autotp.errors import PlanError
from autotp.solver.elimination import Step, count_entries, eliminate, find_width, order_variables
from autotp.solver.problem import Problem, Solution

TABLE_LIMIT = 10**7
NODE_LIMIT = 100_000
"""A limit in nodes, not in seconds: ranks of different speed must find the same plan."""

LARGEST_COEFFICIENT = 10**6
"""Above this, HiGHS gets scaled costs: its tolerances are absolute."""
ABSOLUTE, RELATIVE = 1e-7, 1e-9
"""HiGHS's dual tolerance, and the part of an objective below which its floats are not trusted."""


def solve(problem: Problem, table_limit: int = TABLE_LIMIT) -> Solution:
    """Find the choice of least cost for every variable, with a proven lower bound.

    Constraints:
    - The result depends on nothing but the problem: not on the process, nor on the hash seed.
    - `method` is "elimination", and `bound` equals `cost`, unless a table would pass `table_limit`
      entries; then it is "milp", and the optimum is no less than `bound` in lexicographic order.

    Raises PlanError if no choice is legal.
    """
    steps = _choose_order(problem, table_limit)
    if steps is None:
        solution = _solve_integer_program(problem)
    else:
        choice = eliminate(problem, steps)
        cost = problem.compute_cost(choice)
        solution = Solution(choice, cost, cost, "elimination", find_width(steps))
    _raise_if_forbidden(problem, solution)
    return solution


def _choose_order(problem: Problem, table_limit: int) -> tuple[Step, ...] | None:
    """Choose the elimination order: the second if the first exceeds the limit; None if both do."""
    sizes = [len(v.domain) for v in problem.variables]
    pairs = [(e.first, e.second) for e in problem.edges]
    for by_size in (False, True):
        steps = order_variables(sizes, pairs, by_size)
        if count_entries(steps, sizes) <= table_limit:
            return steps
    return None


def _raise_if_forbidden(problem: Problem, solution: Solution) -> None:
    if not solution.cost or not solution.cost[0]:
        return
    clashes = _describe_forbidden(problem, solution.choice)
    more = f" and {len(clashes) - 5} more" if len(clashes) > 5 else ""
    raise PlanError(
        f"placement of {len(problem.variables)} values: no choice is legal. The best one has "
        f"{solution.cost[0]} conflict(s), of which at least {solution.bound[0]} cannot be avoided: "
        f"{'; '.join(clashes[:5])}{more}. "
        "Drop an override that names one of these, or choose a tp that divides their axes."
    )


def _describe_forbidden(problem: Problem, choice: tuple[int, ...]) -> list[str]:
    labels = [f"{v.name} as {v.domain[k]}" for v, k in zip(problem.variables, choice, strict=True)]
    alone = [
        labels[i]
        for i, (v, k) in enumerate(zip(problem.variables, choice, strict=True))
        if v.costs[0, k]
    ]
    together = [
        f"{labels[e.first]} with {labels[e.second]}"
        for e in problem.edges
        if e.costs[0, choice[e.first], choice[e.second]]
    ]
    return list(dict.fromkeys(alone + together))


@dataclass(frozen=True, slots=True)
class _Program:
    """The integer program: columns x of all variables, then y of all pairs; `rows @ z == right`.

    - `costs`: (levels, columns), less every variable's and pair's least, summed in `offsets`.
    - `starts`: the first column of each variable, and then of y.
    - `active`: how many columns are 1 in a solution.
    """

    costs: NDArray[np.int64]
    offsets: list[int]
    rows: sparse.csr_array
    right: NDArray[np.float64]
    starts: NDArray[np.int64]
    active: int


@dataclass(slots=True)
class _Pins:
    """Constraints of the previous levels: columns at most `upper`, and `rows @ z <= limits`."""

    upper: NDArray[np.float64]
    rows: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    limits: list[float] = field(default_factory=list[float])

    def scale_open_costs(self, costs: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
        """Give the costs of the open columns, zero elsewhere, divided by a scale, and the scale."""
        still = np.where(self.upper > 0, costs, 0)
        scale = max(1.0, float(still.max()) / LARGEST_COEFFICIENT)
        return still / scale, scale

    def add(self, costs: NDArray[np.int64], value: int) -> None:
        """Keep `costs @ z <= value`.

        A column dearer than `value` closes, exactly; half a unit of slack leaves the integer
        solutions as they are and HiGHS's tolerance without effect.
        """
        self.upper[costs > value] = 0.0
        row, scale = self.scale_open_costs(costs)
        if row.any():
            self.rows.append(row)
            self.limits.append((value + 0.5) / scale)


def _solve_integer_program(problem: Problem) -> Solution:
    program = _build_program(problem)
    pins = _Pins(np.ones(program.costs.shape[1]))
    best = (0,) * len(problem.variables)
    bound: list[int] = []
    for level, (costs, offset) in enumerate(zip(program.costs, program.offsets, strict=True)):
        found, least = _minimise(costs, program, pins)
        best = min(
            best, found or best, key=lambda choice: problem.compute_cost(choice)[: level + 1]
        )
        value = problem.compute_cost(best)[level]
        bound.append(min(value, offset + least))
        pins.add(costs, value - offset)
    return Solution(best, problem.compute_cost(best), tuple(bound), "milp", 0)


def _minimise(
    costs: NDArray[np.int64], program: _Program, pins: _Pins
) -> tuple[tuple[int, ...] | None, int]:
    """Give HiGHS's rounded choice (None if it found none), and its proven bound, rounded up."""
    objective, scale = pins.scale_open_costs(costs)
    if not objective.any():
        return None, 0
    constraints = [(program.rows, program.right, program.right)]
    if pins.rows:
        limits = np.array(pins.limits)
        constraints.append(
            (sparse.csr_array(np.stack(pins.rows)), np.full_like(limits, -np.inf), limits)
        )
    result = optimize.milp(
        objective,
        integrality=np.ones_like(objective),
        bounds=(np.zeros_like(objective), pins.upper),
        constraints=constraints,
        options={"mip_rel_gap": 0.0, "node_limit": NODE_LIMIT},
    )
    choice = None if result.x is None else _round_choice(result.x, program.starts)
    return choice, _round_bound(result.mip_dual_bound, scale, program.active)


def _round_choice(z: NDArray[np.float64], starts: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(part.argmax()) for part in np.split(z[: starts[-1]], starts[1:-1]))


def _round_bound(proven: float | None, scale: float, active: int) -> int:
    """Round HiGHS's proven bound to an integer; 0 if it has none."""
    if proven is None or not np.isfinite(proven):
        return 0
    return max(0, ceil((proven - ABSOLUTE * active - RELATIVE * abs(proven)) * scale))


def _build_program(problem: Problem) -> _Program:
    starts = np.cumsum([0, *(len(v.domain) for v in problem.variables)])
    pairs = _sum_edges(problem)
    blocks = [v.costs for v in problem.variables]
    blocks += [w.reshape(len(problem.levels), -1) for w in pairs.values()]
    lows = [block.min(axis=1, keepdims=True) for block in blocks]
    costs = np.concatenate([block - low for block, low in zip(blocks, lows, strict=True)], axis=1)
    rows, right = _build_marginals(pairs, starts, costs.shape[1])
    return _Program(costs, np.sum(lows, axis=0).ravel().tolist(), rows, right, starts, len(blocks))


def _sum_edges(problem: Problem) -> dict[tuple[int, int], NDArray[np.int64]]:
    """Sum the costs of all edges between two variables, the lower index first.

    An edge from a variable to itself becomes a pair whose two sides must agree: its marginals say
    so.
    """
    pairs: dict[tuple[int, int], NDArray[np.int64]] = {}
    for edge in problem.edges:
        forward = edge.first <= edge.second
        key = (edge.first, edge.second) if forward else (edge.second, edge.first)
        costs = edge.costs if forward else edge.costs.swapaxes(1, 2)
        pairs[key] = pairs[key] + costs if key in pairs else costs
    return pairs


def _build_marginals(
    pairs: dict[tuple[int, int], NDArray[np.int64]], starts: NDArray[np.int64], columns: int
) -> tuple[sparse.csr_array, NDArray[np.float64]]:
    """Build the equality rows: one choice per variable, then the marginals of each pair."""
    variables = len(starts) - 1
    parts = [(np.repeat(np.arange(variables), np.diff(starts)), np.arange(starts[-1]), 1.0)]
    row, column = variables, int(starts[-1])
    for (i, j), costs in pairs.items():
        a, b = costs.shape[1:]
        y = np.arange(column, column + a * b)
        k, m = np.divmod(np.arange(a * b), b)
        parts += [(row + k, y, 1.0), (row + np.arange(a), starts[i] + np.arange(a), -1.0)]
        parts += [(row + a + m, y, 1.0), (row + a + np.arange(b), starts[j] + np.arange(b), -1.0)]
        row, column = row + a + b, column + a * b
    values = np.concatenate([np.full(len(r), value) for r, _, value in parts])
    where = (np.concatenate([r for r, _, _ in parts]), np.concatenate([c for _, c, _ in parts]))
    right = np.concatenate((np.ones(variables), np.zeros(row - variables)))
    return sparse.coo_array((values, where), shape=(row, columns)).tocsr(), right
