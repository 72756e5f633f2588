"""The model of a checkpoint without its weights: parameters on meta, buffers with values.

Buffers that are in no file (positions, frequencies) get their values from the model's own
initialisation, as in Transformers: parameters are marked as initialised, so that it sets the rest.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from math import nan
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from autotp.capture.source_model import list_meta_attributes
from autotp.errors import PlanError, WeightsError
from autotp.model_source import import_transformers, read_config_fields

_DONE: Final = "_is_hf_initialized"  # Transformers does not initialise what has this mark


def build_empty_model(
    directory: Path,
    *,
    dtype: torch.dtype | str | None = None,
    otherwise: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> nn.Module:
    """Build the model that a directory's configuration describes, on meta, in evaluation mode.

    - `dtype`: of the parameters; None: that of the configuration, or else `otherwise`.

    Raises PlanError for a configuration that names no class.
    """
    fields = read_config_fields(directory)
    config = _load_config(directory, fields, trust_remote_code, revision)
    for part in (config, config.get_text_config()):  # weights are read dequantised, or not at all
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    cls = _find_class(directory, fields, trust_remote_code, revision)
    chosen = _choose_dtype(dtype, config, otherwise)
    options: dict[str, Any] = {"dtype": chosen}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model = _build_on_meta(directory, cls, config, options)
    config.name_or_path = str(directory)
    _keep_float32_parameters(model, chosen)
    _load_generation_config(cast("Any", model), directory)
    _refuse_tensor_attributes(model)
    return model.eval()


def fill_buffers(model: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """Replace buffers by those in `loaded`, by name, and initialise all others.

    Raises WeightsError for a buffer that the model's own initialisation does not set.
    """
    for parameter in model.parameters():
        setattr(parameter, _DONE, True)
    unset: dict[str, Tensor] = {}
    for name, buffer in list(model.named_buffers()):
        real = loaded.get(name)
        if real is None:
            real = unset[name] = _make_unset(buffer)
        else:
            setattr(real, _DONE, True)
        _replace_buffer(model, buffer, real)
    cast("Any", model).initialize_weights()
    after = dict(model.named_buffers())
    for name in unset:
        if _is_unset(after[name]):
            raise WeightsError(
                f"buffer {name} {list(after[name].shape)} of {type(model).__name__}: none of its "
                "values is known: no file has it, and _init_weights does not set it. Set it in the "
                "model's _init_weights, or register it as persistent and save it."
            )


def set_meta_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace parameters by meta parameters of the dtypes in `dtypes`, by name; keep ties."""
    new: dict[int, nn.Parameter] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if name in dtypes and id(old) not in new:
            empty = torch.empty_like(old, dtype=dtypes[name], device="meta")
            new[id(old)] = nn.Parameter(empty, old.requires_grad)
    for module in model.modules():
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) in new:
                setattr(module, key, new[id(old)])


def _build_on_meta(directory: Path, cls: Any, config: Any, options: dict[str, Any]) -> nn.Module:
    """Build a model of a class from a configuration; PlanError where its code raises."""
    safe = getattr(import_transformers("initialization"), "meta_device_safe_creation_ops", None)
    try:
        with torch.device("meta"), safe() if safe else nullcontext():
            return cls._from_config(config, **options)
    # a model's own code may raise anything; it becomes the reason in the message
    except Exception as error:
        given = "".join(f" with {name}={value!r}" for name, value in options.items())
        raise PlanError(
            f"{directory}: {cls.__name__} cannot be built from config.json, of model_type "
            f"{config.model_type!r},{given}: {type(error).__name__}: {error}. Restore the model's "
            "own config.json, or give another attn_implementation."
        ) from error


def _load_config(
    directory: Path, fields: Mapping[str, Any], trusted: bool, revision: str | None
) -> Any:
    auto = import_transformers("models.auto.configuration_auto")
    kind = fields["model_type"]
    if kind not in auto.CONFIG_MAPPING and not trusted:
        raise PlanError(
            f"{directory}: model_type {kind!r} is none of the {len(auto.CONFIG_MAPPING.keys())} "
            "that Transformers has. Pass trust_remote_code=True if the directory has its own code "
            "and you trust it, or update Transformers."
        )
    try:
        return auto.AutoConfig.from_pretrained(
            str(directory), trust_remote_code=trusted, revision=revision or "main"
        )
    # validators may raise anything; it becomes the reason in the message
    except Exception as error:
        raise PlanError(f"{directory}/config.json: Transformers rejects it: {error}") from error


