"""How far the ranks' tensors are from the unsharded one, given the placement of a value.

A placement is a claim about the tensors of all ranks, forward and backward. The unsharded tensor is

             for values                   for gradients
    R        each                         each
    R~       each                         the sum
    P        the sum                      each
    S        the concatenation            the concatenation

The other kinds are not compared: their values or gradients depend on which ranks have copies (S~),
on two dims (SS) or on other values (G). The values computed from them are compared.

A gradient is thus placed as a value of the dual kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from autotp.algebra.placement import Kind
from autotp.algebra.split import Split
from autotp.dtypes import dtype_name
from autotp.errors import PlanError
from autotp.runtime.ops.blocks import concatenate_shards

Claim: TypeAlias = Literal["each", "sum", "concatenation"]
"""What equals the unsharded tensor: each rank's tensor, their sum, or their concatenation."""

CLAIMS: Mapping[Kind, Claim] = {"R": "each", "R~": "each", "P": "sum", "S": "concatenation"}
GRADIENT_KINDS: Mapping[Kind, Kind] = {"R": "R", "R~": "P", "P": "R", "S": "S"}
"""For each placement, that of the gradient."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from that of the unsharded model.

    - `absolute`: the largest difference; `relative`: that, divided by the largest expected value.
    - `expected`, `actual`: both values where they differ most; `rank`: which has it, -1 for all.
    - `reason`: why they cannot be compared; empty if they can.
    """

    absolute: float
    relative: float
    expected: float = math.nan
    actual: float = math.nan
    rank: int = -1
    reason: str = ""

    def __str__(self) -> str:
        """Both figures, in words."""
        if self.reason:
            return self.reason
        who = f"rank {self.rank} has" if self.rank >= 0 else "the ranks have"
        return (
            f"{who} {self.actual:.6g} where the unsharded model has {self.expected:.6g} "
            f"({self.relative:.1e} of the largest value)"
        )


def measure_difference(
    expected: Tensor, actual: Tensor, *, rank: int = -1, floor: float = 0.0
) -> Difference:
    """How far `actual` is from `expected`; NaN on one side only is infinitely far.

    - `floor`: the least divisor of a relative difference.
    """
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        sides = [f"{tuple(x.shape)} {dtype_name(x.dtype)}" for x in (expected, actual)]
        return Difference(
            math.inf,
            math.inf,
            rank=rank,
            reason=f"the unsharded model has {sides[0]}, the ranks have {sides[1]}",
        )
    if not expected.numel():
        return Difference(0.0, 0.0)
    first, second = _flatten(expected), _flatten(actual)
    gaps = (first - second).abs()
    gaps = gaps.masked_fill((first == second) | (first.isnan() & second.isnan()), 0.0)
    gaps = gaps.nan_to_num(math.inf, math.inf)
    at = int(gaps.argmax())
    worst = float(gaps[at])
    scale = max(float(first.abs().nan_to_num(0.0, 0.0).max()), floor)
    relative = worst / scale if scale else (math.inf if worst else 0.0)
    return Difference(worst, relative, float(first[at]), float(second[at]), rank)


def find_disagreement(
    expected: Tensor,
    shards: Sequence[Tensor],
    claim: Claim,
    dim: int = -1,
    split: tuple[int, ...] | None = None,
    *,
    floor: float = 0.0,
) -> Difference:
    """How far the tensors of the ranks are from `expected`, by a claim about them.

    - `split`: for a concatenation, the encoded split of `dim`.
    """
    if claim == "each":
        gaps = [
            measure_difference(expected, x, rank=rank, floor=floor) for rank, x in enumerate(shards)
        ]
        return max(gaps, key=lambda gap: gap.relative)
    try:
        if claim == "sum":
            actual = sum(shards[1:], shards[0])
        else:
            actual = concatenate_shards(shards, dim, Split.decode(split or ()))
    except (PlanError, RuntimeError) as error:
        reason = f"the ranks' tensors do not fit together: {error}"
        return Difference(math.inf, math.inf, reason=reason)
    return measure_difference(expected, actual, floor=floor)


def _flatten(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().double().flatten()
