"""Load a model by a module, a configuration, a directory, a preset or a factory.

    load_model("llama-3.1-8b")            a preset: a config.json that ships with autotp
    load_model("./checkpoints/mine")      a directory with a config.json; weights are not read
    load_model("package.module:factory")  the module that the factory returns

Models from a configuration are built on the meta device: planning needs shapes, but no values.
"""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.errors import PlanError

_SPECS: Final = "a directory with config.json, package.module:factory, or a preset"
_RESTORE: Final = "Restore the model's own config.json."
_FACTORY_RESULT: Final = (
    "It must return a torch.nn.Module, or a module and a mapping of its example inputs."
)


def find_presets() -> Path:
    """Find the directory of the presets: in the installed package, or else in the checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "presets", here.parent / "examples" / "models"):
        if candidate.is_dir():
            return candidate
    raise PlanError(f"there are no presets next to {here}. Reinstall autotp, or give {_SPECS}.")


def list_presets() -> list[str]:
    """List the names of the presets, sorted."""
    return sorted(path.parent.name for path in find_presets().glob("*/config.json"))


def load_model(spec: object, *, device: str = "meta") -> nn.Module:
    """Load the module that `spec` names.

    From a configuration it is built on `device`, in evaluation mode; a module, or what a factory
    returns, is returned as it is.

    Raises PlanError for an unknown name, or a configuration that is missing or malformed.
    """
    return load_with_inputs(spec, device=device)[0]


def load_with_inputs(
    spec: object, *, device: str = "meta"
) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Load the module that `spec` names, with the example inputs of its factory, if any."""
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
    raise PlanError(f"model: is of type {type(spec).__name__}. Give a module, {_SPECS}.")


def _find_preset(name: str) -> Path:
    known = list_presets()
    if name in known:
        return find_presets() / name
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise PlanError(
        f"model {name!r}: is neither a directory nor a preset. {hint}The presets are "
        f"{', '.join(known)}; MODEL is {_SPECS}."
    )


def import_transformers(name: str = "") -> Any:
    """Import transformers, or its module `name`; PlanError if it is not installed."""
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise PlanError(
            "transformers, which builds models from configurations, is not installed. "
            "Run: pip install 'autotp[transformers]'."
        ) from error
    return importlib.import_module(f"{library.__name__}.{name}") if name else library


def read_config_fields(directory: Path) -> dict[str, Any]:
    """Read and check the fields of the config.json in `directory`."""
    path = directory / "config.json"
    try:
        fields: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"{directory}: has no config.json. MODEL is {_SPECS}.") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be read: {error}. {_RESTORE}") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise PlanError(f"{path}: {at}: {error.msg}. {_RESTORE}") from error
    if reason := _find_fault(fields):
        raise PlanError(f"{path}: {reason}. {_RESTORE}")
    return cast("dict[str, Any]", fields)


def _read_config(directory: Path) -> Any:
    """Read the configuration in `directory`."""
    return _parse_config(directory / "config.json", read_config_fields(directory))


def _find_fault(fields: object) -> str:
    """Find why a configuration cannot be used; empty if it can."""
    if not isinstance(fields, dict):
        return f"is a {type(fields).__name__}, not an object"
    items = cast("Mapping[str, object]", fields)
    if "model_type" not in items:
        return "the key 'model_type' is missing"
    names = items.get("architectures")
    if not names:
        return "the key 'architectures', which names the model's class, is missing"
    if not isinstance(names, list) or not isinstance(cast("list[object]", names)[0], str):
        return f"'architectures' is {names!r}, but must be a list with the name of a class"
    return ""


def _parse_config(path: Path, fields: dict[str, Any]) -> Any:
    kind = fields.pop("model_type")
    try:
        return import_transformers().AutoConfig.for_model(kind, **fields)
    # validators may raise anything; it becomes the reason in the message
    except Exception as error:
        reason = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise PlanError(
            f"{path}: Transformers rejects it (model_type {kind!r}): {reason}"
        ) from error


def _build_from_config(config: Any, where: str, device: str) -> nn.Module:
    names = getattr(config, "architectures", None) or []
    cls = getattr(import_transformers(), names[0], None) if names else None
    if cls is None:
        what = f"architecture {names[0]!r} is unknown" if names else "has no architectures"
        raise PlanError(
            f"{where}: {what}. Set config.architectures to a class of Transformers "
            f"{import_transformers().__version__}."
        )
    with torch.device(device):
        model: nn.Module = cls._from_config(config)
    return model.eval()


def _build_from_factory(spec: str) -> tuple[nn.Module, Mapping[str, Any] | None]:
    result = _import_factory(spec)()
    values = cast("tuple[object, ...]", result) if isinstance(result, tuple) else (result, None)
    if len(values) != 2:
        raise PlanError(
            f"model {spec!r}: the factory returned {len(values)} values. {_FACTORY_RESULT}"
        )
    model, inputs = cast("Any", values)
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model {spec!r}: the factory returned {type(model).__name__}. {_FACTORY_RESULT}"
        )
    return model, inputs


def import_user_module(name: str) -> ModuleType:
    """Import a module, from the working directory too, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _import_factory(spec: str) -> Callable[[], object]:
    module_name, _, name = spec.partition(":")
    try:
        module = import_user_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        raise PlanError(f"model {spec!r}: {error}. MODEL is {_SPECS}.") from error
    factory: Callable[[], object] | None = getattr(module, name, None)
    if not callable(factory):
        what = f"has no {name!r}" if factory is None else f"has {name!r}, which is not callable"
        raise PlanError(f"model {spec!r}: {module_name} {what}. MODEL is {_SPECS}.")
    return factory
