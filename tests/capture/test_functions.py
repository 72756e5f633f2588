"""What a second stranger broke: numbers that were wrong in silence; each right or refused since."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import CaptureError


class Mlp(nn.Module):
    """Two products; what is around them is up to the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def body(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batch(size: int = 2, length: int = 5) -> Tensor:
    torch.manual_seed(size * 100 + length)
    return torch.randn(size, length, 24)


class OneSentence(Mlp):
    """Treats a batch of 1 otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 3 if x.shape[0] == 1 else y


class OneWord(Mlp):
    """Treats a sequence of 1 otherwise, in other words."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.shape[1] - 1 else self.body(x) + 1


class OneInAll(Mlp):
    """Treats a single vector otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y - 1 if x.shape[0] * x.shape[1] in (1, 3) else y


class Squeezed(Mlp):
    """Drops dims of size 1, whichever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


@pytest.mark.parametrize("first", [(2, 5), (1, 5), (1, 1)])
@pytest.mark.parametrize("kind", [OneSentence, OneWord, OneInAll, Squeezed])
def test_a_size_of_1_takes_its_own_way(kind: type[Mlp], first: tuple[int, int]) -> None:
    model = kind().eval()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch(*first)})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1), (4, 3), (1, 3)]:
        x = batch(*sizes)
        torch.testing.assert_close(sharded(x), model(x))


def test_a_model_that_does_not_ask_has_one_graph_for_all_sizes() -> None:
    sharded = autotp.parallelize(Mlp().eval(), 1, example_inputs={"x": batch()})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1)]:
        sharded(batch(*sizes))
    assert 1 == len(sharded.variants)


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it had not."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(Mlp):
    """A quantised model in training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Straight.apply(self.up(x)))


def test_a_backward_written_by_hand_is_kept() -> None:
    model, inputs = Rounded(), {"x": batch()}
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    sharded(**inputs).sum().backward()
    model(**inputs).sum().backward()

    assert evidence.ok
    assert model.up.weight.grad.abs().max() > 0.1
    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)
    assert autotp.verify(Rounded().eval(), 2, example_inputs=inputs).ok


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


class Gated(Mlp):
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


class Averaged(Mlp):
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


class Bounded(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(cast("Tensor", Rooted.apply(self.up(x).square() + 0.01)))


def test_a_function_that_gives_nan_for_random_numbers_draws_none() -> None:
    assert autotp.verify(Bounded(), 2, example_inputs={"x": batch()}, training=True).ok


@pytest.mark.parametrize(
    ("function", "reason"),
    [(Drawing, "it draws random numbers"), (Writing, "it (writes to|does not run)")],
)
def test_a_function_that_cannot_run_twice_is_refused(function: Any, reason: str) -> None:
    class Applying(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(function.apply(self.up(x) * 1))

    with pytest.raises(CaptureError, match=rf"{function.__name__} .*{reason}"):
        autotp.plan(Applying(), 2, example_inputs={"x": batch()}, training=True)


def test_a_function_of_several_tensors_keeps_its_backward() -> None:
    model, inputs = Gated(), {"x": 3 * batch()}
    sharded = autotp.parallelize(model, 1, example_inputs=inputs, training=True)
    (sharded(**inputs) ** 2).sum().backward()
    (model(**inputs) ** 2).sum().backward()

    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)
    assert autotp.verify(model, 2, example_inputs=inputs, training=True).ok


def test_a_function_of_a_free_size_is_refused_where_gradients_are_wanted() -> None:
    with pytest.raises(CaptureError, match=r"Sized .*Sized\.apply\(self\.up\(x\), x\.shape"):
        autotp.plan(Averaged(), 2, example_inputs={"x": batch()}, training=True)

    assert autotp.verify(Averaged().eval(), 2, example_inputs={"x": batch()}).ok


class Words(nn.Module):
    """A table whose gradient depends on all words, or is sparse."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(24, 16, **options), nn.Linear(16, 24, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(functional.gelu(self.table(ids)))


def test_a_gradient_scaled_by_frequency_keeps_the_rows_whole() -> None:
    inputs = {"ids": torch.tensor([[0, 0, 1, 2], [2, 2, 13, 13]])}
    model = Words(scale_grad_by_freq=True)
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert evidence.ok
    rows = {"table.weight": "vocabulary"}
    with pytest.raises(autotp.PlanError, match="Possible for it are column"):
        autotp.plan(model, 2, example_inputs=inputs, training=True, overrides=rows)


def test_sparse_gradients_are_refused() -> None:
    inputs = {"ids": torch.tensor([[0, 1, 2]])}
    with pytest.raises(CaptureError, match="sparse=True"):
        autotp.plan(Words(sparse=True), 2, example_inputs=inputs, training=True)

    assert autotp.verify(Words(sparse=True).eval(), 2, example_inputs=inputs).ok