def _find_class(
    directory: Path, fields: Mapping[str, Any], trusted: bool, revision: str | None
) -> Any:
    name = fields["architectures"][0]
    entries = cast("dict[str, str]", fields.get("auto_map") or {})
    own = next((ref for ref in entries.values() if str(ref).rpartition(".")[2] == name), None)
    if own is not None and trusted:
        dynamic = import_transformers("dynamic_module_utils")
        return dynamic.get_class_from_dynamic_module(own, str(directory), revision=revision)
    library = import_transformers()
    cls: object = getattr(library, name, None)
    if cls is not None and not hasattr(cls, "_from_config"):
        raise PlanError(
            f"{directory}: architecture {name!r} is not a model class of Transformers, but a "
            f"{type(cls).__name__}. Set config.architectures to the class that was saved."
        )
    if cls is None:
        what = "pass trust_remote_code=True if you trust the code there" if own else "update it"
        raise PlanError(
            f"{directory}: architecture {name!r} is unknown to Transformers "
            f"{library.__version__}; {what}, or set config.architectures to a class that it has."
        )
    return cls


def _choose_dtype(
    given: torch.dtype | str | None, config: object, otherwise: torch.dtype
) -> torch.dtype:
    chosen: object = given if given not in (None, "auto") else getattr(config, "dtype", None)
    found: object = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    if found is None and chosen is None:
        return otherwise
    if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1:
        return found
    raise PlanError(
        f"dtype={chosen!r}: weights cannot be of it. Give torch.float32, float16 or bfloat16, "
        "or None for the dtype of the configuration."
    )


def _keep_float32_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Make those parameters float32 that the model's class keeps in float32."""
    plan: dict[str, torch.dtype] = cast("Any", model)._get_dtype_plan(dtype)
    if not plan:
        return
    loading = import_transformers("core_model_loading")
    pattern, by_group, _ = loading.build_glob_alternation(list(plan))
    dtypes: dict[str, torch.dtype] = {}
    for name, _ in model.named_parameters():
        if found := pattern.search(name):
            dtypes[name] = plan[by_group[found.lastgroup]]
    set_meta_dtypes(model, dtypes)


def _load_generation_config(model: Any, directory: Path) -> None:
    if model.can_generate() and (directory / "generation_config.json").is_file():
        generation = import_transformers("generation")
        try:
            model.generation_config = generation.GenerationConfig.from_pretrained(str(directory))
        # validators may raise anything
        except Exception as error:
            raise PlanError(
                f"{directory}/generation_config.json: Transformers rejects it: "
                f"{type(error).__name__}: {error}. Restore the model's own, or remove it: "
                "generate() then follows config.json."
            ) from error


def _refuse_tensor_attributes(model: nn.Module) -> None:
    for name, tensor in list_meta_attributes(model):
        raise WeightsError(
            f"{name} {list(tensor.shape)} of {type(model).__name__}: is neither a parameter nor a "
            "buffer, so that none of its values is in a checkpoint. Make it a buffer."
        )


def _replace_buffer(model: nn.Module, old: Tensor, new: Tensor) -> None:
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer is old:
                setattr(module, key, new)


def _make_unset(buffer: Tensor) -> Tensor:
    """Make a tensor like a buffer, filled with a value that no initialisation sets."""
    if buffer.dtype == torch.bool:  # bytes that are neither True nor False
        return torch.full(buffer.shape, 255, dtype=torch.uint8, device="cpu").view(torch.bool)
    return torch.full(
        buffer.shape, _choose_unset_value(buffer.dtype), dtype=buffer.dtype, device="cpu"
    )


def _is_unset(buffer: Tensor) -> bool:
    if buffer.numel() == 0:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(torch.isnan(buffer).all())
    numbers = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
    return bool((numbers == _choose_unset_value(numbers.dtype)).all())


def _choose_unset_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return nan
    numbers = torch.iinfo(dtype)
    return numbers.min or numbers.max  # 0 would be a value like any other
