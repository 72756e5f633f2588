"""Hooks of a model when it is captured: which are in its graph, and which would be lost.

torch.export calls the forward hooks of submodules and traces what they do: they are baked in, and
must not run again around generated code. The hooks of the model itself still run around it, so they
are kept out of the graph. Backward hooks leave no trace.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.errors import CaptureError

Hook: TypeAlias = Callable[..., Any]  # Any: a hook takes and gives what its module does

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_ON_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def record_baked_hooks(model: nn.Module) -> Generator[set[int]]:
    """Record the numbers of the forward hooks that change the inputs or outputs of their module.

    Constraints:
    - The hooks of the model itself are removed meanwhile: they run around generated code too. So
      are backward hooks, which would leave views in the graph.
    - The numbers are torch's own, which a copy of the model keeps.
    """
    baked: set[int] = set()
    aside = [(m, name, getattr(m, name)) for m in model.modules() for name in _BACKWARD]
    aside += [(model, name, getattr(model, name)) for name in (_BEFORE, _AFTER)]
    for module, name, hooks in aside:
        vars(module)[name] = type(hooks)()
    replaced = [
        (hooks, number, hook, _wrap_hook(hook, number, baked))
        for module in model.modules()
        for hooks in (getattr(module, _BEFORE), getattr(module, _AFTER))
        for number, hook in hooks.items()
    ]
    for hooks, number, _, noting in replaced:
        hooks[number] = noting
    try:
        yield baked
    finally:
        for module, name, hooks in aside:
            vars(module)[name] = hooks
        for hooks, number, hook, noting in replaced:
            if hooks.get(number) is noting:  # a hook may remove itself
                hooks[number] = hook


def _wrap_hook(hook: Hook, number: int, baked: set[int]) -> Hook:
    def noting(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args[1:], kwargs)) if isinstance(x, torch.Tensor)]
        before = [t._version for t in tensors]
        result = hook(*args, **kwargs)
        if result is not None or before != [t._version for t in tensors]:
            baked.add(number)
        return result

    return noting


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise CaptureError if the model has a backward hook that generated code would not call."""
    hook = next(_list_backward_hooks(model), None)
    if hook is not None:
        raise CaptureError(
            f"{type(model).__name__}: {hook}, which generated code would not call. Remove it "
            "first, and register it on the sharded model: on a parameter, where it gets this "
            "rank's gradient, or on the model itself."
        )


def _list_backward_hooks(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in _BACKWARD):
            yield f"{path or 'the model'} has a backward hook"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(getattr(parameter, h, None) for h in _ON_TENSORS):
            yield f"parameter {name} has a hook on its gradient"
