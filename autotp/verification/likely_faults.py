"""What wrong tensors on the ranks look like: the likely fault, in words."""

from collections.abc import Sequence

from torch import Tensor

from autotp.algebra.placement import Kind
from autotp.verification.agreement import CLAIMS, Claim, find_disagreement, measure_difference

__all__ = ["explain_difference"]


def explain_difference(
    whole: Tensor, parts: Sequence[Tensor], kind: Kind, tolerance: float, phase: str
) -> str:
    """The likely fault when the ranks' `parts` should lie as `kind` and do not.

    Example: `"Their sum is right: a forward all-reduce is missing here"`.
    """
    if CLAIMS[kind] == "each":
        if _is_within(whole, parts, "sum", tolerance):
            return f"Their sum is right: a {phase} all-reduce is missing here"
        if any(measure_difference(parts[0], part).relative > tolerance for part in parts[1:]):
            return (
                f"The ranks disagree: a {phase} all-reduce is missing, or a part is read as whole"
            )
        return f"All ranks agree on it: something counts {len(parts)} times, or not at all"
    if kind == "S":
        return "The parts are not those that the plan gives the ranks: a wrong slice or layout"
    if _is_within(whole, parts, "each", tolerance):
        return f"Every rank has it in full: summed, it counts {len(parts)} times"
    return f"The parts do not add up: something counts {len(parts)} times, or is the wrong part"


def _is_within(whole: Tensor, parts: Sequence[Tensor], claim: Claim, tolerance: float) -> bool:
    return find_disagreement(whole, parts, claim).relative <= tolerance
