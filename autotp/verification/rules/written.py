"""Parses the sample calls of a row: the arguments of one call of its op, in Python's notation.

    samples = ["real(6, 2, 12), real(12), eps=1e-6", "[integers(6, below=12)], real(6, 12), 1"]

The text is parsed, never evaluated. It may contain literals, lists, dtypes such as `torch.float64`,
and calls of `torch.tensor` or of the functions that describe random tensors.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotp.errors import RuleError
from autotp.verification.rules.cases import (
    RandomTensor,
    Sample,
    complexes,
    fixed,
    flags,
    integers,
    positive,
    real,
    short,
)


def _make_tensor(values: list[Any], *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype)


_RANDOM: Mapping[str, Callable[..., RandomTensor]] = {
    f.__name__: f for f in (complexes, fixed, flags, integers, positive, real, short)
}
_TENSORS: Mapping[str, Callable[..., Any]] = {**_RANDOM, "torch.tensor": _make_tensor}
_DTYPES = {f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}


def parse_sample(text: str) -> Sample:
    """The sample that `text` describes; RuleError says what is wrong and how to write one."""
    try:
        call = ast.parse(f"call({text})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("it is more than the arguments of one call")
        return Sample(*_parse_arguments(call))
    except (SyntaxError, TypeError, ValueError, RuntimeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise RuleError(
            f"sample {text!r}: {reason}. Write the arguments of one call of the op: literals, "
            f"lists, dtypes such as torch.float64, and tensors by {', '.join(_TENSORS)}"
        ) from None


def _parse_arguments(call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {k.arg: _parse_value(k.value) for k in call.keywords if k.arg is not None}
    if len(named) < len(call.keywords):
        raise ValueError("** is not allowed: name each argument")
    return tuple(map(_parse_value, call.args)), named


def _parse_value(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_parse_value(item) for item in node.elts]
    if isinstance(node, ast.Call):
        return _make_described(node)
    written = ast.unparse(node)
    if written in _DTYPES:
        return _DTYPES[written]
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise ValueError(f"{written!r} is neither a literal nor a dtype") from None


def _make_described(call: ast.Call) -> Any:
    """The tensor that a call describes."""
    name = ast.unparse(call.func)
    if name not in _TENSORS:
        raise ValueError(f"{name!r} does not describe a tensor")
    args, kwargs = _parse_arguments(call)
    if name in _RANDOM and not all(type(size) is int and size >= 0 for size in args):
        raise ValueError(f"{ast.unparse(call)}: sizes are integers, 0 or larger")
    return _TENSORS[name](*args, **kwargs)
