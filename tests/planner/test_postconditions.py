"""The postconditions of the planner: real models have no fault, and planted ones are named."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from autotp.algebra.axis import Forest
from autotp.algebra.placement import Placement
from autotp.algebra.size import Size
from autotp.capture.postconditions import find_program_faults
from autotp.compiler import ModelCompiler
from autotp.oprules.rule import Factor
from autotp.options import read_request
from autotp.planner.analysis import Analysis, AxisPair, Matching, Use
from autotp.planner.formulate import PlacementProblem
from autotp.planner.match import match
from autotp.planner.postconditions import (
    find_analysis_faults,
    find_matching_faults,
    find_problem_faults,
)
from autotp.planner.propagate import propagate
from autotp.solver.problem import Edge
from tests import models, zoo

aten = torch.ops.aten
WIDTH, FFN = 8, 12


class TwoLayers(nn.Module):
    """One pair, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclass(slots=True)
class Planned:
    """What the stages made of one model, each free to be spoilt."""

    analysis: Analysis
    matching: Matching
    posed: PlacementProblem

    def use(self, target: object) -> Use:
        return next(u for u in self.analysis.uses.values() if u.node.target == target)

    def change(self, use: Use, **fields: Any) -> None:
        self.analysis.uses[use.node] = replace(use, rule=replace(use.rule, **fields))

    def faults(self) -> list[str]:
        """The faults of the first stage that has any: the next one is not checked without it."""
        stages = (
            find_analysis_faults(self.analysis, WORK.request.rules),
            find_matching_faults(self.analysis, self.matching),
            find_problem_faults(self.analysis, self.posed),
        )
        return next((found for stage in stages if (found := list(stage))), [])

    def alter(self, number: int, **fields: Any) -> None:
        """Give one variable of the problem other fields."""
        variables = list(self.posed.problem.variables)
        variables[number] = replace(variables[number], **fields)
        self.posed.problem = replace(self.posed.problem, variables=tuple(variables))


WORK = ModelCompiler(TwoLayers(), read_request(example_inputs={"x": torch.randn(2, 5, WIDTH)}))


def planned() -> Planned:
    analysis = propagate(WORK.program, list(WORK.source.parameters), WORK.request.rules)
    WORK.analysis, WORK.matching = analysis, match(analysis, WORK.request.rules)
    return Planned(analysis, WORK.matching, WORK.formulate(2))


# ── real models ──────────────────────────────────────────────────────────────────────────────────

