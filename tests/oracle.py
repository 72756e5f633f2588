"""Two other ways to solve a placement problem: enumeration, and HiGHS on a formulation of its own.

The program here is written on edges as flows: every edge of the problem, parallel ones apart,
carries one unit from a choice of its first variable to a choice of its second; all columns are
binary; earlier levels are equalities. (`autotp.solver.solve` merges pairs, takes off what every
choice costs, closes columns that are too dear and gives earlier levels slack.)
"""

from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, lil_array, vstack

from autotp.solver.problem import LEVELS, Edge, Problem, Variable

__all__ = ["enumerate_optimum", "optimum", "problems"]


def enumerate_optimum(problem: Problem) -> tuple[int, ...]:
    """The least cost tuple over all choices, by trying each."""
    return min(
        problem.compute_cost(choice)
        for choice in product(*(range(len(v.domain)) for v in problem.variables))
    )


def optimum(problem: Problem) -> tuple[int, ...]:
    """The least cost tuple, by HiGHS level after level, each recomputed of the rounded choice."""
    first = np.concatenate(([0], np.cumsum([len(v.domain) for v in problem.variables])))
    blocks = [e.costs.reshape(len(problem.levels), -1) for e in problem.edges]
    costs = np.concatenate([v.costs for v in problem.variables] + blocks, axis=1)
    rows, right = _flow_rows(problem, first, costs.shape[1])
    cost: tuple[int, ...] = (0,) * len(problem.levels)
    for level, weights in enumerate(costs):
        scale = max(1.0, weights.max() / 10**6)
        result = milp(
            weights / scale,
            integrality=np.ones(len(weights)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(rows, right - 1e-9, right + 1e-9),
            options={"mip_rel_gap": 0},
        )
        assert result.status == 0, result.message
        choice = tuple(int(result.x[a:b].argmax()) for a, b in pairwise(first))
        cost = problem.compute_cost(choice)
        rows = vstack([rows, csr_array(weights[None] / scale)], format="csr")
        right = np.append(right, cost[level] / scale)
    return cost


def _flow_rows(problem: Problem, first: np.ndarray, columns: int) -> tuple[csr_array, np.ndarray]:
    sizes = [len(v.domain) for v in problem.variables]
    rows = lil_array(
        (len(sizes) + sum(sizes[e.first] + sizes[e.second] for e in problem.edges), columns)
    )
    for i, size in enumerate(sizes):
        rows[i, first[i] : first[i] + size] = 1
    row, column = len(sizes), first[-1]
    for edge in problem.edges:
        flow = column + np.arange(sizes[edge.first] * sizes[edge.second]).reshape(
            sizes[edge.first], -1
        )
        for end, table in ((edge.first, flow), (edge.second, flow.T)):
            for k, out in enumerate(table):
                rows[row, first[end] + k] = -1
                rows[row, out] = 1
                row += 1
        column += flow.size
    right = np.zeros(row)
    right[: len(sizes)] = 1
    return rows.tocsr(), right


@st.composite
def problems(draw: st.DrawFn, largest: int = 6, levels: int = 0) -> Problem:
    """Small problems: ties, zero costs, forbidden entries, loops, parallel edges, islands."""
    levels = levels or draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    ends = st.integers(0, len(sizes) - 1)
    links = draw(st.lists(st.tuples(ends, ends), max_size=10))
    rng = np.random.default_rng(draw(st.integers(0, 2**30)))
    forbidden = draw(st.sampled_from((0.0, 0.1, 0.4)))
    dense = draw(st.sampled_from((0.3, 1.0)))

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, largest, (levels, *shape)) * (rng.random((levels, *shape)) < dense)
        drawn[0] = rng.random(shape) < forbidden
        return drawn

    variables = (
        Variable(f"v{i}", tuple(f"s{k}" for k in range(n)), costs(n)) for i, n in enumerate(sizes)
    )
    edges = (Edge(a, b, costs(sizes[a], sizes[b])) for a, b in links)
    return Problem(LEVELS[:levels], tuple(variables), tuple(edges))
