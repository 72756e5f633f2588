"""Keeps gradients that a capture would lose: torch.export traces the forward of a
`torch.autograd.Function` and drops its hand-written backward.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to the frame that applies a function, nor to the arguments of an op

import linecache
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autotp.capture.graph_facts import read_argument
from autotp.capture.repairs.branches import find_model_frame
from autotp.capture.repairs.opaque import AppliedFunction, make_context, make_op
from autotp.errors import CaptureError

_OURS = ("torch.", "autotp.")  # torch's hooks and checkpoints, our own collectives


class ExportAgain(Exception):  # noqa: N818 not an error
    """Functions with their own backward were found, to be exported as ops in another attempt."""


@contextmanager
def keep_own_backwards(
    model: str, kept: dict[AppliedFunction, int], *, gradients: bool
) -> Generator[None]:
    """Export the functions in `kept` as ops, which have backward passes of their own.

    If the model applied another function whose backward is lost, adds it to `kept` with the number
    of its results and raises ExportAgain at the end; CaptureError if it cannot be an op.

    Constraints: a function that receives no gradient is harmless, and so is one whose backward is
    the derivative of its forward; this is verified by running both on random numbers.
    """
    calls: list[tuple[Any, str, tuple[Any, ...], AppliedFunction | None, int]] = []
    own = torch.autograd.Function.__dict__["apply"]

    def record(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_OURS) or not _needs_gradient(args, kwargs):
            return own.__get__(None, cls)(*args, **kwargs)
        applied = None if kwargs else AppliedFunction.build(cls, args)
        if applied is not None and applied in kept:
            return make_op(applied, kept[applied])(*applied.select_tensors(args))
        result = own.__get__(None, cls)(*args, **kwargs)
        described = pytree.tree_map(_describe_argument, args)
        calls.append((cls, _find_line(), described, applied, _count_results(result)))
        return result

    if gradients:
        setattr(torch.autograd.Function, "apply", classmethod(record))  # noqa: B010 pyright: no type
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", own)  # noqa: B010 as above
    lost = [call for call in calls if not _is_derivative(call[0], call[2])]
    for function, line, described, applied, results in lost:
        reason = "it takes or returns more than tensors and plain values"
        if applied is not None and results:
            reason = _explain_unsteady(function, described)
        if reason or applied is None:
            raise CaptureError(
                f"{model}: {function.__qualname__}{line} is a torch.autograd.Function. "
                "torch.export keeps its forward and loses its backward, so gradients would be "
                f"wrong. It cannot be turned into an op, which repeats its forward in the backward "
                f"pass, because {reason}. Write it in differentiable ops (x + (f(x) - x).detach() "
                "passes a gradient straight through), or as a torch.library.custom_op with "
                "register_autograd, or pass training=False."
            )
        kept[applied] = results
    if lost:
        raise ExportAgain


def _count_results(result: object) -> int:
    """How many tensors a function returned; 0 if it returned anything else."""
    results = result if isinstance(result, tuple) else (result,)
    return len(results) if all(isinstance(one, torch.Tensor) for one in results) else 0


class _RandomArgument(NamedTuple):
    """A tensor argument, to be made of random numbers after the export."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make(self) -> torch.Tensor:
        if not self.dtype.is_floating_point:
            return torch.ones(self.shape, dtype=self.dtype)
        generator = torch.Generator().manual_seed(len(self.shape))
        made = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_(self.requires_grad)


def _make_arguments(arguments: tuple[Any, ...]) -> Any:
    def make(item: object) -> object:
        return item.make() if isinstance(item, _RandomArgument) else item

    return pytree.tree_map(make, arguments, is_leaf=lambda x: isinstance(x, _RandomArgument))


def _describe_argument(item: object) -> object:
    if not isinstance(item, torch.Tensor):
        return item
    return _RandomArgument(tuple(_find_size(s) for s in item.shape), item.dtype, item.requires_grad)


def _find_size(size: Any) -> int:
    return size if type(size) is int else int(size.node.hint or 2)


def _is_derivative(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether the backward of a function is what autograd derives from its forward."""
    context = make_context(function)
    try:
        by_hand = _compute_gradients(function.apply, arguments)
        by_torch = _compute_gradients(lambda *given: function.forward(*context, *given), arguments)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # it does not run on random numbers
        return False
    return all(_is_close(one, other) for one, other in zip(by_hand, by_torch, strict=True))


def _explain_unsteady(function: Any, arguments: tuple[Any, ...]) -> str:
    """Why two runs of a function differ, or change its arguments; empty if they do not."""
    inputs = _make_arguments(arguments)
    before = [t.detach().clone() for t in _list_tensors(inputs)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        state = torch.get_rng_state()
        try:
            one, other = (_list_tensors(function.apply(*inputs)) for _ in range(2))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"it does not run on random numbers ({error})"
        drew = not torch.equal(state, torch.get_rng_state())
    if drew or not all(map(_is_same, one, other)):
        return "it draws random numbers"
    same = all(map(_is_same, before, _list_tensors(inputs)))
    return "" if same else "it writes to its arguments"


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN, which random numbers may lead to, equals NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _list_tensors(tree: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _is_close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def _compute_gradients(
    run: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a fixed weighted sum of all outputs, at newly made arguments."""
    with torch.enable_grad():
        inputs = _make_arguments(arguments)
        total = torch.zeros((), dtype=torch.float64)
        for output in _list_tensors(run(*inputs)):
            if output.is_floating_point():
                weights = torch.linspace(0.5, 2, output.numel(), dtype=torch.float64)
                total = total + (output.double().flatten() * weights).sum()
        wanted = [t for t in _list_tensors(inputs) if t.requires_grad]
        if not total.requires_grad:
            return (None,) * len(wanted)
        return torch.autograd.grad(total, wanted, allow_unused=True)


def refuse_sparse_gradients(model: str, graph: fx.Graph) -> None:
    """Raise CaptureError if an op of `graph` makes a sparse gradient."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and read_argument(node, "sparse") is True:
            raise CaptureError(
                f"{model}: {node.name}, {node.target}: sparse=True makes a sparse gradient, which "
                "ranks can neither shard nor sum. Build the layer with sparse=False, or pass "
                "training=False."
            )


def _needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _find_line() -> str:
    """The model's line that applies the function: ` (file:line: code)`."""
    frame = sys._getframe(2)
    while frame is not None and find_model_frame(frame) is None:
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" ({file}:{number}: {linecache.getline(file, number).strip()})"
