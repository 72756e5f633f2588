"""Functions with a backward of their own as ops: torch.export keeps an op, and an op its backward.

Source: torch.library ("Custom operators"): an op's autograd is registered beside its forward.
"""

# pyright: reportPrivateUsage=false
# where a tensor lies is nowhere public

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

__all__ = ["AppliedFunction", "Saving", "make_op"]

_NAMESPACE = "autotp_functions"
_FIXED = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Saving:
    """What a function's forward is given where nobody will run its backward."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = (False,) * 64  # of as many arguments as anyone has

    def save_for_backward(self, *tensors: object) -> None:
        """Keeps them for a forward that reads them again."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Matters to a backward only."""

    def mark_non_differentiable(self, *tensors: object) -> None:
        """Matters to a backward only."""


class AppliedFunction(NamedTuple):
    """A function as it was applied: its class, its arguments' structure, and those without tensors.

    `fixed` has None where a tensor stands.
    """

    function: Any
    spec: pytree.TreeSpec
    fixed: tuple[object, ...]
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, function: object, args: tuple[Any, ...]) -> "Applied | None":
        """How `function` is applied; None where an argument is neither a tensor nor a plain value.

        A size that is free while exporting is no plain value: an op would fix it.
        """
        leaves, spec = pytree.tree_flatten(args)
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        fixed = tuple(None if i in tensors else leaf for i, leaf in enumerate(leaves))
        plain = all(type(leaf) in _FIXED for leaf in fixed)
        return cls(function, spec, fixed, tensors) if plain else None

    def arguments(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The arguments with `tensors` in their places."""
        leaves = list(self.fixed)
        for at, tensor in zip(self.tensors, tensors, strict=True):
            leaves[at] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    def given(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors among `args`."""
        leaves = pytree.tree_leaves(args)
        return [leaves[at] for at in self.tensors]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """What the function's forward gives, by itself."""
        told = self.function.setup_context is not torch.autograd.Function.setup_context
        context = () if told else (Saving(),)
        return self.function.forward(*context, *self.arguments(tensors))


def make_op(applied: AppliedFunction, results: int) -> OpOverload:
    """An op that computes what `applied.function` does, `results` tensors, with its own backward.

    Example: `torch.ops.autotp_functions.Straight_1f3a5c.default(x)`.
    """
    key = (applied.function, _compute_digest(applied, results))
    if key not in _OPS:
        _OPS[key] = _register_op(applied, results, _name_op(*key))
    return _OPS[key][0]


_OPS: dict[tuple[Any, str], tuple[OpOverload, torch.library.Library]] = {}  # they live as long


def _compute_digest(applied: AppliedFunction, results: int) -> str:
    """What tells one op from another: the same on every rank."""
    said = (applied.function.__module__, applied.spec, applied.fixed, applied.tensors, results)
    return hashlib.sha256(repr(said).encode()).hexdigest()[:6]


def _name_op(function: Any, digest: str) -> str:
    name = f"{function.__name__}_{digest}"
    taken = sum(other.__name__ == function.__name__ and d == digest for other, d in _OPS)
    return f"{name}_{taken}" if taken else name


def _register_op(applied: AppliedFunction, results: int, name: str) -> tuple[OpOverload, torch.library.Library]:
    def run(*tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            return _separate_memory(applied.forward(*tensors), tensors)

    def saved(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        del output
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return _run_backward(applied, ctx.saved_tensors, ctx.needs_input_grad, gradients)

    given = ", ".join(f"Tensor x{i}" for i in range(len(applied.tensors)))
    gives = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    library.define(f"{name}({given}) -> {gives}")
    full = f"{_NAMESPACE}::{name}"
    torch.library.impl(full, "CompositeExplicitAutograd", lib=library)(run)
    torch.library.register_fake(full, run, lib=library)
    torch.library.register_autograd(full, back, setup_context=saved, lib=library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default, library


def _separate_memory(results: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The results, none of them in the memory of an operand: an op's may not be."""
    given = {t.untyped_storage()._cdata for t in tensors}

    def apart(result: torch.Tensor) -> torch.Tensor:
        return result.clone() if result.untyped_storage()._cdata in given else result

    return pytree.tree_map(apart, results)


def _run_backward(
    applied: AppliedFunction,
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """What the function's own backward gives, after another run of its forward."""
    inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        results = pytree.tree_leaves(applied.function.apply(*applied.arguments(inputs)))
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    asked = [t for t in inputs if t.requires_grad]
    ends, given = [r for r, g in pairs if g is not None], [g for _, g in pairs if g is not None]
    found = iter(torch.autograd.grad(ends, asked, given, allow_unused=True) if ends else ())
    return tuple(next(found, None) if t.requires_grad else None for t in inputs)
