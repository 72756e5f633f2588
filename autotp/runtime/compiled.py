"""A sharded model's calls, compiled: one compilation for each kind of call, whatever its sizes.

What a compiler cannot see is settled before it is asked: the variant that answers, captured if need
be, by the values of a mask the shortest of its graphs, and a rank's part of a whole cache.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch

from autotp.capture.cache import flatten_caches
from autotp.capture.program import name_leaves
from autotp.runtime.cache_shards import slice_full_caches
from autotp.runtime.group.process_group import Group
from autotp.runtime.variant import Signature, Variant

__all__ = ["Callee", "Compiled", "Granting"]


class Granting(Protocol):
    """What holds the number of the graph that the call being compiled runs (`Variant.granted`)."""

    granted: int
    group: Group


class Callee(Protocol):
    """A sharded model, as what compiles its calls sees it."""

    @property
    def sharded_signature(self) -> Signature:
        """What its forward takes."""
        ...

    @property
    def sharded_state(self) -> Granting:
        """Its state."""
        ...

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any: ...


M = TypeVar("M", bound=Callee)
# Any: arguments and results of a model.
Call: TypeAlias = Callable[[Callee, int, Sequence[Any], Mapping[str, Any]], Any]


class Compiled:
    """Calls `model`, each kind of call by a function of its own that is compiled when it comes.

    - `find`: the variant that answers a call with these inputs, captured if need be.
    - `options`: of torch.compile. Sizes are free unless `dynamic` says otherwise.
    """

    def __init__(
        self, model: M, find: Callable[[M, Mapping[str, Any]], Variant], options: Mapping[str, Any]
    ) -> None:
        self.model, self.find = model, find
        self.options = dict(options)
        self.known: dict[tuple[Variant, int], Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if torch.compiler.is_compiling():  # a larger model is compiled, and this one with it
            return _call_model(self.model, 0, args, kwargs)
        given = self.model.sharded_signature.bind(args, kwargs)
        inputs = flatten_caches(given)
        variant = self.find(self.model, inputs)
        plan, rank = variant.plan, self.model.sharded_state.group.rank
        inputs = slice_full_caches(given, inputs, plan.caches, rank, plan.tp)
        leaves = name_leaves(inputs)
        number = variant.granted(leaves)
        if (variant, number) not in self.known:
            if self.options.get("dynamic") is not False:
                _mark_dynamic(variant, leaves)
            # a code object of its own: a compiler counts compilations, up to its limit, by it
            own = FunctionType(
                _call_model.__code__.replace(), _call_model.__globals__, "sharded_call"
            )
            self.known[variant, number] = cast("Call", torch.compile(own, **self.options))
        return self.known[variant, number](self.model, number, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compiled":
        """Calls of the model's copy, to be compiled anew."""
        return Compiled(memo[id(self.model)], self.find, self.options)


def _mark_dynamic(variant: Variant, leaves: Mapping[str, Any]) -> None:
    """Tells a compiler which sizes will change, which it would learn by compiling twice."""
    for name in variant.program.inputs:
        for dim in variant.program.data_dims[name]:
            torch._dynamo.maybe_mark_dynamic(leaves[name], dim)  # pyright: ignore


def _call_model(model: Callee, granted: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    model.sharded_state.granted = granted  # while this is traced, not while it runs
    try:
        return model._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
    finally:
        model.sharded_state.granted = 0
