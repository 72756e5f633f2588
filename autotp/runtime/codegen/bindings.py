"""Ops called through Python's bindings: `torch.mul(x, y)` for `torch.ops.aten.mul.Tensor(x, y)`.

The op is the same at half the call overhead, which dominates the time of small models. Equality is
checked, not assumed: both calls run once on tensors without memory, and what reaches the dispatcher
must be equal, argument by argument.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Any: whatever an op takes and gives
Call: TypeAlias = Callable[..., Any]
Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# private: where torch keeps the bindings of what torch.nn.functional calls
_PLACES: tuple[Any, ...] = (torch, getattr(torch._C, "_nn"), torch.Tensor)  # noqa: B009  # pyright: ignore[reportPrivateUsage]
_NAMES = {"sym_size": "size"}
_FOUND: dict[object, Call] = {}


def bind_ops(graph: fx.Graph) -> None:
    """Call every op of `graph` through an equivalent binding, if there is one.

    Constraints: `meta["val"]` describes the operands; without it an op is unchanged.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _is_functional(node.target):
            node.target = _find_binding(node)


def _is_functional(target: object) -> bool:
    """Whether `target` is an op of torch without side effects, so that it can be tried."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return not target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def _find_binding(node: fx.Node) -> Call:
    op: Any = node.target
    given = sample_arguments(node)
    if given is None:
        return op
    key = (op, _find_pattern(given))
    if key not in _FOUND:
        wanted = _trace_call(op, given)
        same = (call for call in _list_candidates(op) if _trace_call(call, given) == wanted)
        _FOUND[key] = op if wanted is None else next(same, op)
    return _FOUND[key]


def _list_candidates(op: OpOverload) -> Iterator[Call]:
    name = op.name().split("::")[1].split(".")[0]
    for place in _PLACES:
        found = getattr(place, _NAMES.get(name, name), None)
        if found is not None and type(found).__name__ != "function":
            yield found


def sample_arguments(node: fx.Node) -> Given | None:
    """Sample arguments like the node's, without memory; None if too little is known of them."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if any(v is None or not _is_known(v) for v in values):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _make_concrete(n.meta["val"]))
    return pytree.tree_map(_move_tensors, (tuple(args), dict(kwargs)))


def _is_known(value: object) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return all(not isinstance(n, torch.SymInt) or n.node.has_hint() for n in sizes)


def _make_concrete(value: Any) -> Any:
    """Make a tensor or number with the traced sizes."""
    if isinstance(value, torch.Tensor):
        sizes, strides = map(_find_hint, value.shape), map(_find_hint, value.stride())
        return torch.empty_strided(list(sizes), list(strides), dtype=value.dtype, device="meta")
    return _find_hint(value)


def _find_hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _move_tensors(argument: Any) -> Any:
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _find_pattern(given: Given) -> object:
    """Find what may determine the overload: the kinds of arguments, not their sizes."""
    leaves, spec = pytree.tree_flatten(given)
    return str(spec), tuple(map(_describe_kind, leaves))


def _describe_kind(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return type(leaf) if isinstance(leaf, int | float) else repr(leaf)


class _Trace(TorchDispatchMode):
    """Records what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.seen.append((func, _describe_call((tuple(args), dict(kwargs or {})))))
        return func(*args, **(kwargs or {}))


def _trace_call(call: Call, given: Given) -> object:
    """Trace what `call` dispatches and returns; None if it does not take these arguments."""
    try:
        with _Trace() as trace, torch.no_grad():
            result = call(*given[0], **given[1])
    except (TypeError, RuntimeError, NotImplementedError, ValueError):
        return None
    return trace.seen, _describe_call(result)


def _describe_call(tree: object) -> object:
    leaves, spec = pytree.tree_flatten(tree)
    return str(spec), [_describe_value(leaf) for leaf in leaves]


def _describe_value(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
    return type(leaf), leaf
