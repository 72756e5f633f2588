"""What each placement means: the ranks' parts of a whole tensor, and when parts are right.

Values are small whole numbers in floating point, so sums are exact and comparisons need no
tolerance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from autotp.algebra.placement import Kind
from autotp.algebra.split import Split
from autotp.runtime.ops.blocks import keep_first_copy, slice_block, write_block

__all__ = ["gradient_kind", "is_placed", "part", "whole"]


def whole(shape: Sequence[int], seed: int) -> Tensor:
    """A tensor of small whole numbers, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, tuple(shape), generator=generator).double()


def gradient_kind(kind: Kind) -> str:
    """How the gradient of a value of `kind` is placed, said as a value's kind.

    `S+` is split, and what several ranks hold comes in summands.
    """
    return {"R": "R", "R~": "P", "P": "R", "S": "S", "S~": "S+"}[kind]


def part(x: Tensor, kind: str, dim: int, split: Split, rank: int, world: int) -> Tensor:
    """What `rank` holds of `x`; summands are drawn at random."""
    if kind in ("S", "S~"):
        return slice_block(x, dim, split, rank, world).clone()
    if kind == "S+":
        return _summands(x, dim, split, world)[rank]
    if kind == "P":
        summands = [whole(x.shape, 100 + r) for r in range(1, world)]
        return [x - sum(summands), *summands][rank]
    return x.clone()


def _summands(x: Tensor, dim: int, split: Split, world: int) -> list[Tensor]:
    ranks = range(world)
    drawn = [slice_block(whole(x.shape, 100 + r), dim, split, r, world) for r in ranks]
    later = [n - keep_first_copy(n, dim, split, r, world) for r, n in enumerate(drawn)]
    rest = x - sum(write_block(n, dim, split, r, world) for r, n in enumerate(later))
    firsts = [
        keep_first_copy(slice_block(rest, dim, split, r, world), dim, split, r, world)
        for r in ranks
    ]
    return [first + n for first, n in zip(firsts, later, strict=True)]


def is_placed(x: Tensor, parts: Sequence[Tensor], kind: str, dim: int, split: Split) -> bool:
    """Whether the ranks' `parts` are `x` placed as `kind`."""
    if kind == "P":
        return torch.equal(x, torch.stack(list(parts)).sum(0))
    if kind == "S+":
        padded = [write_block(p, dim, split, rank, len(parts)) for rank, p in enumerate(parts)]
        return torch.equal(x, torch.stack(padded).sum(0))
    expected = [part(x, kind, dim, split, rank, len(parts)) for rank in range(len(parts))]
    return all(torch.equal(e, p) for e, p in zip(expected, parts, strict=True))
