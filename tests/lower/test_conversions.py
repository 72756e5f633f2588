"""Faults found in review, each by a small model that runs right only where its kind is mended.

Each model runs under random legal plans, which meet placements that no cheapest plan would choose.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.compiler import Work
from autotp.options import Options
from tests.random_plans import Case, outcome, prepared


class Block(nn.Module):
    """A column layer, a row layer, a table; `run` is what a test does with them."""

    def __init__(self, run: "Run") -> None:
        super().__init__()
        self.run = run
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.table = nn.Embedding(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


Run = Callable[[Any, Tensor], Tensor]


def heads(model: Block, x: Tensor) -> Tensor:
    return model.up(x).unflatten(-1, (4, 8))  # (batch, seq, 4, 8)


def scalar_where(model: Block, x: Tensor) -> Tensor:
    """A partial sum beside a number: the number would count once a rank."""
    return torch.where(x > 0, model.down(model.up(x)), 3.0) * 2


def where_scalar(model: Block, x: Tensor) -> Tensor:
    return torch.where(x > 0, 3.0, model.down(model.up(x))) * 2


def matrix_transpose(model: Block, x: Tensor) -> Tensor:
    """`mT` exchanges the last two dims, not all."""
    h = heads(model, x).transpose(1, 2)
    return model.down(((h @ h.mT).softmax(-1) @ h).transpose(1, 2).flatten(2))


def squeezed_dim(model: Block, x: Tensor) -> Tensor:
    """A dim of size tp has size 1 on a rank, and must stay."""
    return model.down(model.up(x).unflatten(-1, (2, 16)).relu().squeeze(2).flatten(2))


def squeezed_all(model: Block, x: Tensor) -> Tensor:
    return model.down(model.up(x[:1]).unflatten(-1, (2, 16)).relu().squeeze().flatten(1))


def mask_of_two_dims(model: Block, x: Tensor) -> Tensor:
    mask = torch.arange(32).view(4, 8) % 3 == 0
    return heads(model, x)[:, :, mask] * 2


def repeats_counted(model: Block, x: Tensor) -> Tensor:
    return heads(model, x).repeat_interleave(3, 2, output_size=12).mean(2)


def table_with_an_inner_axis(model: Block, x: Tensor) -> Tensor:
    """Cut along the minor factor of its rows, a table's shard is no range of them."""
    ids = (x.detach()[..., 0].abs() * 3).long() % 16
    scores = nn.functional.linear(x, model.table.weight[:, :16]).unflatten(-1, (4, 4))
    return model.down(model.table(ids) + model.up(x) * scores.softmax(-2).sum((-1, -2))[..., None])


RUNS: list[Run] = [
    scalar_where,
    where_scalar,
    matrix_transpose,
    squeezed_dim,
    squeezed_all,
    mask_of_two_dims,
    repeats_counted,
    table_with_an_inner_axis,
]


def made(run: Run) -> tuple[Block, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Block(run), {"x": torch.randn(2, 5, 16)}


@pytest.mark.parametrize("run", RUNS)
def test_random_plans_of_a_reviewed_model_equal_it(run: Run) -> None:
    model, inputs = made(run)
    work = Work(model, Options(example_inputs=inputs, training=False))
    found = [
        outcome(prepared(work, 2, training=training), Case(run.__name__, 2, training, seed))
        for training in (True, False)
        for seed in range(4)
    ]

    assert [] == [str(o) for o in found if not o.ok]
    assert max(o.worst for o in found) < 1e-9


# ── gradients that nobody asks for ───────────────────────────────────────────────────────────────


class Frozen(Block):
    """Most of it is not trained."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.norm = nn.LayerNorm(16)
        for part in (self.norm.weight, self.up.weight, self.up.bias, self.down.bias):
            part.requires_grad_(False)


def normed(model: Frozen, x: Tensor) -> Tensor:
    return (x + model.down(model.up(model.norm(x)).relu())) * model.norm.bias


def without_gradient(model: Block, x: Tensor) -> Tensor:
    h = model.up(x)
    with torch.no_grad():
        gate = h.softmax(-1) * model.table.weight[0]
    return model.down(h * gate + torch.zeros_like(h) + h.new_ones(h.shape))


def regression(model: Block, x: Tensor) -> Tensor:
    """Its loss broadcasts prediction and target together, and the target is no one's function."""
    return nn.functional.mse_loss(model.down(model.up(x).relu()), x)


@pytest.mark.parametrize(
    ("kind", "run"), [(Frozen, normed), (Block, without_gradient), (Block, regression)]
)
def test_collectives_of_gradients_that_nobody_wants_are_not_counted(
    kind: type[Block], run: Run
) -> None:
    torch.manual_seed(0)
    work = Work(kind(run), Options(example_inputs={"x": torch.randn(2, 5, 16)}, training=True))
    problem = prepared(work, 2, training=True)
    found = [outcome(problem, Case(run.__name__, 2, True, seed)) for seed in range(8)]

    assert [] == [str(o) for o in found if not o.ok]


def test_the_gradient_of_an_input_is_compared() -> None:
    model, inputs = made(lambda model, x: model.down(model.up(x).relu()))
    inputs["x"].requires_grad_()
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert evidence.ok
    assert "input x" in evidence.gradients
    assert 1 == evidence.collectives_seen["backward all_reduce"]


# ── further variants ─────────────────────────────────────────────────────────────────────────────


def scaled(model: Block, x: Tensor) -> Tensor:
    return model.down(model.up(x).relu()) * torch.tensor([2.0, 3.0], device=x.device).mean()


def test_a_variant_first_called_without_gradients_takes_an_input_that_requires_them() -> None:
    model, inputs = made(scaled)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    x = inputs["x"].requires_grad_()
    with torch.no_grad():
        sharded(x)
    sharded(x).sum().backward()
    (expected,) = torch.autograd.grad(model(x).sum(), [x])

    torch.testing.assert_close(x.grad, expected)


def test_a_variant_is_captured_where_the_model_was() -> None:
    """Shards, and so inputs, may be on another device than the model that was given."""
    model, inputs = made(scaled)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    sharded.prepare(x=inputs["x"].to("meta").requires_grad_())

    assert 2 == len(sharded.variants)
