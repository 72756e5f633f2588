"""The type check of a rewritten graph: the untouched one passes, each planted fault is named."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx, nn

from autotp.algebra.placement import SHARED
from autotp.algebra.split import Split, segment
from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.errors import VerifyError
from autotp.lower.check import check_types
from autotp.options import read_request
from tests.toys import MLP

TP, HIDDEN, FFN, WORDS = 2, 16, 64, 128
OURS = torch.ops.autotp


class Block(MLP):
    """A normed MLP with biases beside a residual, and a head."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, FFN)
        self.table = nn.Embedding(WORDS, HIDDEN)
        self.norm, self.last_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.body(self.norm(x))
        return self.head(self.last_norm(x))


@cache
def work() -> ModelCompiler:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(0, WORDS, (2, 5))}
    return ModelCompiler(Block(), read_request(example_inputs=inputs, training=True))


def check_graph(made: CompiledVariant) -> None:
    written = made.rewritten
    check_types(
        written.graph,
        written.values,
        written.collectives,
        work().analysis,
        made.decision,
        training=True,
        tp=TP,
    )


def node_of(graph: fx.Graph, target: object, after: str = "") -> fx.Node:
    """The first node that calls `target`, past the one called `after`."""
    nodes = list(graph.nodes)
    first = next(i for i, n in enumerate(nodes) if n.name == after) if after else 0
    return next(n for n in nodes[first:] if n.target == target)


def bypass(node: fx.Node) -> fx.Node:
    """Takes a node out of its graph; its first reader is to blame."""
    reader = next(iter(node.users))
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)
    return reader


def no_reduce(graph: fx.Graph) -> fx.Node:
    return bypass(node_of(graph, OURS.reduce.default, after="down_weight"))


def no_copy(graph: fx.Graph) -> fx.Node:
    return bypass(node_of(graph, OURS.copy.default))


def bias_everywhere(graph: fx.Graph) -> fx.Node:
    return bypass(node_of(graph, OURS.keep_first.default))


def reduce_twice(graph: fx.Graph) -> fx.Node:
    reduced = node_of(graph, OURS.reduce.default)
    with graph.inserting_after(reduced):
        again = graph.call_function(reduced.target, (reduced, *reduced.args[1:]))
    reduced.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return again


def gather_by_another_split(graph: fx.Graph) -> fx.Node:
    gather = node_of(graph, OURS.gather.default)
    x, dim, _, group = gather.args
    halves = Split(1, (segment(2, WORDS // 2, 1),))
    gather.args = (x, dim, list(halves.encode()), group)
    return gather


def gather_along_another_dim(graph: fx.Graph) -> fx.Node:
    gather = node_of(graph, OURS.gather.default)
    x, dim, split, group = gather.args
    gather.args = (x, dim - 1, split, group)
    return gather


def read_before_it_is_summed(graph: fx.Graph) -> fx.Node:
    reduced = node_of(graph, OURS.reduce.default)
    (reader, *_) = reduced.users
    reader.replace_input_with(reduced, reduced.all_input_nodes[0])
    return reader


FAULTS: dict[str, tuple[Callable[[fx.Graph], fx.Node], str]] = {
    "a missing all-reduce": (no_reduce, "a reduction is missing"),
    "a copy replaced by its operand": (no_copy, "its gradient would not be summed over the ranks"),
    "a bias on every rank": (bias_everywhere, "every rank would add it"),
    "a sum made twice": (reduce_twice, "converts P to R"),
    "a gather of another cut": (gather_by_another_split, "a wrong slice"),
    "a gather of another dim": (gather_along_another_dim, "a wrong slice"),
    "a partial sum read as a whole": (read_before_it_is_summed, "a reduction is missing"),
}


def test_the_untouched_graph_passes() -> None:
    check_graph(work().compile(TP, "tp"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    plant, message = FAULTS[fault]
    made = work().compile(TP, "tp")
    blamed = plant(made.rewritten.graph)

    with pytest.raises(VerifyError, match=rf"node {blamed.name}\b.*{re.escape(message)}"):
        check_graph(made)


def test_what_leaves_the_graph_must_be_whole() -> None:
    made = work().compile(TP, "tp")
    gather = node_of(made.rewritten.graph, OURS.gather.default, after="linear_2")
    source = gather.all_input_nodes[0]
    bypass(gather)

    with pytest.raises(VerifyError, match=rf"node {source.name}.*is an output placed S\("):
        check_graph(made)


def test_a_parameter_must_be_read_as_it_is_laid_out() -> None:
    made = work().compile(TP, "tp")
    parameters = dict(made.decision.parameters) | {"up.weight": SHARED}
    wrong = replace(made, decision=replace(made.decision, parameters=parameters))

    with pytest.raises(
        VerifyError, match="parameter up.weight is laid out R~, but the graph reads"
    ):
        check_graph(wrong)


def test_the_plan_must_count_the_collectives_of_the_graph() -> None:
    made = work().compile(TP, "tp")
    made.rewritten.collectives.pop()

    with pytest.raises(VerifyError, match="the graph runs .*, but the plan counts "):
        check_graph(made)
