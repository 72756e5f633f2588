"""The name of a dtype, and the dtype in which sums over the group are made: one answer for plan,
graph, ranks and simulator.
"""

from collections.abc import Mapping

import torch

from autotp.errors import PlanError

__all__ = ["check_sums", "dtype_name", "sum_dtype"]


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype as plans write it, without `torch.`, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def sum_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which values of `own` are summed where sums are `wanted` in one, or in none.

    sum_dtype(torch.bfloat16, torch.float32)  # torch.float32
    sum_dtype(torch.float64, torch.float32)   # torch.float64: a sum never loses digits

    Constraints: whole numbers are summed as they are.
    """
    if wanted is None or not (own.is_floating_point or own.is_complex):
        return own
    return torch.promote_types(own, wanted)


def check_sums(parameters: Mapping[str, torch.Tensor], wanted: torch.dtype | None) -> None:
    """Raises PlanError if sums are `wanted` in a dtype that does not hold all that one of the
    `parameters` does.
    """
    if wanted is None:
        return
    for name, tensor in parameters.items():
        if tensor.is_floating_point() and sum_dtype(tensor.dtype, wanted) != wanted:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            raise PlanError(
                f"option reduce_dtype: {dtype_name(wanted)} does not hold all values of "
                f"{dtype_name(tensor.dtype)}, which {name} has. Give a wider one, such as "
                f"{dtype_name(wide)!r}, or None for the values' own."
            )
