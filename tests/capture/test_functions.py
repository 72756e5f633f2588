"""Functions whose backward is written by hand: kept or refused, never differentiated."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import autotp
from autotp.errors import CaptureError
from tests.toys import MLP, batch, vectors


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it had not."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(MLP):
    """A quantised model in training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Straight.apply(self.up(x)))


@pytest.mark.slow
def test_a_backward_written_by_hand_is_kept() -> None:
    model, inputs = Rounded(24, 48), {"x": batch()}
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    sharded(**inputs).sum().backward()
    model(**inputs).sum().backward()

    assert evidence.ok
    assert model.up.weight.grad.abs().max() > 0.1
    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)
    assert autotp.verify(Rounded(24, 48).eval(), 2, example_inputs=inputs).ok


class Clipped(torch.autograd.Function):
    """A product of two, and their sum, by a plain factor; gradients are clipped on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        x, y = ctx.saved_tensors
        product, total = (g.clamp(-0.5, 0.5) for g in gradients)
        return product * y * ctx.factor + total, None, product * x * ctx.factor + total


class Gated(MLP):
    """Two streams, by a function with two results."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        product, total = cast("tuple[Tensor, Tensor]", Clipped.apply(wide, 0.5, wide.sigmoid()))
        return self.down(product + total)


class Sized(torch.autograd.Function):
    """Takes a size that is free while a model is exported."""

    @staticmethod
    def forward(_: Any, x: Tensor, length: int) -> Tensor:
        return x.round() / length

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Averaged(MLP):
    """By a function of a size."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(cast("Tensor", Sized.apply(self.up(x), x.shape[1])))


class Drawing(torch.autograd.Function):
    """Rounds up or down at random, and passes the gradient on."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Writing(torch.autograd.Function):
    """Rounds in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rooted(torch.autograd.Function):
    """A root, which the random numbers that a function is tried on have none of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (4 * x.clamp(min=0.25)).sqrt()


class Bounded(MLP):
    """By a function that has no values for some numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(cast("Tensor", Rooted.apply(self.up(x).square() + 0.01)))


def test_a_function_that_gives_nan_for_random_numbers_draws_none() -> None:
    assert autotp.verify(Bounded(24, 48), 2, example_inputs={"x": batch()}, training=True).ok


@pytest.mark.parametrize(
    ("function", "reason"),
    [(Drawing, "it draws random numbers"), (Writing, "it (writes to its arguments|does not run)")],
)
def test_a_function_that_cannot_run_twice_is_refused(function: Any, reason: str) -> None:
    class Applying(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(function.apply(self.up(x) * 1))

    with pytest.raises(CaptureError, match=rf"{function.__name__} .*{reason}"):
        autotp.plan(Applying(24, 48), 2, example_inputs={"x": batch()}, training=True)


@pytest.mark.slow
def test_a_function_of_several_tensors_keeps_its_backward() -> None:
    model, inputs = Gated(24, 48), {"x": 3 * batch()}
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    (sharded(**inputs) ** 2).sum().backward()
    (model(**inputs) ** 2).sum().backward()

    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)
    assert autotp.verify(model, 2, example_inputs=inputs, training=True).ok


def test_a_function_of_a_free_size_is_refused_where_gradients_are_wanted() -> None:
    with pytest.raises(CaptureError, match=r"Sized .*Sized\.apply\(self\.up\(x\), x\.shape"):
        autotp.plan(Averaged(24, 48), 2, example_inputs={"x": batch()}, training=True)

    assert autotp.verify(Averaged(24, 48).eval(), 2, example_inputs={"x": batch()}).ok


class Cubed(torch.autograd.Function):
    """A backward by hand that is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x**2


class Curved(MLP):
    """By a power."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(cast("Tensor", Cubed.apply(self.up(x))))


def test_a_backward_by_hand_that_is_the_derivative_is_no_loss() -> None:
    evidence = autotp.verify(Curved(8, 16), 2, example_inputs=vectors(2, 3, 8), training=True)

    assert evidence.ok
    assert 0.0 < max(evidence.gradients.values()) < 1e-5
