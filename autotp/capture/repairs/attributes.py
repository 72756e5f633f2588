"""Restores the attributes that a forward sets while it is traced.

A forward may store what it computed for the next call: `self.seq_len = x.shape[1]`, or a cache in a
list, a dict or an object that is not a module. Left there, symbols of a finished trace would reach
a later call or a copy of the model.
"""

import types
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from autotp.errors import CaptureError

_LEAVES = (
    str, bytes, int, float, complex, type, torch.Tensor, torch.device, torch.dtype,
    types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_TORCHS_WARNING = "The tensor attributes? "  # it says that they leak: here they are restored
_NOT_ENTERED = ("torch.", "builtins", "threading", "logging")  # no model stores a cache in these


@contextmanager
def restore_attributes(model: nn.Module) -> Generator[None]:
    """Restore all attributes of the model's modules, and of the objects in them, at the end.

    Constraints: tensors are compared by identity; in-place writes to a tensor are not undone.
    """
    seen: set[int] = set()
    undo = [restore for m in model.modules() for restore in _build_restorers(vars(m), seen)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _TORCHS_WARNING)
            yield
    finally:
        for restore in undo:
            restore()


@contextmanager
def refuse_kept_state(model: nn.Module) -> Generator[None]:
    """Raise CaptureError if the forward stores tensors for the next call on the model's modules.

    A graph passes a cache from call to call; what a module stores in an attribute would be lost.
    """
    before = _list_plain_tensors(model)
    yield
    for (path, name), tensor in _list_plain_tensors(model).items():
        if tensor is not before.get((path, name)):
            raise CaptureError(
                f"{type(model).__name__}: {path or 'the model'} stores {name}, a tensor of shape "
                f"{list(tensor.shape)}, in an attribute for the next call, outside any cache, and "
                "a graph cannot carry it from call to call. Call the model with use_cache=False, "
                "and pass all tokens so far in each call."
            )


def _list_plain_tensors(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that are plain attributes of modules, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _build_restorers(root: object, seen: set[int]) -> Iterator[Callable[[], None]]:
    """Functions that restore the present contents of `root`, and of all that it contains."""
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (*_LEAVES, nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            yield _build_restorer(cast("dict[Any, Any]", one))
            todo += cast("dict[Any, Any]", one).values()
        elif isinstance(one, list | set):
            yield _build_restorer(cast("list[Any]", one))
            todo += cast("list[Any]", one)
        elif isinstance(one, tuple):
            todo += cast("tuple[Any, ...]", one)
        elif hasattr(one, "__dict__") and not type(one).__module__.startswith(_NOT_ENTERED):
            todo.append(vars(one))


def _build_restorer(holder: dict[Any, Any] | list[Any] | set[Any]) -> Callable[[], None]:
    before = _list_contents(holder)

    def restore() -> None:
        now = _list_contents(holder)
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        holder.clear()
        if isinstance(holder, dict):
            half = len(before) // 2
            holder.update(zip(before[:half], before[half:], strict=True))
        elif isinstance(holder, list):
            holder.extend(before)
        else:
            holder.update(before)

    return restore


def _list_contents(holder: dict[Any, Any] | list[Any] | set[Any]) -> list[Any]:
    """The items in order; of a dict the keys, then the values."""
    return [*holder, *holder.values()] if isinstance(holder, dict) else [*holder]
