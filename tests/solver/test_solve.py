"""The solver against enumeration, against HiGHS, and on a problem the size of a 126-layer model."""

import time
from collections.abc import Callable, Iterable, Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.errors import PlanError
from autotp.solver.elimination import (
    count_entries,
    eliminate,
    find_width,
    order_variables,
    pack_costs,
)
from autotp.solver.problem import LEVELS, Edge, Problem, Solution, Variable
from autotp.solver.solve import solve
from tests.oracle import enumerate_optimum, optimum, problems

HUGE = 10**13


def variable(name: str, *rows: Sequence[int]) -> Variable:
    domain = tuple(f"s{k}" for k in range(len(rows[0])))
    return Variable(name, domain, np.array(rows, dtype=np.int64))


def edge(first: int, second: int, *tables: Sequence[Sequence[int]]) -> Edge:
    return Edge(first, second, np.array(tables, dtype=np.int64))


def solved_or_forbidden(problem: Problem, table_limit: int) -> Solution | None:
    """The solution, or None where the solver says that no choice is legal."""
    try:
        return solve(problem, table_limit)
    except PlanError:
        return None


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(problems())
def test_elimination_equals_enumeration(problem: Problem) -> None:
    best = enumerate_optimum(problem)
    solution = solved_or_forbidden(problem, 10**7)

    assert (best[0] > 0) == (solution is None)
    if solution is not None:
        assert best == solution.cost == solution.bound == problem.compute_cost(solution.choice)
        assert solution.method == "elimination"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems())
def test_elimination_equals_highs_on_another_formulation(problem: Problem) -> None:
    best = optimum(problem)
    solution = solved_or_forbidden(problem, 10**7)

    assert (best[0] > 0) == (solution is None)
    assert solution is None or best == solution.cost


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(problems())
def test_fallback_equals_enumeration_where_costs_are_small(problem: Problem) -> None:
    best = enumerate_optimum(problem)
    solution = solved_or_forbidden(problem, 0)

    assert (best[0] > 0) == (solution is None)
    if solution is not None:
        assert best == solution.cost == solution.bound == problem.compute_cost(solution.choice)
        assert (solution.method, solution.width) == ("milp", 0)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems(largest=HUGE))
def test_elimination_is_exact_where_floats_are_not(problem: Problem) -> None:
    best = enumerate_optimum(problem)
    solution = solved_or_forbidden(problem, 10**7)

    assert (best[0] > 0) == (solution is None)
    assert solution is None or best == solution.cost


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems(largest=HUGE))
def test_fallback_never_claims_more_than_the_optimum(problem: Problem) -> None:
    best = enumerate_optimum(problem)
    solution = solved_or_forbidden(problem, 0)

    assert (best[0] > 0) == (solution is None)
    if solution is not None:
        assert solution.bound <= best <= solution.cost == problem.compute_cost(solution.choice)


def test_one_unit_in_ten_trillion_decides() -> None:
    problem = Problem(("forbidden", "time"), (variable("v", (0, 0), (HUGE + 1, HUGE)),), ())

    assert (1,) == solve(problem).choice
    assert (0, HUGE) == solve(problem).cost


def test_bound_of_the_fallback_says_what_highs_cannot_prove() -> None:
    rng = np.random.default_rng(0)
    variables = tuple(
        variable(f"v{i}", (0,) * 3, tuple(rng.integers(0, HUGE, 3))) for i in range(6)
    )
    zero = np.zeros((3, 3), dtype=np.int64)
    edges = tuple(
        Edge(i, j, np.stack([zero, rng.integers(0, HUGE, (3, 3))]))
        for i in range(6)
        for j in range(i)
    )
    problem = Problem(("forbidden", "time"), variables, edges)
    exact, solution = solve(problem), solve(problem, table_limit=0)

    assert exact.cost == solution.cost
    assert solution.bound[1] < solution.cost[1]
    assert solution.cost[1] - solution.bound[1] < solution.cost[1] * 1e-6


def test_second_order_is_tried_before_the_fallback() -> None:
    sizes, pairs = [2, 30, 2, 30], [(0, 1), (1, 2), (2, 3), (3, 0)]
    by_degree, by_size = (
        count_entries(order_variables(sizes, pairs, by_size), sizes) for by_size in (False, True)
    )
    variables = tuple(variable(f"v{i}", range(size)) for i, size in enumerate(sizes))
    edges = (Edge(a, b, np.zeros((1, sizes[a], sizes[b]), dtype=np.int64)) for a, b in pairs)
    problem = Problem(("forbidden",), variables, tuple(edges))

    assert (1800, 120) == (by_degree, by_size)
    assert "elimination" == solve(problem, by_size).method
    assert "milp" == solve(problem, by_size - 1).method


def test_ties_take_the_first_choice() -> None:
    problem = Problem(("forbidden", "time"), (variable("a", (1, 0, 0), (0, 5, 5)),) * 3, ())

    assert (1, 1, 1) == solve(problem).choice


def test_an_earlier_level_outweighs_all_later_ones() -> None:
    costs = ((0, 0), (1, 0), (0, 10**15))
    problem = Problem(("forbidden", "home", "time"), (variable("v", *costs),), ())

    assert (1,) == solve(problem).choice


def test_the_empty_problem_costs_nothing() -> None:
    assert Solution((), (0, 0), (0, 0), "elimination", 0) == solve(
        Problem(("forbidden", "time"), (), ())
    )


