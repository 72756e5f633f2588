"""Random legal plans over every model: outputs and gradients of the ranks equal the whole model's.

A failure prints the `Case` that draws the plan again. The long run is
`python -m tests.benchmarks.random_plans`.
"""

import numpy as np
import pytest

from autotp.algebra.axis import Forest
from autotp.algebra.placement import PARTIAL, split
from autotp.algebra.size import Size
from autotp.compiler import ModelCompiler
from autotp.oprules.rule import Factor, NodeRule
from autotp.options import read_request
from autotp.planner.strategy import Facts, derive_strategies
from tests.models import build, names
from tests.random_plans import Case, Prepared, made, outcome, outcomes, posed, random_problem

TWOS = [(2, True), (4, True), (4, False)]
THREES = [(3, True), (3, False)]
"""In sizes that 3 divides, with eager attention and labels."""


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_random_plans_equal_the_whole_model(name: str) -> None:
    cases = [Case(name, tp, training, seed) for seed, (tp, training) in enumerate(TWOS)]
    found = list(outcomes(cases, layers=1))

    assert [] == [str(o) for o in found if not o.ok]
    assert max(o.worst for o in found) < 1e-9
    assert sum(o.split for o in found) > 0.2 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "gpt_neox", "mixtral"])
def test_random_plans_over_three_ranks_equal_the_whole_model(name: str) -> None:
    cases = [Case(name, tp, training, seed) for seed, (tp, training) in enumerate(THREES)]
    found = list(outcomes(cases, layers=1))

    assert [] == [str(o) for o in found if not o.ok]
    assert max(o.worst for o in found) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1002, 1020, 1026])
def test_a_view_of_what_a_conversion_put_together_is_made(seed: int) -> None:
    """Found by the long run: a gathered value has other strides than the program's."""
    found = next(outcomes([Case("bloom", 3, True, seed)], layers=1))

    assert found.ok, found


def test_a_seed_draws_the_same_plan_and_another_seed_another() -> None:
    prepared = posed("hand", 2, True, 1)
    plans = [made(prepared, 2, seed).plan for seed in (7, 7, 8)]

    assert plans[0].hash == plans[1].hash
    assert plans[0].hash != plans[2].hash


def test_random_costs_leave_what_is_legal_as_it_was() -> None:
    problem = posed("hand", 2, True, 1).posed.problem
    drawn = random_problem(problem, 0)

    assert [v.domain for v in problem.variables] == [v.domain for v in drawn.variables]
    for old, new in zip(
        (*problem.variables, *problem.edges), (*drawn.variables, *drawn.edges), strict=True
    ):
        np.testing.assert_array_equal(old.costs[0], new.costs[0])
    assert sum(int(v.costs[1].max()) for v in drawn.variables) > 0
    assert 0 == sum(int(e.costs[1].max()) for e in drawn.edges)


@pytest.mark.parametrize("training", [True, False])
def test_a_contracted_dim_is_not_split_along_an_axis_that_a_segment_lacks(training: bool) -> None:
    """Found by a random plan: the segment that is whole on every rank was summed on every rank."""
    forest = Forest()
    whole, axis = forest.add_atom(Size(2)), forest.add_atom(Size(6))
    dim = (forest.make_sum([(whole,), (axis,)]),)
    rule = NodeRule((Factor("reduce", dim, ((0, 0), (1, 0)), "sum"),), ((),))
    facts = Facts(((dim,), (dim,)), frozenset({0, 1}), frozenset(), floating=True, flows=True)
    found = derive_strategies(rule, facts, forest, 2, training=training)

    assert [] == [s for s in found if s.partition.parts]


def test_a_contracted_dim_is_split_along_an_axis_that_every_segment_has() -> None:
    forest = Forest()
    axis = forest.add_atom(Size(6))
    dim = (forest.make_sum([(axis,), (axis,)]),)
    rule = NodeRule((Factor("reduce", dim, ((0, 0), (1, 0)), "sum"),), ((),))
    facts = Facts(((dim,), (dim,)), frozenset({0, 1}), frozenset(), floating=True, flows=True)
    found = [
        s for s in derive_strategies(rule, facts, forest, 2, training=False) if s.partition.parts
    ]

    assert [split(0, axis.name)] * 2 == list(found[0].operands)
    assert (PARTIAL,) == found[0].results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "sizes"),
    [("llama", 4, {"num_key_value_heads": 2}), ("bloom", 3, {}), ("mixtral", 3, {})],
)
def test_random_plans_of_sizes_that_the_ranks_do_not_divide(
    name: str, tp: int, sizes: dict[str, int]
) -> None:
    """Uneven parts and a factored group, through conversions that no cheap plan would choose."""
    model, inputs = build(name, num_hidden_layers=1, **sizes)
    work = ModelCompiler(model, read_request(example_inputs=inputs, training=True))
    ready = Prepared(model, inputs, work, work.formulate(tp, everything=True))
    found = [outcome(ready, Case(name, tp, True, seed)) for seed in (7000, 7001, 7002)]

    assert [] == [str(one) for one in found if not one.ok]
