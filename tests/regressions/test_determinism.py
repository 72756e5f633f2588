"""Plans are the same in every process, under any hash seed, when followed, and through JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp.records.plan import Plan
from autotp.solver.solve import solve
from tests.models import build
from tests.plans import decoder_plan
from tests.solver.test_solve import large_problem
from tests.spmd.tally import Tally

ROOT = Path(__file__).parents[2]
TP = 2
SEEDS = ("0", "12345")
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gpt_neox": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}


def plan_of(name: str, **options: Any) -> Plan:
    model, inputs = build(name, **MODELS[name])
    return autotp.plan(model, TP, example_inputs=inputs, training=True, **options)


def results() -> dict[str, str]:
    """What must be the same in every process: a solution, and the hashes of plans."""
    return {
        "solution": str(solve(large_problem(9))),
        "plan by hand": decoder_plan(layers=2, tp=4).hash,
        **{name: plan_of(name).hash for name in MODELS},
    }


def started(seed: str) -> "subprocess.Popen[str]":
    """A fresh process that prints the results."""
    code = "import json, tests.regressions.test_determinism as m; print(json.dumps(m.results()))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_every_process_finds_the_same_solutions_and_plans_under_any_hash_seed() -> None:
    processes = [started(seed) for seed in SEEDS]
    found = [json.loads(process.communicate(timeout=300)[0]) for process in processes]

    assert [results()] * len(SEEDS) == found
    assert len(set(found[0].values())) == len(MODELS) + 2


@pytest.fixture(scope="module", params=list(MODELS))
def made(request: pytest.FixtureRequest) -> tuple[str, Plan]:
    return request.param, plan_of(request.param)


@pytest.mark.slow
def test_a_plan_followed_gives_the_same_layouts_and_collectives(made: tuple[str, Plan]) -> None:
    name, plan = made
    again = plan_of(name, plan=Plan.from_json(plan.to_json()))

    assert plan.parameters == again.parameters
    assert plan.collectives == again.collectives
    assert plan.choices == again.choices
    assert plan.hash == again.hash


@pytest.mark.slow
def test_a_plan_made_with_overrides_and_followed_says_the_same() -> None:
    plan = plan_of("llama", overrides={"model.embed_tokens": "replicated"})

    assert plan.hash == plan_of("llama", plan=plan).hash


@pytest.mark.slow
def test_a_model_without_values_has_the_plan_of_one_with_values() -> None:
    model, _ = build("llama", **MODELS["llama"])
    model.config.architectures = [type(model).__name__]

    assert autotp.plan(model, TP, training=False).hash == autotp.plan(model.config, TP).hash


@pytest.mark.slow
def test_a_plan_comes_back_from_json_as_it_was(made: tuple[str, Plan]) -> None:
    plan = made[1]
    read = Plan.from_json(plan.to_json())

    assert plan == read
    assert plan.hash == read.hash


@pytest.mark.slow
def test_one_rank_is_legal_and_runs_no_collective() -> None:
    model, inputs = build("llama", **MODELS["llama"])
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    with Tally() as tally, torch.no_grad():
        found, expected = sharded(**inputs).logits, model(**inputs).logits

    assert torch.equal(expected, found)
    assert 0 == tally.kinds.total()
    assert () == sharded.plan.collectives
    assert all(record.dim is None for record in sharded.plan.parameters.values())


@pytest.mark.slow
def test_one_rank_has_the_whole_models_gradients() -> None:
    model, inputs = build("hand", layers=1)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    for either in (model, sharded):
        either(**inputs).square().mean().backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}

    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, rtol=0.0, atol=1e-9)
