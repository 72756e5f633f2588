"""Checkpoints whose weights are packed or scaled: known before anything is read, and refused.

A packed weight is one of several tensors (codes, scales, zero points) that must be cut together,
and its graph holds kernels that no rule knows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from autotp.checkpoint.stored import Stored
from autotp.errors import WeightsError

__all__ = ["refuse_configured", "refuse_named"]

_ADVICE: Final = (
    "Take the checkpoint before quantisation; or load this one with Transformers, call "
    "model.dequantize() where its method has it, save it with save_pretrained, and load that."
)
# how the methods name what belongs to a packed weight
_PACKED: Final = re.compile(
    r"(^|[._])(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|weight_zero_point"
    r"|input_scale|absmax|quant_map|nested_absmax|SCB|quant_state\..+)$"
)


def refuse_configured(where: object, fields: Mapping[str, Any]) -> None:
    """Raises WeightsError where a configuration, or one inside it, tells of a quantisation."""
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        if found := cast("Mapping[str, Any]", part).get("quantization_config"):
            raise WeightsError(
                f"{where}: is quantised ({_method(found)}), and tensor parallelism of packed "
                f"weights is not there: 0 of its layers could be cut. {_ADVICE}"
            )


def refuse_named(unknown: Iterable[str], tensors: Mapping[str, Stored]) -> None:
    """Raises WeightsError where tensors that no parameter wants are named as packed weights are."""
    packed = [name for name in unknown if _PACKED.search(name)]
    if packed:
        raise WeightsError(
            f"{tensors[packed[0]].label}: is part of a quantised weight, as {len(packed)} tensors "
            f"by their names are; the configuration tells nothing of it. {_ADVICE}"
        )


def _method(found: Mapping[str, Any]) -> str:
    kind = found.get("quant_method") or found.get("quant_type")
    if kind is None and found.get("load_in_4bit"):
        kind = "4 bit"
    return str(kind or "by a method without a name")
