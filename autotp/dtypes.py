"""The name of a dtype, and the dtype of sums over the group: the same for plan, graph, ranks and
simulator.
"""

from collections.abc import Mapping

import torch

from autotp.errors import PlanError


def dtype_name(dtype: torch.dtype | str) -> str:
    """Name a dtype as plans do, without `torch.`, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def choose_sum_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Give the dtype in which values of dtype `own` are summed over ranks.

    - `wanted`: the requested dtype of sums; None: that of the values.

    sum_dtype(torch.bfloat16, torch.float32)  # torch.float32
    sum_dtype(torch.float64, torch.float32)   # torch.float64: a sum loses no precision

    Integers are summed in their own dtype.
    """
    if wanted is None or not (own.is_floating_point or own.is_complex):
        return own
    return torch.promote_types(own, wanted)


def check_sums(parameters: Mapping[str, torch.Tensor], wanted: torch.dtype | None) -> None:
    """Raise PlanError if sums in dtype `wanted` would lose precision for one of `parameters`."""
    if wanted is None:
        return
    for name, tensor in parameters.items():
        if tensor.is_floating_point() and choose_sum_dtype(tensor.dtype, wanted) != wanted:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            raise PlanError(
                f"option reduce_dtype: {dtype_name(wanted)} cannot represent all values of "
                f"{dtype_name(tensor.dtype)}, the dtype of {name}. Give a wider one, such as "
                f"{dtype_name(wide)!r}, or None for the values' own dtype."
            )
