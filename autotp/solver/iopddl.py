"""A placement problem in the form of the ASPLOS 2025 contest on intra-operator parallelism.

Other solvers can then check ours. The contest has one cost and one memory limit; our
lexicographic problem fits: the level before the cost is written as memory, and its optimum is the
limit. Levels after the cost are omitted.
"""

import numpy as np
from numpy.typing import NDArray

from autotp.errors import PlanError
from autotp.solver.problem import Problem, Solution

FORBIDDEN = 10**18
"""The cost by which the contest's form forbids a choice."""


def to_iopddl(
    problem: Problem,
    solution: Solution,
    *,
    time_level: str = "time_ps",
    memory_level: str = "home_bytes",
) -> dict[str, object]:
    """Convert `problem`, whose optimum is `solution`'s `time_level`, to the contest's document.

    Example: `{"problem": {"name": …, "nodes": {"intervals": [[0, 1], …], "costs": [[0, 7], …],
    "usages": [[8, 0], …]}, "edges": {"nodes": [[0, 1], …], "costs": [[0, 3, 3, 0], …]},
    "usage_limit": 8, "node_names": […], "strategy_names": [[…], …]}}`

    Constraints:
    - All nodes live in [0, 1), so that usages add up; `usage_limit` is the optimum of
      `memory_level`, the only level between the forbidden choices (level 0) and `time_level`.
    - Edge costs are row-major by (choice of the first, choice of the second).

    Raises PlanError if an edge costs memory: the form has usages on nodes only.
    """
    time, memory = problem.levels.index(time_level), problem.levels.index(memory_level)
    _require_memory_on_nodes(problem, memory)
    nodes = {
        "intervals": [[0, 1] for _ in problem.variables],
        "costs": [_list_costs(v.costs, time) for v in problem.variables],
        "usages": [v.costs[memory].tolist() for v in problem.variables],
    }
    edges = {
        "nodes": [[e.first, e.second] for e in problem.edges],
        "costs": [_list_costs(e.costs, time) for e in problem.edges],
    }
    document = {
        "name": "placement",
        "nodes": nodes,
        "edges": edges,
        "usage_limit": solution.cost[memory],
        "node_names": [v.name for v in problem.variables],
        "strategy_names": [list(v.domain) for v in problem.variables],
    }
    return {"problem": document}


def solution_to_json(problem: Problem, solution: Solution) -> dict[str, object]:
    """Convert `solution` to JSON: the contest's list of choices, their names and cost."""
    return {
        "solution": list(solution.choice),
        "strategies": {
            v.name: v.domain[k] for v, k in zip(problem.variables, solution.choice, strict=True)
        },
        "cost": dict(zip(problem.levels, solution.cost, strict=True)),
        "bound": dict(zip(problem.levels, solution.bound, strict=True)),
        "method": solution.method,
        "width": solution.width,
    }


def _list_costs(costs: NDArray[np.int64], level: int) -> list[int]:
    return np.where(costs[0] > 0, FORBIDDEN, costs[level]).ravel().tolist()


def _require_memory_on_nodes(problem: Problem, memory: int) -> None:
    for edge in problem.edges:
        if edge.costs[memory].any():
            first, second = (problem.variables[i].name for i in (edge.first, edge.second))
            raise PlanError(
                f"export of the edge {first} - {second}: it costs up to {edge.costs[memory].max()} "
                f"{problem.levels[memory]}, but in the contest's form only nodes have that cost. "
                "Move that cost to a variable."
            )
