"""Calls planned together: one optimum for a prompt and the words after it, against two others."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autotp
from autotp.capture.cache import flatten_cache
from autotp.compiler import ModelCompiler
from autotp.errors import PlanError
from autotp.options import Request, read_request
from autotp.planner.constraints import constrain_to_plan
from autotp.planner.formulate_phases import PlannedPhase, formulate_phases
from autotp.records.plan import Plan
from autotp.solver.joint import Phase, Tie, merge_phases, split_solution
from autotp.solver.problem import LEVELS
from autotp.solver.solve import solve
from tests.models import LLAMA, SPECIAL_WORDS, build, randomize
from tests.oracle import enumerate_optimum, optimum, problems

WORDS = 6
SMALL = {"num_hidden_layers": 1}


def ids(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))


def model_of(name: str, **sizes: Any) -> nn.Module:
    return build(name, **{**SMALL, **sizes})[0].eval()


def window() -> nn.Module:
    """A model whose cache keeps the last five words."""
    config = transformers.MistralConfig(**LLAMA, **SPECIAL_WORDS, sliding_window=6)
    model = transformers.MistralForCausalLM(config).eval()
    randomize(model, 0)
    return model


def options(**more: Any) -> Request:
    return read_request(**{"example_inputs": {"input_ids": ids()}, "new_tokens": WORDS, **more})


def posed(work: ModelCompiler, tp: int) -> list[PlannedPhase]:
    return [PlannedPhase(w.analysis, w.formulate(tp), w.calls) for w in (work, *work.later)]


# ── the joined problem, free of models ───────────────────────────────────────────────────────────


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_optimum_of_joined_phases_is_that_of_all_pairs_of_choices(
    levels: int, calls: int, data: st.DataObject
) -> None:
    one, two = (data.draw(problems(levels=levels)) for _ in range(2))
    i = data.draw(st.integers(0, len(one.variables) - 1))
    j = data.draw(st.integers(0, len(two.variables) - 1))
    shape = len(one.variables[i].domain), len(two.variables[j].domain)
    agree = np.array(
        data.draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    ).reshape(shape)
    phases = [Phase(one), Phase(two, calls)]
    problem = merge_phases(phases, [Tie((0, i), (1, j), agree)])

    often = np.array(
        [calls if "time" in x or x in ("collectives", "conversions") else 1 for x in one.levels]
    )
    choices = [range(len(v.domain)) for v in (*one.variables, *two.variables)]
    if math.prod(map(len, choices)) > 3000:
        return
    best = enumerate_optimum(problem)
    solution = None
    try:
        solution = solve(problem)
    except PlanError:
        assert best[0] > 0
    if solution is not None:
        first, second = split_solution(phases, solution)
        apart = np.array(one.compute_cost(first.choice)) + often * np.array(
            two.compute_cost(second.choice)
        )
        assert best == solution.cost == tuple(apart.tolist())
        assert agree[first.choice[i], second.choice[j]]


# ── of a prompt and the words after it ───────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral"])
def test_highs_finds_the_same_cost_for_both_phases_together(name: str) -> None:
    _, problem = formulate_phases(posed(ModelCompiler.of(model_of(name), options()), 2))

    found = solve(problem)

    assert "elimination" == found.method
    assert optimum(problem) == found.cost


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 4), ("mixtral", 2)])
def test_together_costs_no_more_than_weights_for_the_prompt_first(name: str, tp: int) -> None:
    model = model_of(name)
    work = ModelCompiler.of(model, options())
    together = work.compile(tp, "tp").solution
    alone = work.formulate(tp)
    first = work.lower(alone, solve(alone.problem), tp, "tp")
    (after,) = work.later
    held = replace(after.request, plan=first.plan)
    after.request, after.caches = held, first.plan.caches
    then = after.formulate(tp)
    second = solve(then.problem)
    counted = {v for v, _ in then.parameters.values()}
    again = Phase(then.problem, WORDS, frozenset(counted))
    apart = merge_phases([Phase(alone.problem), again], [])

    cost = apart.compute_cost((*first.solution.choice, *second.choice))

    index = LEVELS.index("index")  # an order among equals: domains of a plan followed are shorter
    assert together.cost[:index] <= cost[:index]


@pytest.mark.slow
def test_weights_and_caches_lie_as_one_in_both_calls() -> None:
    work = ModelCompiler.of(model_of("llama", num_key_value_heads=2), options())
    made = work.compile(4, "tp")
    (later,) = made.later
    constraints = constrain_to_plan(made.plan, work.later[0].analysis)

    refused = [n for n, p in later.decision.parameters.items() if not constraints[n](p)]
    cuts = {k: (c.dim, c.split) for k, c in later.plan.caches.items()}

    assert [] == refused
    assert {k: (c.dim, c.split) for k, c in made.plan.caches.items()} == cuts
    assert made.plan.parameters == later.plan.parameters


@pytest.mark.slow
def test_each_phase_is_priced_at_its_own_sizes() -> None:
    plan = autotp.plan(
        model_of("llama"), tp=2, example_inputs={"input_ids": ids(3, 8)}, new_tokens=4
    )
    prefill, decode = plan.phases

    assert ("prefill", 1, {"batch": 3, "sequence": 8}) == (
        prefill.name,
        prefill.calls,
        prefill.sizes,
    )
    expected = {"batch": 3, "sequence": 1, "past": 10}
    assert ("decode", 4, expected) == (decode.name, decode.calls, decode.sizes)
    row = next(r for r in prefill.collectives if r.where.endswith("o_proj"))
    one = next(r for r in decode.collectives if r.where.endswith("o_proj"))
    assert (3 * 8 * 64 * 4, 3 * 64 * 4) == (row.payload_bytes, one.payload_bytes)
    assert plan == Plan.from_json(plan.to_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "least"), [("llama", 2, 2), ("window", 2, 2), ("llama", 8, 4)]
)
def test_the_cache_is_counted_at_its_longest(name: str, tp: int, least: int) -> None:
    """The whole model's cache after all words, over the ranks that a key-value head allows."""
    model = window() if name == "window" else model_of(name)
    given = {"input_ids": ids()}
    plan = autotp.plan(model, tp=tp, example_inputs=given, new_tokens=WORDS)
    generated: Any = model
    out = generated.generate(
        **given,
        max_new_tokens=WORDS + 1,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    cache = next(v for k, v in out.items() if "cache" in k or k == "past_key_values")
    whole = sum(t.numel() * t.element_size() for t in flatten_cache(cache).leaves if t.dim() > 1)

    assert whole == sum(c.bytes for c in plan.caches.values())
    assert whole // least == plan.memory["kv_cache"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_both_calls_are_verified(name: str) -> None:
    model, inputs = build(name)
    given: Mapping[str, Any] = {k: v for k, v in inputs.items() if k.endswith("input_ids")}

    evidence = autotp.verify(model.eval(), tp=2, example_inputs=given, new_tokens=WORDS)

    assert evidence.ok
    assert evidence.collectives_predicted == evidence.collectives_seen


@pytest.mark.slow
def test_generating_needs_no_further_capture() -> None:
    model: Any = model_of("llama")
    sharded: Any = autotp.parallelize(
        model, 1, example_inputs={"input_ids": ids()}, new_tokens=WORDS
    )
    asked = {"max_new_tokens": WORDS, "do_sample": False, "pad_token_id": 0}

    assert torch.equal(model.generate(ids(), **asked), sharded.generate(ids(), **asked))
    assert 2 == len(sharded.variants)


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"new_tokens": -1}, "option new_tokens: is -1"),
        ({"new_tokens": True}, "option new_tokens: is True"),
        ({"new_tokens": 4, "training": True}, "new_tokens=4 and training=True"),
    ],
)
def test_options_that_no_plan_can_have(change: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        read_request(**change)


def test_a_model_that_generates_nothing_is_refused() -> None:
    model, inputs = build("bert")
    with pytest.raises(PlanError, match=r"new_tokens: .*generat"):
        autotp.plan(model, tp=2, example_inputs=inputs, new_tokens=4)


def test_more_words_than_positions_are_refused() -> None:
    model = model_of("gpt2")
    most = model.config.max_position_embeddings
    with pytest.raises(PlanError, match=f"{most} positions"):
        autotp.plan(model, tp=2, new_tokens=most)


def test_what_generate_does_not_take_is_told() -> None:
    strange = {"input_ids": ids(), "token_weights": ids()}
    with pytest.raises(PlanError, match="token_weights.*failed"):
        autotp.plan(model_of("llama"), tp=2, example_inputs=strange, new_tokens=4)
