"""Turns functions with their own backward into ops, which torch.export keeps with their backward.

Source: torch.library ("Custom operators"): the autograd formula of an op is registered with it.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to the storage of a tensor

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

_NAMESPACE = "autotp_functions"
_FIXED = (int, float, bool, str, type(None), torch.dtype, torch.device)


class _ForwardContext:
    """The context of a function's forward where its backward will not run."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = (False,) * 64  # more than the arguments of any function

    def save_for_backward(self, *tensors: object) -> None:
        """Keep tensors that the forward may read again."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: this matters only to a backward."""

    def mark_non_differentiable(self, *tensors: object) -> None:
        """Do nothing: this matters only to a backward."""


class AppliedFunction(NamedTuple):
    """An application of a function: its class, and the structure and plain values of its arguments.

    - `fixed`: the leaves of the arguments, with None for tensors; `tensors`: the positions of them.
    """

    function: Any
    spec: pytree.TreeSpec
    fixed: tuple[object, ...]
    tensors: tuple[int, ...]

    @classmethod
    def build(cls, function: object, args: tuple[Any, ...]) -> "AppliedFunction | None":
        """The application to `args`; None if one is neither a tensor nor a plain value.

        A symbolic size is not a plain value: an op would fix it.
        """
        leaves, spec = pytree.tree_flatten(args)
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        fixed = tuple(None if i in tensors else leaf for i, leaf in enumerate(leaves))
        plain = all(type(leaf) in _FIXED for leaf in fixed)
        return cls(function, spec, fixed, tensors) if plain else None

    def build_arguments(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The arguments, with `tensors` at their positions."""
        leaves = list(self.fixed)
        for at, tensor in zip(self.tensors, tensors, strict=True):
            leaves[at] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def select_tensors(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors among `args`."""
        leaves = pytree.tree_leaves(args)
        return [leaves[at] for at in self.tensors]

    def run_forward(self, *tensors: torch.Tensor) -> Any:
        """The results of the function's forward alone."""
        arguments = self.build_arguments(tensors)
        return self.function.forward(*make_context(self.function), *arguments)


def make_context(function: Any) -> tuple[_ForwardContext, ...]:
    """The context argument of a function's forward; none where it has its own `setup_context`."""
    separate = function.setup_context is not torch.autograd.Function.setup_context
    return () if separate else (_ForwardContext(),)


def make_op(applied: AppliedFunction, results: int) -> OpOverload:
    """An op that computes the `results` tensors of `applied.function`, with its own backward.

    Example: `torch.ops.autotp_functions.Straight_1f3a5c.default(x)`.
    """
    key = (applied.function, _compute_digest(applied, results))
    if key not in _OPS:
        _OPS[key] = _register_op(applied, results, _name_op(*key))
    return _OPS[key][0]


_OPS: dict[
    tuple[Any, str], tuple[OpOverload, torch.library.Library]
] = {}  # a library must outlive its op


def _compute_digest(applied: AppliedFunction, results: int) -> str:
    """A key of the op, equal on every rank."""
    identity = (applied.function.__module__, applied.spec, applied.fixed, applied.tensors, results)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:6]


def _name_op(function: Any, digest: str) -> str:
    name = f"{function.__name__}_{digest}"
    taken = sum(other.__name__ == function.__name__ and d == digest for other, d in _OPS)
    return f"{name}_{taken}" if taken else name


def _register_op(
    applied: AppliedFunction, results: int, name: str
) -> tuple[OpOverload, torch.library.Library]:
    def run(*tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            return _separate_memory(applied.run_forward(*tensors), tensors)

    def save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        del output
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return _run_backward(applied, ctx.saved_tensors, ctx.needs_input_grad, gradients)

    operands = ", ".join(f"Tensor x{i}" for i in range(len(applied.tensors)))
    returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    library.define(f"{name}({operands}) -> {returns}")
    full = f"{_NAMESPACE}::{name}"
    torch.library.impl(full, "CompositeExplicitAutograd", lib=library)(run)
    torch.library.register_fake(full, run, lib=library)
    torch.library.register_autograd(full, back, setup_context=save, lib=library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default, library


def _separate_memory(results: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The results, copied where they share memory with an operand, which an op may not do."""
    memory = {t.untyped_storage()._cdata for t in tensors}

    def apart(result: torch.Tensor) -> torch.Tensor:
        return result.clone() if result.untyped_storage()._cdata in memory else result

    return pytree.tree_map(apart, results)


def _run_backward(
    applied: AppliedFunction,
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients by the function's own backward, after another run of its forward."""
    inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        results = pytree.tree_leaves(applied.function.apply(*applied.build_arguments(inputs)))
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    ends, starts = [r for r, g in pairs if g is not None], [g for _, g in pairs if g is not None]
    found = iter(torch.autograd.grad(ends, leaves, starts, allow_unused=True) if ends else ())
    return tuple(next(found, None) if t.requires_grad else None for t in inputs)
