"""Takes back what a forward sets while it is traced: sizes and tensors that exist in a trace only.

A forward may keep what it computed for the next call: `self.seq_len = x.shape[1]`, a cache in a
list, in a dict or in an object that is no module. Left there, a later call or a copy of the model
would meet symbols of a trace that is over.
"""

import types
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from autotp.errors import CaptureError

__all__ = ["restore_attributes", "refuse_kept_state"]

_LEAVES = (
    str, bytes, int, float, complex, type, torch.Tensor, torch.device, torch.dtype,
    types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_TORCHS_WARNING = "The tensor attributes? "  # that they stay behind: they do not
_NOT_ENTERED = ("torch.", "builtins", "threading", "logging")  # no cache of the model's is there


@contextmanager
def restore_attributes(model: nn.Module) -> Generator[None]:
    """All attributes of the model's modules, and of what they hold, are afterwards as before.

    Constraints: tensors are told apart as objects; what is written into one is not taken back.
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
    """Raises CaptureError if the model keeps tensors of a call for the next one by itself.

    A graph carries a cache from call to call; what a module sets on itself would be lost, and the
    next call go on from nothing.
    """
    before = _list_plain_tensors(model)
    yield
    for (path, name), tensor in _list_plain_tensors(model).items():
        if tensor is not before.get((path, name)):
            raise CaptureError(
                f"{type(model).__name__}: {path or 'the model'} keeps {name}, a tensor "
                f"{list(tensor.shape)}, from one call for the next as an attribute of its own, "
                "outside any cache, and no graph can carry that. Call it with use_cache=False: "
                "each call then takes all words so far."
            )


def _list_plain_tensors(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that modules hold as plain attributes, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _build_restorers(held: object, seen: set[int]) -> Iterator[Callable[[], None]]:
    """What puts `held`, and all that it holds, back to what it is now."""
    todo = [held]
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
    """What is held, in order: of a dict its keys, then its values."""
    return [*holder, *holder.values()] if isinstance(holder, dict) else [*holder]
