"""What a placement problem depends on besides the program: the terms under which it is posed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from autotp.algebra.partition import Offers
from autotp.algebra.placement import Placement
from autotp.options import Request
from autotp.records.plan import CacheRecord

__all__ = ["Constraint", "Terms"]


class Constraint(Protocol):
    """What an override, or a plan to follow, leaves to one parameter."""

    def __call__(self, placement: Placement) -> bool:
        """Whether the parameter may take `placement`."""
        ...

    def explain_refusal(self, possible: Sequence[Placement]) -> str:
        """Why none of the `possible` placements is left: what to tell the one who asked."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What the problem depends on besides the program.

    - `request`: what the caller asked for: machine, threshold.
    - `priced`: bytes of a (symbolic) tensor at the sizes priced for; `summed`: the same where it is
      summed over the group.
    - `everything`: the conversions that the search leaves out are open too (for random plans).
    - `allowed`: parameter name to the placements that an override or a plan leaves it.
    - `caches`: how tensors of a cache lie already, by path: calls before this one made them so.
    - `offers`: what may be cut beyond the axes that tp divides.
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
