"""The plans are the optimum: HiGHS agrees level by level, layers hold what Megatron's hold.

HiGHS solves the independent formulation of `tests.oracle`, here on one layer of each model;
`python -m tests.benchmarks.optimal` takes two layers, and every tp with gradients and without.
"""

import copy
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

import autotp
from autotp.api import dry_run
from autotp.compiler import ModelCompiler
from autotp.model_source import find_presets, load_model
from autotp.records.plan import Plan
from autotp.solver.iopddl import FORBIDDEN
from autotp.solver.problem import Edge, Problem, Variable
from autotp.solver.solve import solve
from tests.models import build, names
from tests.oracle import optimum
from tests.random_plans import analysed

PARALLEL = {"gpt_neox"}
"""Models whose attention and MLP share one residual add."""
DEEP = {"gpt_neox", "t5", "hand"}
"""Looked at with two layers, so that what lies between layers is seen."""


def working(name: str, *, training: bool, layers: int = 1) -> ModelCompiler:
    work = copy.copy(analysed(name, layers=layers))
    work.training = training
    return work


# ── against HiGHS ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "training"), [(2, True), (4, False)])
@pytest.mark.parametrize("name", names())
def test_the_cost_equals_that_of_an_independent_formulation(
    name: str, tp: int, training: bool
) -> None:
    problem = working(name, training=training).formulate(tp).problem
    found = solve(problem)

    assert "elimination" == found.method
    assert found.bound == found.cost
    assert optimum(problem) == found.cost


# ── what the optimum is ──────────────────────────────────────────────────────────────────────────


def layer_of(where: str) -> str:
    """The path of the layer that a module path lies in; empty outside of layers."""
    found = re.match(r"(.+?\.\d+)(\.|$)", where)
    return found[1] if found else ""


def by_layer(plan: Plan) -> dict[str, Counter[str]]:
    """For each layer, its collectives as `forward all_reduce`."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for run in plan.collectives:
        if layer := layer_of(run.where):
            found[layer][f"{run.phase} {run.kind}"] += 1
    return dict(found)


def expected_layers(name: str, layers: int, *, training: bool) -> dict[str, Counter[str]]:
    """One all-reduce a pair forward and one backward: 2 + 2, or 1 + 1 where pairs share the add."""
    work = analysed(name, layers=layers)
    paths = {layer_of(parameter) for parameter in work.analysis.parameters} - {""}
    found: dict[str, Counter[str]] = {}
    for path in paths:
        pairs = 3 if path.startswith("decoder.") else 1 if name in PARALLEL else 2
        counts = {"forward all_reduce": pairs}
        if training:
            # the encoder's output is read by the first layer, for all of them
            counts["backward all_reduce"] = pairs + (path == "decoder.block.0")
        found[path] = Counter(counts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", names())
def test_a_layer_runs_one_all_reduce_a_pair(name: str, tp: int, training: bool) -> None:
    layers = 2 if name in DEEP else 1
    plan = working(name, training=training, layers=layers).compile(tp, "tp").plan

    assert expected_layers(name, layers, training=training) == by_layer(plan)


@pytest.mark.slow
def test_parallel_residuals_share_one_bucket_of_partial_gradients() -> None:
    plan = working("gpt_neox", training=True, layers=2).compile(2, "tp").plan
    partial = {n for n, record in plan.parameters.items() if record.gradient_partial}
    outside = Counter(f"{c.phase} {c.kind}" for c in plan.collectives if not layer_of(c.where))

    assert partial == {n for n in plan.parameters if "layernorm" in n}
    assert {
        "forward all_gather": 2,  # of the embedding, of the logits
        "backward all_reduce": 2,  # of the head, of the bucket
    } == outside


LAYOUTS = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "model.norm": "norm",
    "lm_head": "vocabulary",
}


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_real_sizes_have_the_layouts_of_megatron(training: bool) -> None:
    config = transformers.AutoConfig.from_pretrained(find_presets() / "llama-3.1-8b")
    config.num_hidden_layers = 2
    plan = autotp.plan(load_model(config), tp=8, training=training)
    found = {name.removesuffix(".weight"): r.layout for name, r in plan.parameters.items()}
    table = found.pop("model.embed_tokens")

    assert table in ("column", "vocabulary")
    assert found == {name: LAYOUTS[_role(name)] for name in found}
    assert 2 == len(by_layer(plan))
    for counts in by_layer(plan).values():
        assert {"forward all_reduce": 2} | (
            {"backward all_reduce": 2} if training else {}
        ) == counts


def _role(name: str) -> str:
    return next(role for role in LAYOUTS if name.endswith(role))


# ── the dumped problem ───────────────────────────────────────────────────────────────────────────


def read_problem(document: Mapping[str, Any]) -> Problem:
    """The contest's problem: cost as the last level, usage before it, forbidden choices first."""
    nodes, edges = document["nodes"], document["edges"]
    variables = [
        Variable(str(i), tuple(map(str, range(len(costs)))), _levels(costs, usages, (-1,)))
        for i, (costs, usages) in enumerate(zip(nodes["costs"], nodes["usages"], strict=True))
    ]
    sizes = [len(v.domain) for v in variables]
    found = [
        Edge(a, b, _levels(costs, [0] * len(costs), (sizes[a], sizes[b])))
        for (a, b), costs in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    return Problem(("forbidden", "usage", "cost"), tuple(variables), tuple(found))


def _levels(costs: list[int], usages: list[int], shape: tuple[int, ...]) -> NDArray[np.int64]:
    cost = np.array(costs, dtype=np.int64)
    forbidden = (cost >= FORBIDDEN).astype(np.int64)
    return np.stack([forbidden, usages, cost * (1 - forbidden)]).reshape(3, *shape)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), [("llama", True), ("bert", False)])
def test_the_dumped_problem_solved_again_costs_what_the_plan_does(
    name: str, training: bool
) -> None:
    """All intervals are [0, 1): usages add up, so that the least usage under the limit is it."""
    model, inputs = build(name, num_hidden_layers=1)
    files = dry_run(model, 2, example_inputs=inputs, training=training)
    document = json.loads(gzip.decompress(files["problem.json.gz"]))["problem"]
    plan = json.loads(files["plan.json"])
    forbidden, usage, cost = optimum(read_problem(document))

    assert (0, document["usage_limit"]) == (forbidden, usage)
    assert plan["cost"]["time_ps"] == cost
