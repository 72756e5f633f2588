"""Toy modules written by hand that many tests share: an MLP, a stack of layers, fused attention.

A test that needs another forward derives from them and writes the forward alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MLP", "Bounded", "FusedAttention", "Running", "Stack", "Tokens", "batch", "vectors"]


class MLP(nn.Module):
    """Two linear layers, `up` and `down`, and `act` between them; no residual.

    MLP(24, 48)(torch.randn(2, 5, 24))  # (2, 5, 24)
    """

    def __init__(
        self,
        width: int = 16,
        hidden: int = 32,
        act: Callable[[Tensor], Tensor] = functional.gelu,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        """What every forward is made of, for those that do more."""
        return self.down(self.inner(self.up(x)))

    def inner(self, x: Tensor) -> Tensor:
        """What happens to the values between the two layers."""
        return self.act(x)


class Running(MLP):
    """An MLP and an embedding whose forward is `run(model, x)`, a function of a test's.

    Running(lambda model, x: model.down(model.up(x).relu()))
    """

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(16, 32)
        self.run = run
        self.table = nn.Embedding(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Stack(nn.Module):
    """Layers one after another, each added to its input where `residual`.

    Stack(MLP(), MLP(), residual=True)
    """

    def __init__(self, *layers: nn.Module, residual: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x


class FusedAttention(nn.Module):
    """A residual of causal attention whose queries, keys and values are one product.

    - `apart`: takes the product (batch, sequence, fused) apart into queries, keys and values, each
      (batch, sequence, heads, size); fewer key-value heads than queries' are repeated.
    - `fused`, `mixed`: the sizes of the product and of all heads together.
    """

    def __init__(
        self, apart: Callable[[Tensor], Sequence[Tensor]], width: int, fused: int, mixed: int
    ) -> None:
        super().__init__()
        self.apart = apart
        self.fused, self.out = nn.Linear(width, fused), nn.Linear(mixed, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attended(self.fused(x))

    def attended(self, fused: Tensor) -> Tensor:
        """The attention of the product, closed."""
        q, k, v = (part.transpose(1, 2) for part in self.apart(fused))
        if k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Tokens(nn.Module):
    """An embedding and a head, with a gelu between; options are those of the embedding."""

    def __init__(self, tokens: int = 24, width: int = 16, **options: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width, **options)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(functional.gelu(self.table(ids)))


class Bounded(nn.Module):
    """It asserts of its values what the sizes say, or raises an error of its own.

    Its asserts must stay as they are: pytest rewrites those in the files of tests.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        if self.how == "assert":
            assert lengths.size(0) == ids.shape[0]
            assert lengths.min().item() >= 3
        elif self.how == "raise":
            if lengths.min().item() < 3:
                raise ValueError(f"too short: {lengths}")
        elif lengths.min().item() < 3:
            ids = ids + 1
        return self.linear(self.words(ids))


def vectors(*sizes: int, seed: int = 1) -> dict[str, Tensor]:
    """The input `x` of such sizes, drawn by a seed."""
    return {"x": torch.randn(sizes, generator=torch.Generator().manual_seed(seed))}


def batch(size: int = 2, length: int = 5, width: int = 24) -> Tensor:
    """A batch of vectors, drawn by its sizes; what is drawn next is seeded by them, too."""
    torch.manual_seed(size * 100 + length)
    return torch.randn(size, length, width)
