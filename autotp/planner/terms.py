"""What a placement problem depends on besides the program: machine, options, constraints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from autotp.algebra.partition import Offers
from autotp.algebra.placement import Placement
from autotp.options import Request
from autotp.records.plan import CacheRecord


class Constraint(Protocol):
    """The constraint of an override, or of a plan to follow, on one parameter."""

    def __call__(self, placement: Placement) -> bool:
        """Whether the parameter may take `placement`."""
        ...

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """The error message for when none of the `possible` placements is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the problem depends on besides the program.

    - `request`: the options of the caller: machine, threshold.
    - `priced`: the bytes of a (symbolic) tensor at the sizes that costs are estimated for;
      `summed`: the same in the dtype of sums over the group.
    - `everything`: also allow the conversions that the search leaves out (for random plans).
    - `allowed`: the constraint of each parameter that an override or a plan restricts.
    - `caches`: the placement that earlier calls gave each cache tensor, by path.
    - `offers`: what may be sharded besides the axes that tp divides.
    """

    tp: int
    training: bool
    request: Request
    priced: Callable[[torch.Tensor], int]
    summed: Callable[[torch.Tensor], int]
    allowed: Mapping[str, Constraint]
    everything: bool = False
    offers: Offers = Offers()  # noqa: RUF009  immutable
    caches: Mapping[str, CacheRecord] = field(default_factory=dict[str, CacheRecord])
