"""The exported problem, solved again by a program that reads nothing but the JSON document."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autotp.errors import PlanError
from autotp.solver.iopddl import FORBIDDEN, solution_to_json, to_iopddl
from autotp.solver.problem import LEVELS, Edge, Problem, Variable
from autotp.solver.solve import solve
from tests.oracle import enumerate_optimum, problems


def contest_cost(document: Mapping[str, Any], choice: list[int]) -> int:
    """The cost of `choice` under the contest's rules; fails where it uses too much memory."""
    problem = document["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    usage = [nodes["usages"][i][k] for i, k in enumerate(choice)]
    for now, _ in nodes["intervals"]:
        live = [
            u
            for u, (start, end) in zip(usage, nodes["intervals"], strict=True)
            if start <= now < end
        ]
        assert problem["usage_limit"] >= sum(live)
    total = sum(nodes["costs"][i][k] for i, k in enumerate(choice))
    for (a, b), costs in zip(edges["nodes"], edges["costs"], strict=True):
        total += costs[choice[a] * len(nodes["costs"][b]) + choice[b]]
    return total


def contest_optimum(document: Mapping[str, Any]) -> list[int]:
    """The best choice, by HiGHS on local marginals; memory is limited where a life starts."""
    problem = document["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    sizes = [len(costs) for costs in nodes["costs"]]
    first = np.cumsum([0, *sizes])
    weights = np.array([c for side in (nodes, edges) for costs in side["costs"] for c in costs])
    rows = Rows()
    for i, size in enumerate(sizes):
        rows.add(first[i] + np.arange(size), np.ones(size), 1, 1)
    for now in sorted({start for start, end in nodes["intervals"] if start < end}):
        live = [i for i, (start, end) in enumerate(nodes["intervals"]) if start <= now < end]
        columns = np.concatenate([first[i] + np.arange(sizes[i]) for i in live])
        usages = np.concatenate([nodes["usages"][i] for i in live])
        rows.add(columns, usages, -np.inf, problem["usage_limit"])
    column = first[-1]
    for a, b in edges["nodes"]:
        y = column + np.arange(sizes[a] * sizes[b]).reshape(sizes[a], sizes[b])
        for end, table in ((a, y), (b, y.T)):
            for k, out in enumerate(table):
                rows.add(np.append(out, first[end] + k), np.append(np.ones(len(out)), -1), 0, 0)
        column += y.size
    solution = rows.minimum(weights)
    return [int(solution[a:b].argmax()) for a, b in pairwise(first)]


class Rows:
    """Rows of a linear program over binary columns, as they come."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.bounds: list[tuple[float, float]] = []

    def add(self, columns: np.ndarray, values: np.ndarray, low: float, high: float) -> None:
        self.columns.append(columns)
        self.values.append(values)
        self.bounds.append((low, high))

    def minimum(self, weights: np.ndarray) -> np.ndarray:
        """HiGHS's best columns; those whose weight forbids them stay 0."""
        starts = np.cumsum([0, *(len(columns) for columns in self.columns)])
        data = np.concatenate(self.values).astype(float)
        shape = (len(self.bounds), len(weights))
        matrix = csr_array((data, np.concatenate(self.columns), starts), shape=shape)
        low, high = np.array(self.bounds, dtype=float).T
        allowed = weights < FORBIDDEN
        result = milp(
            np.where(allowed, weights, 0),
            integrality=np.ones(len(weights)),
            bounds=Bounds(0, allowed.astype(float)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 0},
        )
        assert 0 == result.status, result.message
        return result.x


def without_memory_on_edges(problem: Problem) -> Problem:
    keep = np.array([level != "home_bytes" for level in problem.levels])[:, None, None]
    edges = tuple(Edge(e.first, e.second, e.costs * keep) for e in problem.edges)
    return Problem(problem.levels, problem.variables, edges)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=80)
@given(problems())
def test_solving_the_document_gives_the_time_level_again(problem: Problem) -> None:
    problem = without_memory_on_edges(problem)
    assume("time_ps" in problem.levels)
    assume(enumerate_optimum(problem)[0] == 0)
    solution = solve(problem)
    document = json.loads(json.dumps(to_iopddl(problem, solution)))
    ours = json.loads(json.dumps(solution_to_json(problem, solution)))["solution"]

    time = solution.cost[problem.levels.index("time_ps")]
    assert time == contest_cost(document, contest_optimum(document))
    assert time == contest_cost(document, ours)


def example() -> Problem:
    def costs(*rows: list[Any]) -> np.ndarray:
        return np.array(rows, dtype=np.int64)

    q = Variable("q_proj", ("column", "whole"), costs([0, 0], [0, 8], [7, 0]))
    o = Variable("o_proj", ("row", "whole", "column"), costs([0, 0, 1], [0, 8, 0], [0, 0, 5]))
    edge = Edge(0, 1, costs([[0, 0, 0], [1, 0, 0]], [[0] * 3] * 2, [[0, 3, 4], [9, 1, 2]]))
    return Problem(LEVELS[:3], (q, o), (edge,))


def test_document_of_a_small_problem() -> None:
    problem = example()
    solution = solve(problem)
    expected = {
        "name": "placement",
        "nodes": {
            "intervals": [[0, 1], [0, 1]],
            "costs": [[7, 0], [0, 0, FORBIDDEN]],
            "usages": [[0, 8], [0, 8, 0]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[0, 3, 4, FORBIDDEN, 1, 2]]},
        "usage_limit": 0,
        "node_names": ["q_proj", "o_proj"],
        "strategy_names": [["column", "whole"], ["row", "whole", "column"]],
    }

    assert {"problem": expected} == to_iopddl(problem, solution)


def test_document_of_a_solution() -> None:
    problem = example()
    expected = {
        "solution": [0, 0],
        "strategies": {"q_proj": "column", "o_proj": "row"},
        "cost": {"forbidden": 0, "home_bytes": 0, "time_ps": 7},
        "bound": {"forbidden": 0, "home_bytes": 0, "time_ps": 7},
        "method": "elimination",
        "width": 1,
    }

    assert expected == solution_to_json(problem, solve(problem))


def test_memory_on_an_edge_has_no_place_in_the_form() -> None:
    problem = example()
    solution = solve(problem)
    edge = problem.edges[0]
    dear = Edge(edge.first, edge.second, edge.costs + 5)

    with pytest.raises(PlanError, match="q_proj - o_proj: it costs up to 5 home_bytes"):
        to_iopddl(Problem(problem.levels, problem.variables, (dear,)), solution)


def test_reader_follows_live_times() -> None:
    nodes = {
        "intervals": [[0, 1], [1, 2], [1, 1]],
        "costs": [[0, 5], [0, 3], [0, 9]],
        "usages": [[6, 1], [6, 1], [99, 1]],
    }
    edges = {"nodes": [[1, 0], [0, 1]], "costs": [[4, 0, 0, 0], [2, 0, 0, 0]]}
    document = {"problem": {"nodes": nodes, "edges": edges, "usage_limit": 6}}

    assert [0, 1, 0] == contest_optimum(document)
    assert 3 == contest_cost(document, [0, 1, 0])
