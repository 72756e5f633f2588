"""A package of a user's: an op that autotp has no rule for, a model with it, and a factory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.toys import MLP

RULE = """
[[row]]
ops = ["shop_tests.tiled.default"]
rule = "... -> ..."
samples = ["real(4, 48)"]
"""


@torch.library.custom_op("shop_tests::tiled", mutates_args=())
def tiled(x: Tensor) -> Tensor:
    """The SiLU of `x` as a kernel that works on tiles of 16 features: with fewer it refuses."""
    if x.shape[-1] < 16:
        raise ValueError(f"{x.shape[-1]} features, and a tile has 16")
    return nn.functional.silu(x)


@tiled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return gradient * s * (1 + x * (1 - s))


tiled.register_autograd(_backward, setup_context=_save)


def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP(32, 64, torch.ops.shop_tests.tiled)


def inputs() -> Mapping[str, Tensor]:
    return {"x": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))}


def factory() -> tuple[nn.Module, Mapping[str, Tensor]]:
    return model(), inputs()
