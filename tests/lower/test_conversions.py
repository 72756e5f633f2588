"""Ops whose local form was wrong for some placements, each in a small model under random plans.

Random legal plans meet placements that no cheapest plan would choose.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.compiler import ModelCompiler
from autotp.options import read_request
from tests.random_plans import Case, outcome, prepared
from tests.toys import Running

Run = Callable[[Any, Tensor], Tensor]


def heads(model: Running, x: Tensor) -> Tensor:
    return model.up(x).unflatten(-1, (4, 8))  # (batch, seq, 4, 8)


def scalar_where(model: Running, x: Tensor) -> Tensor:
    """A partial sum beside a number: the number would count once a rank."""
    return torch.where(x > 0, model.down(model.up(x)), 3.0) * 2


def where_scalar(model: Running, x: Tensor) -> Tensor:
    return torch.where(x > 0, 3.0, model.down(model.up(x))) * 2


def matrix_transpose(model: Running, x: Tensor) -> Tensor:
    """`mT` exchanges the last two dims, not all."""
    h = heads(model, x).transpose(1, 2)
    return model.down(((h @ h.mT).softmax(-1) @ h).transpose(1, 2).flatten(2))


def squeezed_dim(model: Running, x: Tensor) -> Tensor:
    """A dim of size tp has size 1 on a rank, and must stay."""
    return model.down(model.up(x).unflatten(-1, (2, 16)).relu().squeeze(2).flatten(2))


def squeezed_all(model: Running, x: Tensor) -> Tensor:
    return model.down(model.up(x[:1]).unflatten(-1, (2, 16)).relu().squeeze().flatten(1))


def mask_of_two_dims(model: Running, x: Tensor) -> Tensor:
    mask = torch.arange(32).view(4, 8) % 3 == 0
    return heads(model, x)[:, :, mask] * 2


def repeats_counted(model: Running, x: Tensor) -> Tensor:
    return heads(model, x).repeat_interleave(3, 2, output_size=12).mean(2)


def table_with_an_inner_axis(model: Running, x: Tensor) -> Tensor:
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


def make_conversion(run: Run) -> tuple[Running, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Running(run), {"x": torch.randn(2, 5, 16)}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_random_plans_of_a_reviewed_model_equal_it(run: Run) -> None:
    model, inputs = make_conversion(run)
    work = ModelCompiler(model, read_request(example_inputs=inputs, training=False))
    found = [
        outcome(prepared(work, 2, training=training), Case(run.__name__, 2, training, seed))
        for training in (True, False)
        for seed in range(4)
    ]

    assert [] == [str(o) for o in found if not o.ok]
    assert max(o.worst for o in found) < 1e-9


class Sorted(nn.Module):
    """Words in the order of their ids, back in their own order: both orders come of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        _, order = torch.sort(ids.reshape(-1))
        x = self.head(self.words(ids).flatten(0, 1)[order])
        return torch.zeros_like(x).index_add(0, order, x)


def test_one_of_several_results_of_an_op_on_inputs_is_read_as_that_one() -> None:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(0, 32, (2, 5))}

    assert autotp.verify(Sorted(), 2, example_inputs=inputs, training=True).ok
