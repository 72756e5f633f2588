"""Faults planted in the graphs that autotp emits: the proof says wrong, and names the node.

Each edit takes a right graph, after rewriting and before it is cut into layers, and returns the
name of the node to blame. Where a placement is at fault the type check must name it as well, from
the graph alone.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import fx, nn

from autotp.algebra.placement import PARTIAL
from autotp.algebra.split import Extent, Segment, Split
from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.errors import VerifyError
from autotp.lower.check import check_types
from autotp.planner.analysis import Decision
from autotp.planner.formulate import PlacementProblem
from autotp.planner.strategy import Strategy
from autotp.records.evidence import Evidence
from autotp.records.trace import Trace
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel
from autotp.runtime.ops.blocks import slice_block
from autotp.solver.problem import Problem, Solution
from autotp.solver.solve import solve
from autotp.verification import compare_ranks
from tests.random_plans import analysed

TP = 2
ATEN, OURS = torch.ops.aten, torch.ops.autotp
Edit = Callable[[fx.Graph], str]


# ── graphs, with and without a fault ─────────────────────────────────────────────────────────────


@cache
def planned(name: str) -> tuple[ModelCompiler, PlacementProblem, Solution]:
    """One layer of a model, planned with gradients."""
    work = copy.copy(analysed(name, layers=1))
    work.training = True
    posed = work.formulate(TP)
    return work, posed, solve(posed.problem)


def made(name: str, solution: Solution | None = None) -> CompiledVariant:
    work, posed, best = planned(name)
    return work.lower(posed, solution or best, TP, "tp")


def proved(
    name: str, one: CompiledVariant, spoil: Callable[[ShardedModel], None] = lambda model: None
) -> Evidence:
    """What the proof finds of all ranks of a plan as they stand."""
    work = planned(name)[0]
    ranks = [work.build(one, Group("tp", TP, r, torch.device("cpu"))) for r in range(TP)]
    for rank in ranks:
        spoil(rank)
    return compare_ranks(
        work.model,
        ranks,
        work.inputs,
        one.plan,
        Trace(one.rewritten.values),
        program=work.program,
        gradients=True,
        seed=0,
    )


def checked(name: str, one: CompiledVariant, decision: Decision | None = None) -> str:
    """What the type check says of a plan's graph; empty if it finds nothing."""
    work, rewritten = planned(name)[0], one.rewritten
    try:
        check_types(
            rewritten.graph,
            rewritten.values,
            rewritten.collectives,
            work.analysis,
            decision or one.decision,
            training=True,
            tp=TP,
        )
    except VerifyError as error:
        return str(error)
    return ""


def path_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next((entry[0] for entry in reversed(stack.values())), "")


def found(graph: fx.Graph, target: object, module: str = "") -> fx.Node:
    """The first node that calls `target` in the module whose path ends in `module`."""
    nodes = (n for n in graph.nodes if n.target == target)
    return next(n for n in nodes if path_of(n).endswith(module))


def reader(node: fx.Node, *, last: bool = False) -> fx.Node:
    return list(node.users)[-1 if last else 0]


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


def without(target: object, module: str = "", *, backward: bool = False) -> Edit:
    """Takes a node out; its first reader is to blame, or its last in the backward pass."""

    def edit(graph: fx.Graph) -> str:
        node = found(graph, target, module)
        blamed = reader(node, last=backward)
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
        return blamed.name

    return edit


