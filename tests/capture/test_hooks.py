"""Hooks on modules: those of the forward are in the graph once, others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError
from tests.toys import MLP, Stack, batch


def doubled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


def doubled_before(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def doubled_in_place(_: nn.Module, __: Any, output: Tensor) -> None:
    output.mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "layers.0", "layers.1.up"])
@pytest.mark.parametrize("hook", [doubled, doubled_before, doubled_in_place])
def test_a_forward_hook_works_once(path: str, hook: Callable[..., Any]) -> None:
    model = Stack(MLP(24, 48), MLP(24, 48), residual=True).eval()
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
    model = MLP(24, 48)
    register(model)
    with pytest.raises(CaptureError, match=named):
        autotp.plan(model, 2, example_inputs={"x": batch()}, training=True)

    assert autotp.plan(model, 2, example_inputs={"x": batch()}, training=False).pairs