class Moody(Mlp):
    """Computes otherwise when it is captured than when it is called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.body(x) * (2 if self.calls > 1 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wrong_capture_is_told_whatever_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    Moody.calls = 0
    evidence = autotp.verify(Moody().to(dtype).eval(), 2, example_inputs={"x": batch().to(dtype)})

    assert not evidence.ok
    assert autotp.verify(Mlp().to(dtype), 2, example_inputs={"x": batch().to(dtype)}).ok


def doubled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


def doubled_before(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def doubled_in_place(_: nn.Module, __: Any, output: Tensor) -> None:
    output.mul_(2)


class Stacked(nn.Module):
    """Layers that become functions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("path", ["", "layers.0", "layers.1.up"])
@pytest.mark.parametrize("hook", [doubled, doubled_before, doubled_in_place])
def test_a_forward_hook_works_once(path: str, hook: Callable[..., Any]) -> None:
    model = Stacked().eval()
    before = hook is doubled_before
    module = model.get_submodule(path)
    (module.register_forward_pre_hook if before else module.register_forward_hook)(hook)
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()})

    torch.testing.assert_close(sharded(batch(3, 4)), model(batch(3, 4)))
    assert 1 == len(module._forward_hooks) + len(module._forward_pre_hooks)
    assert autotp.verify(model, 2, example_inputs={"x": batch()}).ok


@pytest.mark.parametrize(
    ("register", "named"),
    [
        (lambda m: m.down.register_full_backward_hook(print), "down has a backward hook"),
        (lambda m: m.up.weight.register_hook(print), "parameter up.weight"),
        (lambda m: m.up.bias.register_post_accumulate_grad_hook(print), "parameter up.bias"),
    ],
)
def test_backward_hooks_are_refused_where_gradients_are_wanted(
    register: Callable[[Any], object], named: str
) -> None:
    model = Mlp()
    register(model)
    with pytest.raises(CaptureError, match=named):
        autotp.plan(model, 2, example_inputs={"x": batch()}, training=True)

    assert autotp.plan(model, 2, example_inputs={"x": batch()}, training=False).pairs


class Optional(Mlp):
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
    model = Optional().eval()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()})

    torch.testing.assert_close(sharded(batch(), **constants), model(batch(), **constants))
    assert own == (2 == len(sharded.variants))


class Normed(Mlp):
    """Parts that are frozen by a mode of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(24), nn.Dropout(0.9)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.drop(self.norm(self.body(x).transpose(1, 2)).transpose(1, 2))
        return x if y is None else x + y


def frozen(model: nn.Module) -> nn.Module:
    model.train()
    model.get_submodule("norm").eval()
    model.get_submodule("drop").eval()
    return model


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


class Silent(Mlp):
    """Some parameters work without gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.norm = nn.Parameter(torch.randn(5, 24)), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.up(self.norm(self.prompt))
        return self.down(self.up(x) * gate)


def test_a_parameter_that_gets_no_gradient_is_in_no_bucket() -> None:
    plan = autotp.plan(Silent(), 2, example_inputs={"x": batch()}, training=True)

    assert [] == [n for n, p in plan.parameters.items() if p.gradient_partial]
    assert autotp.verify(Silent(), 2, example_inputs={"x": batch()}, training=True).ok


@pytest.mark.parametrize("path", ["up", "down"])
@pytest.mark.parametrize("name", ["weight_norm", "orthogonal"])
def test_a_weight_that_is_computed_from_others_is_planned(name: str, path: str) -> None:
    model = Mlp()
    getattr(parametrizations, name)(model.get_submodule(path))

    assert autotp.verify(model, 2, example_inputs={"x": batch()}, training=True).ok


def test_fewer_dims_are_another_variant() -> None:
    sharded = autotp.parallelize(Mlp().eval(), 1, example_inputs={"x": batch()})

    assert (5, 24) == sharded(batch()[0]).shape
    assert 2 == len(sharded.variants)


def test_a_first_call_inside_a_checkpoint_captures() -> None:
    model = Mlp()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch()}, training=True)
    one, other = batch().requires_grad_(), batch().requires_grad_()
    checkpoint(sharded, one, use_reentrant=False).sum().backward()
    model(other).sum().backward()

    assert 2 == len(sharded.variants)
    torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(sharded.up.weight.grad, model.up.weight.grad)


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


class Curved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(cast("Tensor", Cubed.apply(self.up(x))))


def test_a_backward_by_hand_that_is_the_derivative_is_no_loss() -> None:
    evidence = autotp.verify(Curved(), 2, example_inputs={"x": torch.randn(2, 3, 8)}, training=True)

    assert evidence.ok
    assert 0.0 < max(evidence.gradients.values()) < 1e-5


def test_what_a_call_left_on_a_module_is_no_hindrance() -> None:
    model, inputs = Mlp(), {"x": batch()}
    vars(model)["last"] = [model(**inputs)]
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert model.last[0].requires_grad
    assert evidence.ok