def recut(target: object, module: str) -> Edit:
    """Cuts in two halves of two blocks, where one block a rank is meant."""

    def edit(graph: fx.Graph) -> str:
        node = found(graph, target, module)
        x, dim, numbers, group = node.args
        split = Split.decode(numbers)
        halves = tuple(
            piece
            for extent in split.segments[0].extents
            for piece in (
                [Extent(2), Extent(extent.size // 2, 0)] if not extent.parts else [extent]
            )
        )
        wrong = Split(split.outer, (Segment(halves),))
        node.args = (x, dim, list(wrong.encode()), group)
        return node.name

    return edit


def unmasked(graph: fx.Graph) -> str:
    """Rows of other ranks come as row 0 instead of zero."""
    return without(ATEN.masked_fill.Scalar, "wte")(graph)


def unshared(graph: fx.Graph) -> str:
    """Replicated parameters with partial gradients are read without the bucket."""
    node = found(graph, OURS.share_gradients.default)
    blamed = ""
    for item in list(node.users):
        source = node.args[0][item.args[1]]
        blamed = reader(item).name
        item.replace_all_uses_with(source)
        graph.erase_node(item)
    graph.erase_node(node)
    return blamed


@dataclass(frozen=True)
class Fault:
    """A fault in a model's graph.

    - `blamed`: what the proof says of the node; `typed`: what the type check says, None where the
      placements are right and only numbers are wrong.
    """

    model: str
    edit: Edit
    module: str
    blamed: str
    typed: str | None


FAULTS = {
    "a gather of a wrong cut": Fault(
        "llama", recut(OURS.gather.default, "lm_head"), "lm_head", "should be R", "a wrong slice"
    ),
    "no all-reduce after attention": Fault(
        "llama",
        without(OURS.reduce.default, "o_proj"),
        "model.layers.0",
        "planned, but not in the graph",
        "a reduction is missing",
    ),
    "no all-reduce after a fused MLP": Fault(
        "gpt2",
        without(OURS.reduce.default, "mlp.c_proj"),
        "transformer.h.0.mlp.c_proj",
        "planned, but not in the graph",
        "a reduction is missing",
    ),
    "no backward all-reduce before an MLP": Fault(
        "llama",
        without(OURS.copy.default, "gate_proj", backward=True),
        "model.layers.0.mlp.up_proj",
        "its own gradient is right",
        "its gradient would not be summed over the ranks",
    ),
    "no backward all-reduce before attention": Fault(
        "gpt2",
        without(OURS.copy.default, "attn.c_attn", backward=True),
        "transformer.h.0.attn.c_attn",
        "its own gradient is right",
        "its gradient would not be summed over the ranks",
    ),
    "a bias on every rank": Fault(
        "gpt2",
        without(OURS.keep_first.default, "attn.c_proj"),
        "transformer.h.0.attn.c_proj",
        "planned, but not in the graph",
        "every rank would add it",
    ),
    "a vocabulary without its mask": Fault(
        "gpt2", unmasked, "transformer", "do not add up", "every rank would add it"
    ),
    "no bucket of partial gradients": Fault(
        "gpt_neox",
        unshared,
        "gpt_neox.layers.0",
        "its own gradient is right",
        "its gradient would not be summed over the ranks",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_an_untouched_graph_is_right(name: str) -> None:
    one = made(name)
    evidence = proved(name, one)

    assert "" == checked(name, one)
    assert evidence.ok, evidence


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_a_graph_is_named(fault: Fault) -> None:
    one = made(fault.model)
    blamed = fault.edit(one.rewritten.graph)
    one.rewritten.graph.lint()
    evidence = proved(fault.model, one)
    said = checked(fault.model, one)

    assert not evidence.ok
    assert re.match(
        rf"{blamed}( \(\w+\))? = \S+ at {fault.module}\b", evidence.first_divergence or ""
    )
    assert fault.blamed in (evidence.first_divergence or "")
    assert (fault.typed or "") in said
    assert bool(fault.typed) == bool(said)


# ── plans that do what no optimum does ───────────────────────────────────────────────────────────


def best_with(name: str, target: object, module: str, wish: Callable[[Strategy], bool]) -> Solution:
    """The best plan of those where the nodes of `target` in `module` have a strategy wished for."""
    _, posed, _ = planned(name)
    problem = posed.problem
    wished = {
        variable: np.array([wish(strategy) for strategy in domain])
        for node, (variable, domain) in posed.uses.items()
        if node.target == target and path_of(node).endswith(module)
    }
    every = np.array(True)
    variables = (
        replace(v, costs=_with_wish(v.costs, wished.get(i, every)))
        for i, v in enumerate(problem.variables)
    )
    edges = (replace(e, costs=_with_wish(e.costs, every)) for e in problem.edges)
    levels = (problem.levels[0], "wish", *problem.levels[1:])
    choice = solve(Problem(levels, tuple(variables), tuple(edges))).choice
    cost = problem.compute_cost(choice)
    return Solution(choice, cost, cost, "elimination", 0)


def _with_wish(costs: NDArray[np.int64], granted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Costs with a level after the first: 1 where a wish is not granted."""
    level = np.broadcast_to(~granted, costs.shape[1:]).astype(np.int64)
    return np.concatenate([costs[:1], level[None], costs[1:]])


def unscaled(graph: fx.Graph) -> str:
    """A mean of a part is taken for its share of the mean of the whole."""
    scaled = found(graph, ATEN.div.Tensor, "input_layernorm")
    blamed = reader(scaled)
    scaled.replace_all_uses_with(scaled.all_input_nodes[0])
    graph.erase_node(scaled)
    return blamed.name


def is_sum(strategy: Strategy) -> bool:
    return strategy.results[0] == PARTIAL and bool(strategy.partition.parts)


def is_whole(strategy: Strategy) -> bool:
    return strategy.label == "replicated"


@pytest.mark.parametrize(
    ("target", "module", "wish", "edit", "blamed", "typed"),
    [
        (
            ATEN.mean.dim,
            "input_layernorm",
            is_sum,
            unscaled,
            "model.layers.0.input_layernorm",
            "converts P to R",
        ),
        (
            ATEN.linear.default,
            "q_proj",
            is_whole,
            recut(OURS.scatter.default, ""),
            "model.layers.0.self_attn",
            "a wrong slice",
        ),
    ],
    ids=["a mean without its rescale", "a slice of a wrong cut"],
)
def test_a_fault_in_another_plan_is_named(
    target: object,
    module: str,
    wish: Callable[[Strategy], bool],
    edit: Edit,
    blamed: str,
    typed: str,
) -> None:
    solution = best_with("llama", target, module, wish)
    right, wrong = made("llama", solution), made("llama", solution)
    name = edit(wrong.rewritten.graph)
    evidence = proved("llama", wrong)

    assert proved("llama", right).ok
    assert "" == checked("llama", right)
    assert not evidence.ok
    assert re.match(rf"{name}( \(\w+\))? = \S+ at {blamed}\b", evidence.first_divergence or "")
    assert typed in checked("llama", wrong)
    assert f"node {name} " in checked("llama", wrong)


# ── faults in what a rank holds ──────────────────────────────────────────────────────────────────


def hold(model: ShardedModel, name: str, shard: torch.Tensor) -> None:
    """Puts another shard in place of a rank's own."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(shard.detach().clone()))


def of_the_next_rank(name: str) -> Callable[[ShardedModel], None]:
    def spoil(model: ShardedModel) -> None:
        record = model.plan.parameters[name]
        split = Split.decode(record.split)
        whole = planned("llama")[0].model.get_parameter(name)
        hold(model, name, slice_block(whole, record.dim, split, (model.rank + 1) % TP, TP))

    return spoil


def as_in_the_figure(model: ShardedModel) -> None:
    """The article's figure 3: up and gate cut along their input, down along its output."""
    for name, record in model.plan.parameters.items():
        if ".mlp." in name:
            whole = planned("llama")[0].model.get_parameter(name)
            hold(model, name, whole.chunk(TP, 1 - record.dim)[model.rank])


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_shard_of_another_rank_is_named(name: str) -> None:
    parameter = f"model.layers.0.{name}.weight"
    evidence = proved("llama", made("llama"), of_the_next_rank(parameter))

    assert not evidence.ok
    assert f" = {parameter}: its value should be S(" in (evidence.first_divergence or "")
    assert "not those of the plan: a slice or a layout is wrong" in (
        evidence.first_divergence or ""
    )


def test_the_up_and_down_split_of_the_article_is_named() -> None:
    evidence = proved("llama", made("llama"), as_in_the_figure)

    assert not evidence.ok
    assert " = model.layers.0.mlp.gate_proj.weight: its value should be S(0, " in (
        evidence.first_divergence or ""
    )
    assert "do not fit" in (evidence.first_divergence or "")


def test_the_type_check_names_layouts_that_are_not_the_graphs() -> None:
    one = made("llama")
    parameters = dict(one.decision.parameters)
    for name, placement in one.decision.parameters.items():
        if ".mlp." in name:
            parameters[name] = replace(placement, dim=1 - placement.dim)
    said = checked("llama", one, replace(one.decision, parameters=parameters))

    assert "model.layers.0.mlp.gate_proj.weight is laid out S(1, " in said
    assert "the graph reads it as S(0, " in said
