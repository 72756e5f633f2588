"""In-place ops become functional where nobody can tell, and torch's help is asked for elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.capture.capture import capture
from autotp.capture.functionalize import functionalise_graph
from tests import models


class Acts(nn.Module):
    """A module whose forward is the function given, after a Linear."""

    def __init__(self, act: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = act

    def forward(self, x: torch.Tensor) -> object:
        return self.act(self.linear(x))


def chained(y: torch.Tensor) -> torch.Tensor:
    y += 1
    y.mul_(2).relu_()
    return y.view(-1).sin()


def masked(y: torch.Tensor) -> torch.Tensor:
    y.masked_fill_(y > 0, 3.0)
    return y + torch.zeros_like(y).index_put_((torch.tensor(0),), y[0])


def routed(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(y, 2)
    values /= values.sum(-1, keepdim=True)
    return values, indices


def promoted(y: torch.Tensor) -> torch.Tensor:
    half = y.half()
    half += y
    return half


def logical(y: torch.Tensor) -> torch.Tensor:
    positive = y > 0
    positive &= y < 1
    return positive


def view_read_before(y: torch.Tensor) -> torch.Tensor:
    total = y.view(-1, 8).sum()
    y.add_(1)
    return y + total


def view_read_later(y: torch.Tensor) -> torch.Tensor:
    view = y.view(-1, 8)
    y.add_(1)
    return view * 2


def base_read_later(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[:, 1:] = y[:, :-1]
    z[:, 0] = 0
    return z


def sibling_read_later(y: torch.Tensor) -> torch.Tensor:
    first, both = y.narrow(-1, 0, 4), y.transpose(0, 1)
    first.mul_(2)
    return both + 1


def same_object_in_disguise(y: torch.Tensor) -> torch.Tensor:
    other = nn.functional.dropout(y, 0.5, training=False)
    y.add_(1)
    return other * 2


PROVEN = [chained, masked, routed, promoted, logical, view_read_before]
UNPROVEN = [view_read_later, base_read_later, sibling_read_later]


@pytest.mark.parametrize("act", [*PROVEN, *UNPROVEN, same_object_in_disguise])
def test_equals_the_model(act: Callable[[torch.Tensor], object]) -> None:
    model = Acts(act).eval()
    program = capture(model, {"x": torch.randn(2, 6, 8)})
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        expected, actual = model(x), models.run_program(model, program, {"x": x})

    assert all(map(torch.equal, pytree.tree_leaves(expected), pytree.tree_leaves(actual)))
    assert not [
        n
        for n in program.graph.nodes
        if hasattr(n.target, "_schema") and n.target._schema.is_mutable
    ]


@pytest.mark.parametrize("act", PROVEN)
def test_proven_without_torch(
    act: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    program = capture(Acts(act).eval(), {"x": torch.randn(2, 6, 8)})

    assert program.dynamic


@pytest.mark.parametrize("act", UNPROVEN)
def test_unproven_says_why(act: Callable[[torch.Tensor], object]) -> None:
    exported = torch.export.export(Acts(act).eval(), (torch.randn(2, 6, 8),), strict=False)
    reason = functionalise_graph(exported.graph_module.graph)

    assert "changes memory that" in reason
    assert "reads later through" in reason


def test_the_twin_keeps_arguments_and_metadata() -> None:
    exported = torch.export.export(Acts(chained).eval(), (torch.randn(2, 6, 8),), strict=False)
    graph = exported.graph_module.graph
    reason = functionalise_graph(graph)
    names = [n.name for n in graph.nodes if n.op == "call_function"]

    assert "" == reason
    assert ["linear", "add", "mul", "relu", "view", "sin"] == names
    assert all("val" in n.meta for n in graph.nodes if n.op != "output")
