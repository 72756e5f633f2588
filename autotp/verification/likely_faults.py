"""Infers the likely fault from wrong tensors on the ranks."""

from collections.abc import Sequence

from torch import Tensor

from autotp.algebra.placement import Kind
from autotp.verification.agreement import CLAIMS, Claim, find_disagreement, measure_difference


def explain_difference(
    expected: Tensor, shards: Sequence[Tensor], kind: Kind, tolerance: float, phase: str
) -> str:
    """The likely fault if the tensors of the ranks should be placed as `kind` and are not.

    Example: `"Their sum is right: a forward all-reduce is missing here"`.
    """
    if CLAIMS[kind] == "each":
        if _is_within(expected, shards, "sum", tolerance):
            return f"Their sum is right: a {phase} all-reduce is missing here"
        if any(measure_difference(shards[0], x).relative > tolerance for x in shards[1:]):
            return (
                f"The ranks disagree: a {phase} all-reduce is missing, or a shard is read as if "
                "it were the full tensor"
            )
        return f"All ranks agree on it: something counts {len(shards)} times, or not at all"
    if kind == "S":
        return "The shards are not those of the plan: a slice or a layout is wrong"
    if _is_within(expected, shards, "each", tolerance):
        return f"Every rank has the full value: summed, it counts {len(shards)} times"
    return f"The summands do not add up: something counts {len(shards)} times, or a shard is wrong"


def _is_within(expected: Tensor, shards: Sequence[Tensor], claim: Claim, tolerance: float) -> bool:
    return find_disagreement(expected, shards, claim).relative <= tolerance
