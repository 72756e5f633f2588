"""The result of `verify`: errors, the tolerance with its reason, and collectives."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """The comparison of a sharded model, with all ranks simulated, with the unsharded model.

    - `max_abs_error`: the largest absolute difference in any output or the loss.
    - `max_rel_error`: that difference divided by the largest absolute value of the unsharded
      model's tensor; the largest over outputs and loss.
    - `gradients`: parameter name to the same relative error of its gradient; empty without
      training.
    - `collectives_predicted`, `collectives_seen`: `"phase kind"` (e.g. "forward all_reduce") to
      count, as planned and as executed.
    - `first_divergence`: the first wrong node (name, module path, source line, both figures); None
      if all are right.
    """

    ok: bool
    tp: int
    max_abs_error: float
    max_rel_error: float
    tolerance: float
    tolerance_reason: str
    gradients: Mapping[str, float]
    collectives_predicted: Mapping[str, int]
    collectives_seen: Mapping[str, int]
    first_divergence: str | None
    replicated_fraction: float
    dtype: str
    notes: tuple[str, ...] = ()
