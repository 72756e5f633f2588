"""Fixes values that a forward reads while it is traced: the grid of an image, sequence lengths.

Where sizes depend on values of an integer input, a symbolic trace fails. The input is then fixed:
it, and everything computed from it alone, is known to the trace and constant in the graph, which is
valid for these values only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] nowhere public
)

from autotp.capture.program import Guard

OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.arange)
"""Functions that make tensors from numbers alone, other than tensors to be written to."""
MOST = 1024  # elements: a larger input is data, and does not describe its layout


class KnownValues(TorchFunctionMode):
    """Computes real values of whatever depends on `tensors` alone, whatever traces around it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {id(t): t for t in tensors}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of `func`, as a real tensor if all its tensors are known."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        symbols = any(isinstance(x, torch.SymInt | torch.SymBool | torch.SymFloat) for x in leaves)
        known = tensors or func in OF_NUMBERS
        if not known or symbols or not all(id(t) in self._tensors for t in tensors):
            self._forget_written(func, tensors)
            return func(*self._replace_masks(func, args), **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] nowhere public
            result = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._tensors |= {id(t): t for t in made}
        return result

    def _replace_masks(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with known masks in an index as positions, whose number is known."""
        if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        places = [place for one in index for place in self._find_positions(one)]
        return args[0], tuple(places), *args[2:]

    def _find_positions(self, index: Any) -> Sequence[Any]:
        if id(index) not in self._tensors or index.dtype != torch.bool:
            return (index,)
        return self.__torch_function__(torch.Tensor.nonzero, (), (index,), {"as_tuple": True})

    def _forget_written(self, func: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
        """Forget the values of memory that the trace writes to."""
        name = getattr(func, "__name__", "")
        written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if written and tensors and id(tensors[0]) in self._tensors:
            place = tensors[0].untyped_storage().data_ptr()
            known = self._tensors.items()
            self._tensors = {i: t for i, t in known if t.untyped_storage().data_ptr() != place}


def needs_values(error: BaseException | None) -> bool:
    """Whether a trace failed because the forward reads values."""
    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode):
            return True
        error = error.__cause__ or error.__context__
    return False


def propose_known(inputs: Mapping[str, Any]) -> Iterator[frozenset[str]]:
    """The sets of integer inputs to try to fix: the smallest input, the two smallest, and so on."""
    small = {
        n: v.numel()
        for n, v in inputs.items()
        if isinstance(v, torch.Tensor) and not v.is_floating_point() and v.numel() <= MOST
    }
    names = sorted(small, key=lambda n: small[n])
    return (frozenset(names[: count + 1]) for count in range(len(names)))


def build_value_guards(inputs: Mapping[str, Any], known: frozenset[str]) -> Iterator[Guard]:
    """Guards that the fixed inputs have the values of the trace."""
    for name in sorted(known):
        yield Guard(f"L[{name!r}].tolist() == {inputs[name].tolist()}")