ONE_LAYER = {
    "gpt2": {"n_layer": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
    "hand": {"layers": 1},
}


def family(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = models.build(name, **ONE_LAYER.get(name, {"num_hidden_layers": 1}))
    return model.to(dtype), inputs


REAL: list[tuple[str, Callable[[], tuple[nn.Module, dict[str, Any]]], dict[str, Any]]] = [
    ("grouped heads, prefill and decode", lambda: family("llama"), {"new_tokens": 4}),
    ("the cache of a sliding window", lambda: family("gemma2"), {"new_tokens": 4}),
    ("fused heads, training", lambda: family("gpt2"), {"training": True}),
    ("bfloat16", lambda: family("phi3", torch.bfloat16), {}),
    ("experts", lambda: family("mixtral"), {}),
    ("encoder and decoder, training", lambda: family("t5"), {"training": True}),
    ("encoder, training in bfloat16", lambda: family("bert", torch.bfloat16), {"training": True}),
    ("state space", lambda: zoo.build("mamba2", "causal-lm"), {}),
    ("convolutions", lambda: zoo.build("resnet", "image-classification"), {}),
    ("an image in patches", lambda: zoo.build("vit", "image-classification"), {}),
    ("written by hand", lambda: family("hand"), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "options"), [r[1:] for r in REAL], ids=[r[0] for r in REAL])
def test_no_stage_of_a_real_model_has_a_fault(
    build: Callable[[], tuple[nn.Module, dict[str, Any]]], options: dict[str, Any]
) -> None:
    model, inputs = build()
    if "new_tokens" in options:
        del inputs["use_cache"]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    first = ModelCompiler.of(model, read_request(example_inputs=inputs, **options))

    for work in (first, *first.later):
        assert [] == list(find_program_faults(work.program, tensors))
        assert [] == list(find_analysis_faults(work.analysis, work.request.rules))
        assert [] == list(find_matching_faults(work.analysis, work.matching))
        for tp in (2, 3):
            assert [] == list(find_problem_faults(work.analysis, work.formulate(tp)))


# ── planted faults: propagate ────────────────────────────────────────────────────────────────────


def forget_a_node(it: Planned) -> None:
    del it.analysis.uses[it.use(aten.relu.default).node]


def give_other_dims(it: Planned) -> None:
    node = it.use(aten.relu.default).node
    *dims, last = it.analysis.dims[(node, 0)]
    it.analysis.dims[(node, 0)] = (*dims, it.analysis.forest.add_dim(Size(FFN + 1)))
    assert it.analysis.forest.size(last) == Size(FFN)


def drop_a_dim(it: Planned) -> None:
    node = it.use(aten.relu.default).node
    it.analysis.dims[(node, 0)] = it.analysis.dims[(node, 0)][:-1]


def read_another_operand(it: Planned) -> None:
    use = it.use(aten.relu.default)
    other = replace(use.operands[0], value=it.use(aten.add.Tensor).operands[1].value)
    it.analysis.uses[use.node] = replace(use, operands=(other,))


def read_a_number(it: Planned) -> None:
    use = it.use(aten.linear.default)
    it.analysis.uses[use.node] = replace(
        use, operands=(replace(use.operands[0], argument="absent"), *use.operands[1:])
    )


def stretch_a_constant(it: Planned) -> None:
    use = it.use(aten.linear.default)
    x = use.operands[0]
    dims = (*x.dims[:-1], it.analysis.forest.add_dim(Size(3)))
    it.analysis.uses[use.node] = replace(use, operands=(replace(x, dims=dims), *use.operands[1:]))


def lose_a_result(it: Planned) -> None:
    it.change(it.use(aten.relu.default), results=())


def spoil_a_factor(**fields: Any) -> Callable[[Planned], None]:
    def spoil(it: Planned) -> None:
        use = it.use(aten.relu.default)
        *others, last = use.rule.factors
        it.change(use, factors=(*others, replace(last, **fields)))

    return spoil


def put_a_factor_elsewhere(it: Planned) -> None:
    use = it.use(aten.linear.default)
    of: Factor = next(f for f in use.rule.factors if f.kind == "reduce")
    it.change(use, factors=(replace(of, slots=(*of.slots, (1, 0))),))


def contract_a_result(it: Planned) -> None:
    use = it.use(aten.linear.default)
    of: Factor = next(f for f in use.rule.factors if f.kind == "reduce")
    it.change(use, factors=(replace(of, slots=(*of.slots, (~0, 2))),))


def flag_an_unknown_value(it: Planned) -> None:
    it.analysis.weights.add((it.use(aten.relu.default).node, 1))


def flow_through_integers(it: Planned) -> None:
    value = it.use(aten.relu.default).node, 0
    it.analysis.metas[value] = it.analysis.metas[value].long()


def call_by_another_name(it: Planned) -> None:
    it.analysis.parameters["other"] = it.analysis.parameters["up.weight"]


def refine_wrongly(it: Planned) -> None:
    forest: Forest = it.analysis.forest
    forest.add_atom(Size(6)).parts = (forest.add_atom(Size(5)),)


def add_up_wrongly(it: Planned) -> None:
    forest: Forest = it.analysis.forest
    forest.add_atom(Size(6)).segments = (forest.add_dim(Size(2)), forest.add_dim(Size(3)))


def analyse_backwards(it: Planned) -> None:
    it.analysis.uses = dict(reversed(it.analysis.uses.items()))


# ── planted faults: match ────────────────────────────────────────────────────────────────────────


def pair_of(it: Planned) -> AxisPair:
    return it.matching.pairs[0]


def put_pair(it: Planned, **fields: Any) -> None:
    changed = replace(pair_of(it), **fields)
    it.matching.pairs[0] = changed
    it.matching.pair_of = dict.fromkeys(it.matching.pair_of, changed)


def pair_a_data_axis(it: Planned) -> None:
    pair_of(it).axes[0].data = True


def close_nowhere(it: Planned) -> None:
    put_pair(it, closers=())


def open_with_a_stranger(it: Planned) -> None:
    put_pair(it, openers=("elsewhere.weight", *pair_of(it).openers))


def pair_twice(it: Planned) -> None:
    it.matching.pairs.append(replace(pair_of(it)))


def settle_elsewhere(it: Planned) -> None:
    it.matching.pair_of["up.weight"] = replace(pair_of(it))


def settle_a_bystander(it: Planned) -> None:
    it.matching.pair_of["up.bias"] = pair_of(it)


def move_home(it: Planned) -> None:
    it.matching.home["up.weight"] = (it.analysis.forest.add_atom(Size(FFN)),)


def invent_experts(it: Planned) -> None:
    it.matching.experts["up.weight"] = it.analysis.forest.add_atom(Size(4))


# ── planted faults: formulate ────────────────────────────────────────────────────────────────────


def variable_of(it: Planned, name: str) -> int:
    return it.posed.parameters[name][0]


def leave_no_choice(it: Planned) -> None:
    it.alter(variable_of(it, "up.weight"), domain=())


def repeat_a_choice(it: Planned) -> None:
    number = variable_of(it, "up.weight")
    first, *others = it.posed.problem.variables[number].domain
    it.alter(number, domain=(first, first, *others[1:]))


def shorten_costs(it: Planned) -> None:
    number = variable_of(it, "up.weight")
    it.alter(number, costs=it.posed.problem.variables[number].costs[:, 1:])


def pay_back(it: Planned) -> None:
    number = variable_of(it, "up.weight")
    it.alter(number, costs=it.posed.problem.variables[number].costs - 1)


def put_edge(it: Planned, **fields: Any) -> None:
    edges = list(it.posed.problem.edges)
    edges[0] = replace(edges[0], **fields)
    it.posed.problem = replace(it.posed.problem, edges=tuple(edges))


def join_an_unknown_variable(it: Planned) -> None:
    put_edge(it, second=len(it.posed.problem.variables))


def transpose_an_edge(it: Planned) -> None:
    edges: tuple[Edge, ...] = it.posed.problem.edges
    costs = next(e.costs for e in edges if e.costs.shape[1] != e.costs.shape[2])
    shape = costs.shape[1:][::-1]
    put_edge(it, costs=np.zeros((costs.shape[0], *shape, 1), np.int64)[..., 0].repeat(2, axis=1))


def forbid_replication(it: Planned) -> None:
    costs = it.posed.problem.edges[0].costs.copy()
    costs[0] = 1
    put_edge(it, costs=costs)


def forbid_a_replicated_parameter(it: Planned) -> None:
    number = variable_of(it, "up.weight")
    costs = it.posed.problem.variables[number].costs.copy()
    costs[0, 0] = 1
    it.alter(number, costs=costs)


def rename_a_level(it: Planned) -> None:
    levels = it.posed.problem.levels
    it.posed.problem = replace(it.posed.problem, levels=("banned", *levels[1:]))


def forget_a_strategy(it: Planned) -> None:
    del it.posed.uses[it.use(aten.relu.default).node]


def forget_a_parameter(it: Planned) -> None:
    del it.posed.parameters["up.weight"]


def decide_twice(it: Planned) -> None:
    it.posed.parameters["up.bias"] = it.posed.parameters["up.weight"]


def offer_too_much(it: Planned) -> None:
    number, domain = it.posed.parameters["up.weight"]
    it.posed.parameters["up.weight"] = number, (*domain, domain[0])


def split_a_missing_dim(it: Planned) -> None:
    number, domain = it.posed.parameters["up.weight"]
    axis = domain[-1].partition
    it.posed.parameters["up.weight"] = number, (*domain[:-1], Placement("S", 2, axis))


def split_a_missing_axis(it: Planned) -> None:
    number, domain = it.posed.parameters["up.weight"]
    of_another = next(p.partition for p in domain if p.dim == 1)
    it.posed.parameters["up.weight"] = number, (*domain[:-1], Placement("S", 0, of_another))


def place_one_operand_less(it: Planned) -> None:
    node: fx.Node = it.use(aten.linear.default).node
    number, (first, *others) = it.posed.uses[node]
    it.posed.uses[node] = number, (replace(first, operands=first.operands[1:]), *others)


PLANTED: list[tuple[Callable[[Planned], None], str]] = [
    (
        forget_a_node,
        r"relu .*: reads linear, which depends on a parameter, but was not analysed",
    ),
    (give_other_dims, r"relu .*: result 0 has sizes \[s\d+, s\d+, 12\], but .* \[s\d+, s\d+, 13\]"),
    (drop_a_dim, r"relu .*: result 0 has sizes \[s\d+, s\d+, 12\], but .* \[s\d+, s\d+\]"),
    (read_another_operand, r"operand 0 is linear, but the rule was found for linear_1"),
    (read_a_number, r"operand 0 is argument absent of the node, which is None, not a tensor"),
    (stretch_a_constant, r"operand 0 \(x\) has sizes \[s\d+, s\d+, 8\], but .* \[s\d+, s\d+, 3\]"),
    (lose_a_result, r"its rule gives 0 results, the node makes 1"),
    (spoil_a_factor(slots=((3, 0),)), r"is at dim 0 of operand 3, which does not exist"),
    (spoil_a_factor(slots=((0, 7),)), r"is at dim 7 of operand 0, which does not exist"),
    (spoil_a_factor(slots=((~1, 0),)), r"is at dim 0 of result 1, which does not exist"),
    (spoil_a_factor(join="sum"), r"pass factor 12: is joined by 'sum'"),
    (put_a_factor_elsewhere, r"reduce factor 8: of size 8 is at dim 0 of operand 1, which is 12"),
    (contract_a_result, r"reduce factor 8: is contracted, but is in a result"),
    (lambda it: it.change(it.use(aten.relu.default), bias=frozenset({4})), r"operands \[4\]"),
    (flag_an_unknown_value, r"relu .*: result 1 is among weights, but has no dims"),
    (flow_through_integers, r"relu .*: takes a gradient, but is of torch.int64"),
    (call_by_another_name, r"parameter other is read by up_weight"),
    (refine_wrongly, r"axis a\d+ of size 6 is a product of size 5"),
    (add_up_wrongly, r"axis a\d+ of size 6 is a sum of size 5"),
    (analyse_backwards, r"not nodes of the graph in its order"),
    (pair_a_data_axis, r"a\d+ of size 12 is not an axis that can be split"),
    (close_nowhere, r"has 1 openers and 0 closers"),
    (open_with_a_stranger, r"elsewhere.weight is not a parameter of the graph"),
    (pair_twice, r"axis a\d+ is in two pairs"),
    (settle_elsewhere, r"parameter up.weight is in pair .*, which is none of the pairs"),
    (settle_a_bystander, r"parameter up.bias neither opens nor closes its pair"),
    (move_home, r"parameter up.weight: its axes a\d+ are none of its own"),
    (invent_experts, r"parameter up.weight: its axes a\d+ are none of its own"),
    (leave_no_choice, r"variable up.weight has no choice"),
    (repeat_a_choice, r"variable up.weight has a choice twice: R, R"),
    (shorten_costs, r"up.weight: its costs are int64 of \(7, 3\), not int64 of \(7, 4\)"),
    (pay_back, r"up.weight: has a negative cost, -1, at level forbidden"),
    (join_an_unknown_variable, r"an edge joins the variables \(\d+, \d+\) of \d+"),
    (transpose_an_edge, r" – .*: its costs are int64 of \(7, \d+, \d+\), not int64 of"),
    (forbid_replication, r" – .*: R with replicated is forbidden"),
    (forbid_a_replicated_parameter, r"up.weight: R is forbidden, so"),
    (rename_a_level, r"the problem has levels \('banned', .*, not \('forbidden',"),
    (forget_a_strategy, r"relu .*: has no variable for its strategy"),
    (forget_a_parameter, r"parameter up.weight has no variable for its placement"),
    (decide_twice, r"variable up.weight decides two things"),
    (offer_too_much, r"variable up.weight has 4 choices, for 5 things to choose from"),
    (
        split_a_missing_dim,
        r"parameter up.weight may be placed S\(2, a\d+\), but its dims are 12, 8",
    ),
    (
        split_a_missing_axis,
        r"parameter up.weight may be placed S\(0, a\d+\), but its dims are 12, 8",
    ),
    (place_one_operand_less, r"linear .*: strategy replicated places R, R, R, but operands"),
]


def test_a_sound_plan_has_no_fault() -> None:
    assert [] == planned().faults()


@pytest.mark.parametrize(("plant", "reason"), PLANTED, ids=[reason for _, reason in PLANTED])
def test_a_planted_fault_is_named(plant: Callable[[Planned], None], reason: str) -> None:
    it = planned()
    plant(it)
    found = it.faults()

    assert any(re.search(reason, fault) for fault in found), found
