"""Checkpoints with quantised weights: recognised before anything is read.

A quantised weight is made of several tensors (codes, scales, zero points), and the graph of such a
model has kernels without rules. So these are refused; or, on request, dequantised while they are
read, by Transformers' own converters: a rank reads the codes of its slice, and their scales.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.checkpoint.stored_tensor import StoredTensor
from autotp.errors import WeightsError
from autotp.model_source import import_transformers

_ADVICE: Final = (
    "Use the checkpoint before quantisation; or load this one with Transformers, call "
    "model.dequantize() if its method has it, save it with save_pretrained, and load that."
)
# how quantisation methods name the tensors of a weight
_PACKED: Final = re.compile(
    r"(^|[._])(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|weight_zero_point"
    r"|input_scale|absmax|quant_map|nested_absmax|SCB|quant_state\..+)$"
)


def find_quantiser(where: object, fields: Mapping[str, Any], *, dequantise: bool = False) -> Any:
    """Find Transformers' quantiser for a configuration; None if its weights are not quantised.

    Raises WeightsError if they are, and must not or cannot be dequantised.
    """
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        if found := cast("Mapping[str, Any]", part).get("quantization_config"):
            if dequantise and isinstance(found, Mapping):
                return _build_quantiser(where, found)
            raise WeightsError(
                f"{where}: is quantised ({_name_method(found)}), and quantised weights cannot be "
                "sharded, so none of its layers can run tensor-parallel. Pass dequantize=True to "
                f"dequantise the weights while they are read, if Transformers can. {_ADVICE}"
            )
    return None


def drop_quantisation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the quantisation from a configuration's fields, at any depth."""
    return {
        key: drop_quantisation(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping)
        else value
        for key, value in fields.items()
        if key != "quantization_config"
    }


def refuse_quantised_model(model: nn.Module) -> None:
    """Raise WeightsError for a model of Transformers that was loaded with quantised weights."""
    if getattr(model, "is_quantized", False) is True:
        method = getattr(model, "quantization_method", "quantised")
        packed = [type(m).__name__ for m in model.modules() if _is_packed(m)]
        raise WeightsError(
            f"{type(model).__name__}: has quantised weights ({getattr(method, 'value', method)}; "
            f"{len(packed)} modules, {', '.join(sorted(set(packed))[:3])}), whose kernels have no "
            "rules. Load it with autotp.from_pretrained(directory, dequantize=True); or call "
            "model.dequantize() first, if its method has it."
        )


def _is_packed(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(t.dtype.itemsize == 1 and t.dtype != torch.bool for t in own)


def refuse_packed_names(unknown: Iterable[str], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise WeightsError if unknown tensors are named like those of quantised weights."""
    packed = [name for name in unknown if _PACKED.search(name)]
    if packed:
        raise WeightsError(
            f"{tensors[packed[0]].label}: is part of a quantised weight, as are {len(packed)} "
            f"tensors by their names, but the configuration has no quantization_config. {_ADVICE}"
        )


def _build_quantiser(where: object, found: Mapping[str, Any]) -> Any:
    auto = import_transformers("quantizers.auto")
    named = f"{where}: is quantised ({_name_method(found)})"
    try:
        config = auto.AutoQuantizationConfig.from_dict(dict(found))
        config.dequantize = True
        quantiser = auto.AutoHfQuantizer.from_config(config, pre_quantized=True)
        can = "dequantize" in quantiser.get_load_operations()
    # a method's own package may raise anything if it is missing, or cannot read its config
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(
            f"{named}, and Transformers rejects it: {type(error).__name__}: {reason}. Install what "
            f"it requires. {_ADVICE}"
        ) from error
    if not can:
        raise WeightsError(
            f"{named}, and dequantize=True was given, but Transformers can dequantise none of its "
            f"layers while they are loaded. {_ADVICE}"
        )
    return quantiser


def _name_method(found: Any) -> str:
    if not isinstance(found, Mapping):
        return repr(found)
    kind = found.get("quant_method") or found.get("quant_type")
    if kind is None and found.get("load_in_4bit"):
        kind = "4 bit"
    return str(kind or "by an unnamed method")
