"""What runs of a graph: ops through Python's bindings, sums in place; values are the graph's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autotp.runtime.codegen import bindings, in_place
from autotp.runtime.codegen.bindings import bind_ops
from autotp.runtime.codegen.function import compile_graph
from autotp.runtime.codegen.in_place import reduce_in_place

COLLECTIVES = torch.ops._c10d_functional


def traced(f: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """The graph of `f` as a capture leaves it: ops with their overloads, values on the side."""
    return make_fx(f, pre_dispatch=True, tracing_mode="fake")(*inputs).graph


def block(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Ops of many kinds: composite, with numbers, lists, dtypes, several results."""
    y = functional.linear(x, weight) + 1
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = functional.silu(y).reshape(2, 3, 2, 4).transpose(1, 2)
    first, second = y.split(2, -1)
    y = torch.cat([-second, first], dim=-1).to(torch.float64)
    y = functional.scaled_dot_product_attention(y, y, y, is_causal=True, scale=0.5)
    table = functional.embedding(ids, weight).unsqueeze(1)
    return torch.where(y > 0, y, 2.0 - y).expand(2, 2, 3, 4) + table[..., :4].mean(1, keepdim=True)


INPUTS = (torch.randn(2, 3, 8), torch.randn(8, 8), torch.tensor([[1, 2, 3], [4, 5, 6]]))


def test_what_runs_gives_what_the_graph_gives() -> None:
    graph = traced(block, *INPUTS)
    expected = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*INPUTS)
    actual = compile_graph(graph)(nn.Module(), *INPUTS)

    assert torch.equal(expected, actual)


def test_ops_are_called_through_their_bindings() -> None:
    graph = traced(block, *INPUTS)
    bind_ops(graph)
    called = {node.target for node in graph.nodes if node.op == "call_function"}

    assert {torch.add, torch.rsqrt, torch.transpose, functional.linear, torch.Tensor.to} <= called


def test_a_binding_that_does_another_thing_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(op: object) -> list[Callable[..., Any]]:
        return [torch.sub, torch.mul, lambda x, y: torch.add(x, y, alpha=2), torch.relu]

    monkeypatch.setattr(bindings, "_list_candidates", others)
    monkeypatch.setattr(bindings, "_FOUND", {})
    graph = traced(lambda x: torch.add(x, x), torch.randn(3))
    bind_ops(graph)

    assert torch.ops.aten.add.Tensor in {node.target for node in graph.nodes}


def test_binding_draws_no_random_numbers() -> None:
    graph = traced(lambda x: functional.dropout(x, 0.5, training=True), torch.randn(3))
    before = torch.get_rng_state()
    compile_graph(graph)

    assert torch.equal(before, torch.get_rng_state())


def test_a_graph_without_values_stays_as_it_is() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.neg.default, (x,)))

    assert torch.equal(torch.tensor([-1.0]), compile_graph(graph)(nn.Module(), torch.tensor([1.0])))


def summed(make: Callable[[Tensor, Tensor], Tensor], *, read_twice: bool = False) -> object:
    """What sums the value that `make` gives, once sums may be in place."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        made = make(x, weight)
        whole = COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(made, "sum", "tp"))
        return whole + made if read_twice else whole

    graph = traced(forward, torch.randn(2, 8), torch.randn(8, 8))
    reduce_in_place(graph)
    return next(n.target for n in graph.nodes if "all_reduce" in str(n.target))


def test_a_sum_overwrites_what_is_its_own_alone() -> None:
    assert in_place.all_reduce is summed(functional.linear)


@pytest.mark.parametrize(
    ("make", "twice"),
    [
        (functional.linear, True),
        (lambda x, w: x, False),
        (lambda x, w: x.view(4, 4), False),
        (lambda x, w: functional.dropout(x, 0.5, training=False), False),
        (lambda x, w: torch.ops.aten.type_as(x, w), False),
        (lambda x, w: x.contiguous(), False),
    ],
    ids=["read again", "an input", "a view", "a dropout that is off", "no cast", "no copy"],
)
def test_a_sum_copies_what_others_may_see(
    make: Callable[[Tensor, Tensor], Tensor], twice: bool
) -> None:
    assert COLLECTIVES.all_reduce.default is summed(make, read_twice=twice)
