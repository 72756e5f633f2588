"""A guard around the calls of a sharded model: errors say where this rank was.

A call that succeeds pays for one stack frame and a clock reading.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autotp.capture.cache import flatten_caches
from autotp.capture.heap import release_memory
from autotp.runtime.group.debug_compare import Comparison
from autotp.runtime.group.failures import find_place, raise_group_error
from autotp.runtime.variant import find_key

if TYPE_CHECKING:
    from autotp.runtime.model import ShardedModel

# Any: a forward takes and gives what the model's own does.
Forward: TypeAlias = Callable[..., Any]


def guard_call(forward: Forward) -> Forward:
    """Wrap the forward of a sharded model so that errors about lost ranks become a GroupError.

    Constraints: in compiled code, errors are the backend's own.
    """

    @wraps(forward)
    def call(model: "ShardedModel", *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(model, *args, **kwargs)
        began = time.monotonic()
        try:
            if model.sharded_state.compare is not None:
                _compare_call(model, model.sharded_state.compare, args, kwargs)
            result = forward(model, *args, **kwargs)
        except Exception as error:
            _report_failure(error, model, time.monotonic() - began)
            raise
        if model.sharded_state.fresh:
            model.sharded_state.fresh = False
            release_memory()  # left by a capture and the first run of its graph
        return result

    return call


def _compare_call(
    model: "ShardedModel", compare: Comparison, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    state, signature = model.sharded_state, model.sharded_signature
    inputs = flatten_caches(signature.bind(args, kwargs))
    state.note_mode(model)
    key = find_key(signature.model, inputs, state.mode)
    accepted = [variant.accepts(inputs) for variant in state.variants.get(key, ())]
    number = accepted.index(True) + 1 if True in accepted else 0
    compare(signature.model, f"{key} ({number or 'not captured yet'})", inputs)


def _report_failure(error: Exception, model: "ShardedModel", seconds: float) -> None:
    place = find_place(error, model)
    where = f"{type(model).__name__}, {place}" if place else f"{type(model).__name__}: a call"
    state = model.sharded_state
    raise_group_error(error, state.group.name if state.watched else "", where, seconds)
