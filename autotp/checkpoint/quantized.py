"""Checkpoints whose weights are packed or scaled: known before anything is read.

A packed weight is one of several tensors (codes, scales, zero points), and the graph of such a
model holds kernels that no rule knows. So they are refused; or, where that is asked for and
Transformers can, each weight becomes what it stands for while it is read, by Transformers' own
converters: a rank reads the codes of its slice, and the scales that belong to them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.checkpoint.stored_tensor import StoredTensor
from autotp.errors import WeightsError
from autotp.model_source import import_transformers

__all__ = ["find_quantiser", "refuse_quantised_model", "refuse_packed_names", "drop_quantisation"]

_ADVICE: Final = (
    "Take the checkpoint before quantisation; or load this one with Transformers, call "
    "model.dequantize() where its method has it, save it with save_pretrained, and load that."
)
# how the methods name what belongs to a packed weight
_PACKED: Final = re.compile(
    r"(^|[._])(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|weight_zero_point"
    r"|input_scale|absmax|quant_map|nested_absmax|SCB|quant_state\..+)$"
)


def find_quantiser(where: object, fields: Mapping[str, Any], *, dequantise: bool = False) -> Any:
    """What turns quantised weights into plain ones, one of Transformers'; None if there are none.

    Raises WeightsError where a configuration, or one inside it, tells of a quantisation, and it is
    not to be undone, or cannot be.
    """
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        if found := cast("Mapping[str, Any]", part).get("quantization_config"):
            if dequantise and isinstance(found, Mapping):
                return _build_quantiser(where, found)
            raise WeightsError(
                f"{where}: is quantised ({_name_method(found)}), and tensor parallelism of packed "
                "weights is not there: 0 of its layers could be cut. Pass dequantize=True to have "
                f"plain weights made while they are read, where Transformers can. {_ADVICE}"
            )
    return None


def drop_quantisation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's fields, without what they tell of a quantisation, at any depth."""
    return {
        key: drop_quantisation(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping)
        else value
        for key, value in fields.items()
        if key != "quantization_config"
    }


def refuse_quantised_model(model: nn.Module) -> None:
    """Raises WeightsError for a model of Transformers that was loaded with packed weights."""
    if getattr(model, "is_quantized", False) is True:
        method = getattr(model, "quantization_method", "quantised")
        packed = [type(m).__name__ for m in model.modules() if _is_packed(m)]
        raise WeightsError(
            f"{type(model).__name__}: holds quantised weights ({getattr(method, 'value', method)}; "
            f"{len(packed)} modules, {', '.join(sorted(set(packed))[:3])}), whose kernels have no "
            "rules. Load it with autotp.from_pretrained(directory, dequantize=True); or call "
            "model.dequantize() before, where its method has it."
        )


def _is_packed(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(t.dtype.itemsize == 1 and t.dtype != torch.bool for t in own)


def refuse_packed_names(unknown: Iterable[str], tensors: Mapping[str, StoredTensor]) -> None:
    """Raises WeightsError where tensors that no parameter wants are named as packed weights are."""
    packed = [name for name in unknown if _PACKED.search(name)]
    if packed:
        raise WeightsError(
            f"{tensors[packed[0]].label}: is part of a quantised weight, as {len(packed)} tensors "
            f"by their names are; the configuration tells nothing of it. {_ADVICE}"
        )


def _build_quantiser(where: object, found: Mapping[str, Any]) -> Any:
    auto = import_transformers("quantizers.auto")
    named = f"{where}: is quantised ({_name_method(found)})"
    try:
        config = auto.AutoQuantizationConfig.from_dict(dict(found))
        config.dequantize = True
        made = auto.AutoHfQuantizer.from_config(config, pre_quantized=True)
        can = "dequantize" in made.get_load_operations()
    # whatever a method's own package raises where it is not installed, or cannot read its config
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"{named}, and Transformers refuses it: {type(error).__name__}: {reason}. Install what "
            f"it asks for. {_ADVICE}"
        ) from error
    if not can:
        raise WeightsError(
            f"{named}, and dequantize=True was given, but Transformers can undo 0 of its layers "
            f"while it loads. {_ADVICE}"
        )
    return made


def _name_method(found: Any) -> str:
    if not isinstance(found, Mapping):
        return repr(found)
    kind = found.get("quant_method") or found.get("quant_type")
    if kind is None and found.get("load_in_4bit"):
        kind = "4 bit"
    return str(kind or "by a method without a name")
