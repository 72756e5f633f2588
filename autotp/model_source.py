"""A model from what names it: a module, a configuration, a directory, a preset or a factory.

    load("llama-3.1-8b")             a preset: a config.json that ships with autotp
    load("./checkpoints/mine")       a directory with a config.json; weights are not read
    load("package.module:factory")   whatever module the factory returns, or (module, inputs)

Models from a configuration are built on the meta device: planning needs shapes, never values.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.errors import PlanError

__all__ = [
    "read_config_fields",
    "load_model",
    "load_with_inputs",
    "list_presets",
    "find_presets",
    "import_transformers",
]

_SPECS: Final = "a directory with config.json, package.module:factory, or a preset"


def find_presets() -> Path:
    """The directory of the presets: in the package when installed, else in the checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "presets", here.parent / "examples" / "models"):
        if candidate.is_dir():
            return candidate
    raise PlanError(f"no presets found beside {here}. Reinstall autotp, or give {_SPECS}.")


def list_presets() -> list[str]:
    """The names of the presets, sorted."""
    return sorted(path.parent.name for path in find_presets().glob("*/config.json"))


def load_model(spec: object, *, device: str = "meta") -> nn.Module:
    """The module that `spec` names, on `device` if it is built here, in evaluation mode.

    Constraints:
    - A module is returned as it is, and so is what a factory returns.
    - Raises PlanError when the name is unknown, or a configuration is missing or broken.
    """
    return load_with_inputs(spec, device=device)[0]


def load_with_inputs(
    spec: object, *, device: str = "meta"
) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """The module that `spec` names, with the example inputs that its factory gave, if any."""
    if isinstance(spec, str) and ":" in spec and not Path(spec).is_dir():
        return _build_from_factory(spec)
    if isinstance(spec, nn.Module):
        return spec, None
    if isinstance(spec, Path) or (isinstance(spec, str) and Path(spec).is_dir()):
        return _build_from_config(_read_config(Path(spec)), str(spec), device), None
    if isinstance(spec, str):
        return _build_from_config(_read_config(_find_preset(spec)), spec, device), None
    if hasattr(spec, "to_dict"):
        return _build_from_config(spec, type(spec).__name__, device), None
    raise PlanError(f"model: {type(spec).__name__} names no model. Give a module, {_SPECS}.")


def _find_preset(name: str) -> Path:
    known = list_presets()
    if name in known:
        return find_presets() / name
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise PlanError(
        f"model {name!r}: no such directory or preset. {hint}Presets are {', '.join(known)}; "
        f"MODEL is {_SPECS}."
    )


def import_transformers(name: str = "") -> Any:
    """transformers, or a module of it, e.g. `core_model_loading`; PlanError if not installed."""
    library = _transformers()
    return importlib.import_module(f"{library.__name__}.{name}") if name else library


def read_config_fields(directory: Path) -> dict[str, Any]:
    """The fields of the config.json in `directory`, checked for a clear message."""
    path = directory / "config.json"
    try:
        fields: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"{directory}: it has no config.json. MODEL is {_SPECS}.") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read: {error}.") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise PlanError(
            f"{path}: {at}: {error.msg}. Restore the model's own config.json."
        ) from error
    if reason := _find_fault(fields):
        raise PlanError(f"{path}: {reason}. Restore the model's own config.json.")
    return cast("dict[str, Any]", fields)


def _read_config(directory: Path) -> Any:
    """The configuration in `directory`."""
    return _parse_config(directory / "config.json", read_config_fields(directory))


def _find_fault(fields: object) -> str:
    """Why a configuration cannot be used; empty when it can."""
    if not isinstance(fields, dict):
        return f"expected an object, found {type(fields).__name__}"
    items = cast("Mapping[str, object]", fields)
    if "model_type" not in items:
        return "missing key 'model_type'"
    names = items.get("architectures")
    if not names:
        return "missing key 'architectures', which names the model's class"
    if not isinstance(names, list) or not isinstance(cast("list[object]", names)[0], str):
        return f"'architectures' is {names!r}, and should be a list of one class's name"
    return ""


def _parse_config(path: Path, fields: dict[str, Any]) -> Any:
    kind = fields.pop("model_type")
    try:
        return _transformers().AutoConfig.for_model(kind, **fields)
    # transformers raises whatever its validators raise: it becomes the reason in our message
    except Exception as error:
        reason = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise PlanError(
            f"{path}: transformers refuses it (model_type {kind!r}): {reason}"
        ) from error


def _build_from_config(config: Any, where: str, device: str) -> nn.Module:
    names = getattr(config, "architectures", None) or []
    cls = getattr(_transformers(), names[0], None) if names else None
    if cls is None:
        what = f"architecture {names[0]!r} is unknown to it" if names else "it has no architectures"
        raise PlanError(
            f"{where}: {what}. Set config.architectures to a class of transformers "
            f"{_transformers().__version__}."
        )
    with torch.device(device):
        model: nn.Module = cls._from_config(config)
    return model.eval()


def _build_from_factory(spec: str) -> tuple[nn.Module, Mapping[str, Any] | None]:
    made = _import_factory(spec)()
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else (made, None)
    if len(parts) != 2:
        raise PlanError(
            f"model {spec!r}: the factory returned {len(parts)} values. "
            "It must return a torch.nn.Module, or a pair of one and its example inputs."
        )
    model, inputs = cast("Any", parts)
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model {spec!r}: the factory returned {type(model).__name__}. "
            "It must return a torch.nn.Module, or a pair of one and its example inputs."
        )
    return model, inputs


def _import_factory(spec: str) -> Callable[[], object]:
    module_name, _, name = spec.partition(":")
    if "" not in sys.path:
        # as `python -m` would: a factory usually lies in the working directory
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        raise PlanError(f"model {spec!r}: {error}. MODEL is {_SPECS}.") from error
    factory: Callable[[], object] | None = getattr(module, name, None)
    if not callable(factory):
        what = f"has no {name!r}" if factory is None else f"has {name!r}, which is not callable"
        raise PlanError(f"model {spec!r}: {module_name} {what}. MODEL is {_SPECS}.")
    return factory


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise PlanError(
            "a configuration is built by transformers, which is not installed. "
            "Run: pip install 'autotp[transformers]'."
        ) from error
