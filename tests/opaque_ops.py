"""Opaque ops made of plain functions: torch.export sees one node, and no rule is about them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def opaque(
    name: str, function: Callable[..., Any], backward: Callable[..., Any] | None = None
) -> OpOverload:
    """The op `autotp_opaque::name`, which does what `function` does, gradients included.

    - `backward`: given the operands and the result's gradient, the operands' gradients.
    """
    op = torch.library.custom_op(f"autotp_opaque::{name}", function, mutates_args=())
    op.register_fake(function)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operands = inputs

    def back(ctx: Any, *given: Tensor) -> Any:
        if backward is not None:
            return backward(*ctx.operands, *given)
        return _recomputed(function, ctx.operands, given)

    op.register_autograd(back, setup_context=save)
    return getattr(torch.ops.autotp_opaque, name).default


def _recomputed(
    function: Callable[..., Any], operands: tuple[Any, ...], given: tuple[Tensor, ...]
) -> tuple[Any, ...]:
    """The operands' gradients, through the function itself."""
    flat = [_leaf(x) for x in operands]
    leaves = [x for item in flat for x in (item if isinstance(item, list) else [item])]
    asking = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    with torch.enable_grad():
        made = function(*flat)
        results = [made] if isinstance(made, Tensor) else list(made)
        pairs = [(y, g) for y, g in zip(results, given, strict=True) if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in pairs], asking, [g for _, g in pairs], materialize_grads=True
        )
    gradients = iter(found)
    return tuple(_gradient(x, gradients) for x in flat)


def _leaf(x: Any) -> Any:
    if isinstance(x, list) and x and isinstance(x[0], Tensor):
        return [_leaf(item) for item in x]
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.is_floating_point())


def _gradient(x: Any, gradients: Any) -> Any:
    if isinstance(x, list) and x and isinstance(x[0], Tensor):
        return [_gradient(item, gradients) for item in x]
    return next(gradients) if isinstance(x, Tensor) and x.requires_grad else None
