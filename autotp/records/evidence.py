"""What `verify` found: figures, the tolerance they are held to and its reason; never a bare
bool.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Evidence"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The comparison of a sharded model, all ranks simulated, with the whole one.

    - `max_abs_error`: largest absolute difference of any output or the loss.
    - `max_rel_error`: largest absolute difference over largest absolute value of the whole model's
      tensor, over outputs and loss.
    - `gradients`: parameter name to the same relative error of its gradient; empty without
      training.
    - `collectives_predicted`, `collectives_seen`: `"phase kind"` (e.g. "forward all_reduce") to
      count.
    - `first_divergence`: where the first wrong node stands (node, module path, source line, both
      figures), None if none is wrong.
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
