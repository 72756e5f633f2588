"""Samples as rows write them: the arguments of one call, in Python's notation.

    samples = ["real(6, 2, 12), real(12), eps=1e-6", "[words(6, below=12)], real(6, 12), 1"]

Only calls of the functions that make random tensors, literals and lists are understood.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from autotp.errors import RuleError
from autotp.verification.rules.cases import (
    Sample,
    complexes,
    fixed,
    flags,
    positive,
    real,
    short,
    words,
)

__all__ = ["sample_of"]

_DRAWN: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (complexes, fixed, flags, positive, real, short, words)
}


def sample_of(text: str) -> Sample:
    """The sample that `text` writes; RuleError says what in it is not understood."""
    try:
        call = ast.parse(f"call({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        return Sample(*_arguments(call))
    except (SyntaxError, TypeError, ValueError, AssertionError) as error:
        known = ", ".join(sorted(_DRAWN))
        raise RuleError(
            f"sample {text!r}: {error}. Write the arguments of one call: literals, lists, and "
            f"tensors by {known}"
        ) from None


def _arguments(call: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_value, call.args)), {k.arg or "": _value(k.value) for k in call.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not (isinstance(node.func, ast.Name) and node.func.id in _DRAWN):
        raise ValueError(f"{ast.unparse(node.func)!r} makes no tensor")
    args, kwargs = _arguments(node)
    return _DRAWN[node.func.id](*args, **kwargs)
