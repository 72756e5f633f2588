"""Compiled calls of a sharded model: one compilation for each kind of call, for all sizes.

What a compiler cannot trace is done before: finding the variant (captured if necessary), the
shortest of its graphs for the values of the masks, and slicing full caches.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from autotp.capture.cache import flatten_caches
from autotp.capture.program import name_leaves
from autotp.runtime.cache_shards import slice_full_caches
from autotp.runtime.variant import Variant

if TYPE_CHECKING:
    from autotp.runtime.model import ShardedModel

# Any: arguments and results of a model.
Call: TypeAlias = "Callable[[ShardedModel, int, Sequence[Any], Mapping[str, Any]], Any]"
Find: TypeAlias = "Callable[[ShardedModel, Mapping[str, Any]], Variant]"


class Compiled:
    """Calls `model`, with one function for each kind of call, compiled on first use.

    - `find`: finds the variant for the inputs of a call, and captures it if necessary.
    - `options`: of torch.compile. Sizes are free unless `dynamic` says otherwise.
    """

    def __init__(self, model: "ShardedModel", find: Find, options: Mapping[str, Any]) -> None:
        self.model, self.find = model, find
        self.options = dict(options)
        self.known: dict[tuple[Variant, int], Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model."""
        if torch.compiler.is_compiling():  # as part of a larger model
            return _call_model(self.model, 0, args, kwargs)
        given = self.model.sharded_signature.bind(args, kwargs)
        inputs = flatten_caches(given)
        variant = self.find(self.model, inputs)
        plan, rank = variant.plan, self.model.sharded_state.group.rank
        inputs = slice_full_caches(given, inputs, plan.caches, rank, plan.tp)
        leaves = name_leaves(inputs)
        number = variant.find_shorter(leaves)
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
        """Make the calls of the model's copy, which are compiled again."""
        return Compiled(memo[id(self.model)], self.find, self.options)


def _mark_dynamic(variant: Variant, leaves: Mapping[str, Any]) -> None:
    """Tell the compiler which sizes vary, which it would otherwise learn by compiling twice."""
    for name in variant.program.inputs:
        for dim in variant.program.data_dims[name]:
            torch._dynamo.maybe_mark_dynamic(leaves[name], dim)  # pyright: ignore


def _call_model(
    model: "ShardedModel", granted: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    model.sharded_state.granted = granted  # while this is traced, not while it runs
    try:
        return model._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
    finally:
        model.sharded_state.granted = 0
