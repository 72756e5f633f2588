"""Converts frozen dataclasses to JSON values and back, by their annotations alone.

`encode` turns a record into dicts, lists, strings and numbers; `decode` rebuilds it and checks
every value, so that a broken file is refused with the path of the fault:

    parameters.lm_head.weight.shards[3].bytes: expected int, found str 'many'

The annotations supported are those of our records: int, float, str, bool, None, object,
Literal, unions, tuple[X, ...], Mapping[str, X] and dataclasses of these.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(Exception):
    """A value does not fit its annotation; the message starts with the value's path."""


def encode(value: object) -> Any:
    """Encode `value` as a JSON value: records become dicts in field order, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(annotation: type[T], value: object, path: str = "") -> T:
    """Decode the parsed JSON `value` as a value of type `annotation`.

    Constraints:
    - `decode(t, encode(x)) == x` if `x` contains tuples, not lists.
    - A key with a default may be absent; an unknown key is an error.
    - Raises RecordError, with the path of the first value that does not fit.
    """
    return _decode(annotation, value, path)


def _decode(annotation: Any, value: object, path: str) -> Any:
    if annotation in (object, Any):
        return _freeze(value)
    if dataclasses.is_dataclass(annotation):
        return _decode_record(annotation, value, path)
    origin = typing.get_origin(annotation)
    if origin in _DECODERS:
        return _DECODERS[origin](typing.get_args(annotation), value, path)
    return _decode_scalar(annotation, value, path)


def _decode_record(cls: Any, value: object, path: str) -> Any:
    items = _require_object(value, path)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [key for key in items if key not in fields]:
        raise RecordError(f"{path or 'top level'}: unknown key {unknown[0]!r}")
    if missing := [n for n, field in fields.items() if n not in items and _is_required(field)]:
        raise RecordError(f"{path or 'top level'}: missing key {missing[0]!r}")
    return cls(**{n: _decode(hints[n], item, _extend_path(path, n)) for n, item in items.items()})


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    absent = dataclasses.MISSING
    return field.default is absent and field.default_factory is absent


def _decode_tuple(args: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _describe_misfit("a list", value, path)
    inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
    if len(inner) != len(value):
        raise RecordError(f"{path}: expected {len(inner)} entries, found {len(value)}")
    pairs = enumerate(zip(inner, value, strict=True))
    return tuple(_decode(kind, item, f"{path}[{k}]") for k, (kind, item) in pairs)


def _decode_mapping(args: tuple[Any, ...], value: object, path: str) -> dict[str, Any]:
    items = _require_object(value, path)
    return {key: _decode(args[1], item, _extend_path(path, key)) for key, item in items.items()}


def _decode_literal(args: tuple[Any, ...], value: object, path: str) -> object:
    if value not in args:
        raise _describe_misfit(" or ".join(map(repr, args)), value, path)
    return value


def _decode_union(args: tuple[Any, ...], value: object, path: str) -> object:
    if value is None and types.NoneType in args:
        return None
    members = [arg for arg in args if arg is not types.NoneType]
    fitting = [arg for arg in members if isinstance(arg, type) and isinstance(value, arg)]
    return _decode((fitting or members)[0], value, path)


def _decode_scalar(annotation: type, value: object, path: str) -> object:
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        raise _describe_misfit(annotation.__name__, value, path)
    return value


def _require_object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _describe_misfit("an object", value, path)
    return typing.cast("dict[str, Any]", value)


def _freeze(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        items = typing.cast("dict[str, object]", value)
        return {key: _freeze(item) for key, item in items.items()}
    return value


def _describe_misfit(expected: str, value: object, path: str) -> RecordError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    found = "null" if value is None else f"{type(value).__name__} {shown}"
    return RecordError(f"{path or 'top level'}: expected {expected}, found {found}")


def _extend_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_DECODERS: dict[object, Callable[[tuple[Any, ...], object, str], Any]] = {
    tuple: _decode_tuple,
    Mapping: _decode_mapping,
    typing.Literal: _decode_literal,
    typing.Union: _decode_union,
    types.UnionType: _decode_union,
}
