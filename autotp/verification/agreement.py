"""How far the ranks' tensors are from the whole one, given how a value lies over the ranks.

A placement is a claim about every rank's tensor, forward and backward:

             the values                   the gradients
    R        each is the whole            each is the whole
    R~       each is the whole            their sum is
    P        their sum is                 each is the whole
    S        joined they are              joined they are

Of the other kinds nothing is said here: what the values are, or the gradients, depends on which
ranks hold copies (S~), on two dims (SS) or on other values (G). What they become is compared.

A gradient thus lies as a value of the dual kind does.
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

__all__ = ["CLAIMS", "GRADIENT_KINDS", "Claim", "Difference", "measure_difference", "find_disagreement"]

Claim: TypeAlias = Literal["each", "sum", "join"]
"""Which tensor made from the ranks' own is the whole one: each of them, their sum, their join."""

CLAIMS: Mapping[Kind, Claim] = {"R": "each", "R~": "each", "P": "sum", "S": "join"}
GRADIENT_KINDS: Mapping[Kind, Kind] = {"R": "R", "R~": "P", "P": "R", "S": "S"}
"""How the gradient of a value lies."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from the whole model's.

    - `absolute`: the largest difference; `relative`: that over the largest value of the whole.
    - `whole`, `found`: both values where they differ most; `rank`: who found it, -1 for all.
    - `reason`: why they cannot be compared; empty when they can.
    """

    absolute: float
    relative: float
    whole: float = math.nan
    found: float = math.nan
    rank: int = -1
    reason: str = ""

    def __str__(self) -> str:
        """Both figures, in words."""
        if self.reason:
            return self.reason
        who = f"rank {self.rank} has" if self.rank >= 0 else "the ranks have"
        return (
            f"{who} {self.found:.6g} where the whole model has {self.whole:.6g} "
            f"({self.relative:.1e} of the largest value)"
        )


def measure_difference(
    whole: Tensor, found: Tensor, *, rank: int = -1, floor: float = 0.0
) -> Difference:
    """How far `found` is from `whole`; NaN on one side only is infinitely far.

    Constraints: what is smaller than `floor` everywhere is compared with `floor`.
    """
    if (whole.shape, whole.dtype) != (found.shape, found.dtype):
        sides = [f"{tuple(x.shape)} {dtype_name(x.dtype)}" for x in (whole, found)]
        return Difference(
            math.inf,
            math.inf,
            rank=rank,
            reason=f"the whole model has {sides[0]}, found {sides[1]}",
        )
    if not whole.numel():
        return Difference(0.0, 0.0)
    first, second = _flatten(whole), _flatten(found)
    gaps = (first - second).abs()
    gaps = gaps.masked_fill((first == second) | (first.isnan() & second.isnan()), 0.0)
    gaps = gaps.nan_to_num(math.inf, math.inf)
    at = int(gaps.argmax())
    worst = float(gaps[at])
    scale = max(float(first.abs().nan_to_num(0.0, 0.0).max()), floor)
    relative = worst / scale if scale else (math.inf if worst else 0.0)
    return Difference(worst, relative, float(first[at]), float(second[at]), rank)


def find_disagreement(
    whole: Tensor,
    parts: Sequence[Tensor],
    claim: Claim,
    dim: int = -1,
    split: tuple[int, ...] | None = None,
    *,
    floor: float = 0.0,
) -> Difference:
    """How far the ranks' `parts` are from `whole`, by a claim about them.

    Constraints: for "join", `split` is the flat form of how `dim` is cut.
    """
    if claim == "each":
        found = [
            measure_difference(whole, x, rank=rank, floor=floor) for rank, x in enumerate(parts)
        ]
        return max(found, key=lambda one: one.relative)
    try:
        total = (
            _sum_shards(parts)
            if claim == "sum"
            else concatenate_shards(parts, dim, Split.decode(split or ()))
        )
    except (PlanError, RuntimeError) as error:
        return Difference(math.inf, math.inf, reason=f"the ranks' parts do not fit: {error}")
    return measure_difference(whole, total, floor=floor)


def _sum_shards(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _flatten(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().double().flatten()
