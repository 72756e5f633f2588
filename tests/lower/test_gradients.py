"""Gradients that nobody asks for, and those that somebody does: what of them ranks exchange."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.compiler import ModelCompiler
from autotp.options import read_request
from tests.random_plans import Case, outcome, prepared
from tests.toys import MLP, Running, batch, vectors

Run = Callable[[Any, Tensor], Tensor]


class Frozen(Running):
    """Most of it is not trained."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.norm = nn.LayerNorm(16)
        for part in (self.norm.weight, self.up.weight, self.up.bias, self.down.bias):
            part.requires_grad_(False)


def normed(model: Frozen, x: Tensor) -> Tensor:
    return (x + model.down(model.up(model.norm(x)).relu())) * model.norm.bias


def without_gradient(model: Running, x: Tensor) -> Tensor:
    h = model.up(x)
    with torch.no_grad():
        gate = h.softmax(-1) * model.table.weight[0]
    return model.down(h * gate + torch.zeros_like(h) + h.new_ones(h.shape))


def regression(model: Running, x: Tensor) -> Tensor:
    """Its loss broadcasts prediction and target together, and the target is no one's function."""
    return nn.functional.mse_loss(model.down(model.up(x).relu()), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "run"), [(Frozen, normed), (Running, without_gradient), (Running, regression)]
)
def test_collectives_of_gradients_that_nobody_wants_are_not_counted(
    kind: type[Running], run: Run
) -> None:
    torch.manual_seed(0)
    work = ModelCompiler(
        kind(run), read_request(example_inputs={"x": torch.randn(2, 5, 16)}, training=True)
    )
    problem = prepared(work, 2, training=True)
    found = [outcome(problem, Case(run.__name__, 2, True, seed)) for seed in range(8)]

    assert [] == [str(o) for o in found if not o.ok]


def test_the_gradient_of_an_input_is_compared() -> None:
    model = Running(lambda model, x: model.down(model.up(x).relu()))
    inputs = {"x": vectors(2, 5, 16)["x"].requires_grad_()}
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert evidence.ok
    assert "input x" in evidence.gradients
    assert 1 == evidence.collectives_seen["backward all_reduce"]


class Silent(MLP):
    """Some parameters work without gradients only."""

    def __init__(self) -> None:
        super().__init__(24, 48)
        self.prompt, self.norm = nn.Parameter(torch.randn(5, 24)), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.up(self.norm(self.prompt))
        return self.down(self.up(x) * gate)


def test_a_parameter_that_gets_no_gradient_is_in_no_bucket() -> None:
    plan = autotp.plan(Silent(), 2, example_inputs={"x": batch()}, training=True)

    assert [] == [n for n, p in plan.parameters.items() if p.gradient_partial]
    assert autotp.verify(Silent(), 2, example_inputs={"x": batch()}, training=True).ok
