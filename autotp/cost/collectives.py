"""The bytes and time of collectives, and the memory of training state: exact integers, no floats.

In a ring over tp ranks, each rank sends, for a payload of N bytes (the largest tensor on a rank):

    all-gather (N: its result), reduce-scatter (N: its input), all-to-all    N (tp-1)/tp
    all-reduce (N: its tensor)                                              2N (tp-1)/tp

An all-reduce costs exactly one reduce-scatter and one all-gather, in bytes and in time: if each
formula were rounded separately, rounding would decide between the two equivalent forms.
"""

from collections.abc import Mapping
from typing import Final

from autotp.cost.machine import Machine
from autotp.errors import PlanError

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

OPTIMIZER_STATES: Final[Mapping[str, int]] = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
"""The number of state tensors that each optimizer keeps per parameter."""

_PASSES: Final[Mapping[str, int]] = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_reduce": 2,
}
_PS_PER_SECOND: Final = 10**12


def count_wire_bytes(kind: str, payload: int, tp: int) -> int:
    """Count the bytes that one rank sends in a collective of `payload` bytes, rounded up.

    count_wire_bytes("all_reduce", 16_777_216, 2) == 16_777_216
    """
    return _PASSES[kind] * _divide_up(payload * (tp - 1), tp)


def estimate_time_ps(kind: str, payload: int, tp: int, machine: Machine) -> int:
    """Estimate the picoseconds of a collective of `payload` bytes over `tp` ranks of `machine`.

    Constraints: each pass is rounded up once; an all-reduce is two passes; a group of one rank
    costs nothing.
    """
    if tp == 1:
        return 0
    link = machine.find_link(tp)
    moving = _divide_up(payload * (tp - 1) * _PS_PER_SECOND, tp * link.bytes_per_second)
    return _PASSES[kind] * (link.latency_ps + moving)


def count_dtype_bytes(dtype: str) -> int:
    """Count the bytes per element of `dtype`, a name such as "bfloat16" or "torch.bfloat16".

    Raises PlanError for an unknown name.
    """
    size = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if size is None:
        known = ", ".join(DTYPE_BYTES)
        raise PlanError(f"dtype {dtype!r} has no known size. The known dtypes are {known}.")
    return size


def estimate_memory_bytes(
    parameters: Mapping[str, int],
    optimizer: str = "adamw",
    state_dtype: str | None = None,
    *,
    training: bool = True,
) -> dict[str, int]:
    """Estimate the bytes of "parameters", "gradients" and "optimizer" state.

    - `parameters`: dtype name to the bytes of the parameters of that dtype.

    estimate_memory_bytes({"bfloat16": 14 * 10**9})["optimizer"] == 28 * 10**9

    Constraints:
    - A gradient has its parameter's dtype; without `training` there is neither gradient nor state.
    - States have `state_dtype`, by default the parameter's own dtype. If the two differ, the
      optimizer also keeps a master copy of the parameter in `state_dtype`.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise PlanError(
            f"optimizer {optimizer!r} is unknown. The known optimizers are "
            f"{', '.join(OPTIMIZER_STATES)}."
        )
    total = sum(parameters.values())
    states = sum(_count_state_bytes(d, n, optimizer, state_dtype) for d, n in parameters.items())
    return {
        "parameters": total,
        "gradients": total if training else 0,
        "optimizer": states if training else 0,
    }


def _count_state_bytes(dtype: str, size: int, optimizer: str, state_dtype: str | None) -> int:
    own, wanted = count_dtype_bytes(dtype), count_dtype_bytes(state_dtype or dtype)
    states = OPTIMIZER_STATES[optimizer]
    master = 1 if states and own != wanted else 0
    return size // own * wanted * (states + master)


def _divide_up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
