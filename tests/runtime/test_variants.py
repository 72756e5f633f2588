"""A variant a kind of call: which calls share one, which get one of their own, and how."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotp
from tests.toys import MLP, Running, batch, vectors


class Optional(MLP):
    """Takes constants, with defaults that are no None, and whatever else."""

    def forward(
        self,
        x: Tensor,
        scale: float | None = 2.0,
        use_cache: bool | None = True,
        return_dict: bool = False,
        **others: Any,
    ) -> Tensor:
        y = self.body(x) * (scale or 3)
        y = y + 1 if use_cache else y
        y = y + 5 if return_dict else y
        return y - 7 if "more" in others else y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constants", "own"),
    [
        ({}, False),
        ({"scale": None}, True),
        ({"scale": 2.0}, False),
        ({"use_cache": True}, False),
        ({"use_cache": False}, True),
        ({"use_cache": None}, True),
        ({"return_dict": True}, True),
        ({"more": None}, True),
    ],
)
def test_an_argument_is_left_out_only_where_it_says_what_holds_anyway(
    constants: dict[str, Any], own: bool
) -> None:
    model = Optional(24, 48).eval()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()})

    torch.testing.assert_close(sharded(batch(), **constants), model(batch(), **constants))
    assert own == (2 == len(sharded.variants))


class Normed(MLP):
    """Parts that are frozen by a mode of their own."""

    def __init__(self) -> None:
        super().__init__(24, 48)
        self.norm, self.drop = nn.BatchNorm1d(24), nn.Dropout(0.9)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.drop(self.norm(self.body(x).transpose(1, 2)).transpose(1, 2))
        return x if y is None else x + y


def frozen(model: nn.Module) -> nn.Module:
    model.train()
    model.get_submodule("norm").eval()
    model.get_submodule("drop").eval()
    return model


@pytest.mark.slow
def test_parts_keep_their_own_mode_in_every_variant() -> None:
    model = frozen(Normed())
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()}, training=True)
    x, y = batch(), batch(2, 5) + 1

    torch.testing.assert_close(sharded(x), model(x))
    torch.testing.assert_close(sharded(x, y), model(x, y))
    torch.testing.assert_close(sharded.eval()(x, y), model.eval()(x, y))
    torch.testing.assert_close(frozen(sharded)(x, y), frozen(model)(x, y))
    assert "x · train, norm eval, drop eval" == next(iter(sharded.variants))
    assert 3 == len(sharded.variants)


@pytest.mark.slow
def test_fewer_dims_are_another_variant() -> None:
    sharded = autotp.parallelize(MLP(24, 48).eval(), 1, example_inputs={"x": batch()})

    assert (5, 24) == sharded(batch()[0]).shape
    assert 2 == len(sharded.variants)


@pytest.mark.slow
def test_a_first_call_inside_a_checkpoint_captures() -> None:
    model = MLP(24, 48)
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()}, training=True)
    one, other = batch().requires_grad_(), batch().requires_grad_()
    checkpoint(sharded, one, use_reentrant=False).sum().backward()
    model(other).sum().backward()

    assert 2 == len(sharded.variants)
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)


def scaled(model: Running, x: Tensor) -> Tensor:
    return model.down(model.up(x).relu()) * torch.tensor([2.0, 3.0], device=x.device).mean()


@pytest.mark.slow
def test_a_variant_first_called_without_gradients_takes_an_input_that_requires_them() -> None:
    model, inputs = Running(scaled), vectors(2, 5, 16)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    x = inputs["x"].requires_grad_()
    with torch.no_grad():
        sharded(x)
    sharded(x).sum().backward()
    (expected,) = torch.autograd.grad(model(x).sum(), [x])

    torch.testing.assert_close(x.grad, expected)


@pytest.mark.slow
def test_a_variant_is_captured_where_the_model_was() -> None:
    """Shards, and so inputs, may be on another device than the model that was given."""
    model, inputs = Running(scaled), vectors(2, 5, 16)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    sharded.prepare(x=inputs["x"].to("meta").requires_grad_())

    assert 2 == len(sharded.variants)
