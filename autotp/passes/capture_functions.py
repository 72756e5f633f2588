"""Gradients that a capture would lose: torch.export keeps what a function computes, and forgets the
backward pass that a `torch.autograd.Function` defines by hand.
"""

# pyright: reportPrivateUsage=false
# the frame that applies a function is nowhere public, nor are an op's arguments

import linecache
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autotp.errors import CaptureError
from autotp.passes.capture_branches import outside_torch

__all__ = ["own_backward_refused", "sparse_refused"]

_OURS = ("torch.", "autotp.")  # hooks and checkpoints of torch's, collectives of our own


@contextmanager
def own_backward_refused(model: str, *, gradients: bool) -> Generator[None]:
    """Raises CaptureError at the end, if the model applied a function with a backward of its own.

    Constraints: one that nothing passes a gradient to is harmless.
    """
    applied: list[str] = []
    own = torch.autograd.Function.__dict__["apply"]

    def noted(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 whatever it takes
        if not cls.__module__.startswith(_OURS) and _asks(args, kwargs):
            applied.append(f"{cls.__qualname__}{_line()}")
        return own.__get__(None, cls)(*args, **kwargs)

    if gradients:
        setattr(torch.autograd.Function, "apply", classmethod(noted))  # noqa: B010 pyright: no type
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", own)  # noqa: B010 as above
    if applied:
        raise CaptureError(
            f"{model}: {applied[0]} is a torch.autograd.Function: torch.export keeps its forward "
            "and loses its backward, so gradients would be wrong. Write it in differentiable ops "
            "(x + (f(x) - x).detach() passes a gradient straight through), as a "
            "torch.library.custom_op with register_autograd, or pass training=False."
        )


def sparse_refused(model: str, graph: fx.Graph) -> None:
    """Raises CaptureError if an op of `graph` gives a sparse gradient."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            names = [a.name for a in node.target._schema.arguments]
            said = dict(zip(names, node.args, strict=False)) | node.kwargs
            if said.get("sparse") is True:
                raise CaptureError(
                    f"{model}: {node.name}, {node.target}: sparse=True makes a sparse gradient, "
                    "which ranks cannot cut nor sum. Build the layer with sparse=False, or pass "
                    "training=False."
                )


def _asks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _line() -> str:
    """The model's line that applies the function: ` (file:line: code)`."""
    frame = sys._getframe(2)
    while frame is not None and outside_torch(frame) is None:
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" ({file}:{number}: {linecache.getline(file, number).strip()})"