@pytest.mark.parametrize("table_limit", [10**7, 0])
def test_impossible_problem_names_the_values_that_clash(table_limit: int) -> None:
    never = ((1, 1), (1, 1))
    variables = tuple(variable(name, (0, 0)) for name in ("free", "q_proj", "o_proj"))
    problem = Problem(("forbidden",), variables, (edge(1, 2, never), edge(1, 2, never)))

    with pytest.raises(PlanError, match=r"has 2 conflict.* q_proj as s0 with o_proj as s0\. "):
        solve(problem, table_limit)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(AssertionError, match="negative"):
        solve(Problem(("forbidden",), (variable("v", (0, -1)),), ()))


@pytest.mark.parametrize(
    ("largest", "matrix"),
    [
        ((9, 99, 2**61 - 1, 0), [[100, 1, 0, 0], [0, 0, 1, 1]]),
        ((2**40, 2**40, 2**40), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        ((0, 2**31 - 1, 2**31 - 1, 1), [[2**62, 2**31, 1, 0], [0, 0, 0, 1]]),
    ],
)
def test_packing_uses_as_few_words_as_hold_the_totals(
    largest: Sequence[int], matrix: list[list[int]]
) -> None:
    levels = tuple(f"level {i}" for i in range(len(largest)))
    problem = Problem(levels, (variable("v", *((n,) for n in largest)),), ())

    assert matrix == pack_costs(problem).tolist()


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (nx.path_graph(9), 1),
        (nx.cycle_graph(9), 2),
        (nx.complete_graph(5), 4),
        (nx.ladder_graph(7), 2),
    ],
)
def test_width_of_known_graphs(graph: nx.Graph, expected: int) -> None:
    steps = order_variables([2] * len(graph), graph.edges)

    assert expected == find_width(steps)
    assert sorted(graph.nodes) == sorted(step.variable for step in steps)


def layered(
    layers: int, size: int, choices: int, tables: Callable[[int, int], np.ndarray]
) -> Problem:
    """A chain of equal layers of `size` variables: a residual stream, branches and a skip."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(2, choices + 1, size).tolist()
    inner = [(i, i + 1) for i in range(size - 1)] + [(i, i + 2) for i in range(0, size - 2, 3)]
    links = [*inner, (0, size // 2), (size // 2, size - 1), (size - 1, size)]
    costs = {(a, b): tables(sizes[a], sizes[b % size]) for a, b in links}
    unary = [np.vstack((np.zeros((6, n)), np.arange(n))).astype(np.int64) for n in sizes]
    variables = tuple(
        Variable(f"{layer}.{i}", tuple(f"s{k}" for k in range(n)), unary[i])
        for layer in range(layers)
        for i, n in enumerate(sizes)
    )
    edges = (
        Edge(layer * size + a, layer * size + b, costs[a, b])
        for layer in range(layers)
        for a, b in links
    )
    return Problem(LEVELS, variables, tuple(e for e in edges if e.second < len(variables)))


def large_problem(layers: int = 126, size: int = 80, choices: int = 10) -> Problem:
    rng = np.random.default_rng(3)
    tops = np.array((2, 10**8, 10**9, 3, 10**8, 3, 1))[:, None, None]

    def tables(rows: int, columns: int) -> np.ndarray:
        drawn = rng.integers(0, tops, (7, rows, columns))
        drawn[0] *= rng.random((rows, columns)) < 0.1
        return drawn

    return layered(layers, size, choices, tables)


def pairs_of(problem: Problem) -> Iterable[tuple[int, int]]:
    return [(e.first, e.second) for e in problem.edges]


def test_ten_thousand_variables(record_property: Callable[[str, object], None]) -> None:
    problem = large_problem()
    start = time.process_time()
    solution = solve(problem)
    record_property("cpu_seconds", round(time.process_time() - start, 2))

    assert 10_080 == len(problem.variables)
    assert 3 >= solution.width
    assert "elimination" == solution.method
    assert solution.cost == problem.compute_cost(solution.choice)


def test_both_orders_find_the_same_optimum() -> None:
    problem = large_problem(layers=12)
    sizes = [len(v.domain) for v in problem.variables]
    steps = order_variables(sizes, pairs_of(problem), by_size=True)

    assert order_variables(sizes, pairs_of(problem)) != steps
    assert solve(problem).cost == problem.compute_cost(eliminate(problem, steps))


def test_layers_equal_highs() -> None:
    problem = large_problem(layers=3, size=12, choices=4)

    assert optimum(problem) == solve(problem).cost


def test_repeated_layers_make_the_order_no_wider_than_networkx_does() -> None:
    problem = large_problem(layers=4)
    graph = nx.Graph(list(pairs_of(problem)))
    theirs, _ = nx.algorithms.approximation.treewidth_min_degree(graph)

    assert solve(problem).width <= theirs


@given(st.integers(0, 2**30))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_a_level_of_sixty_one_bits_still_packs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    top = 2**57
    variables = tuple(variable(f"v{i}", (0,) * 3, *rng.integers(0, top, (2, 3))) for i in range(3))
    pair = np.concatenate((np.zeros((1, 3, 3)), rng.integers(0, top, (2, 3, 3)))).astype(np.int64)
    problem = Problem(("forbidden", "a", "b"), variables, (Edge(0, 1, pair), Edge(2, 1, pair)))

    assert enumerate_optimum(problem) == solve(problem).cost
