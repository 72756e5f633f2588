"""Ops called through Python's bindings: `torch.mul(x, y)` for `torch.ops.aten.mul.Tensor(x, y)`.

The op is the same, and the way to it half as long, which is what a small model's time goes into.
That it is the same is shown, not taken from a table: both calls are made once on tensors without
memory, and what reaches the dispatcher must be equal, argument by argument.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["bind_ops", "sample_arguments"]

# Any: whatever an op takes and gives
Call: TypeAlias = Callable[..., Any]
Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# private: where torch keeps the bindings of what torch.nn.functional calls
_PLACES: tuple[Any, ...] = (torch, getattr(torch._C, "_nn"), torch.Tensor)  # noqa: B009  # pyright: ignore[reportPrivateUsage]
_NAMES = {"sym_size": "size"}
_FOUND: dict[object, Call] = {}


def bind_ops(graph: fx.Graph) -> None:
    """Calls every op of `graph` through its binding, where it has one that does the same.

    Constraints: `meta["val"]` says what the operands are like; without it an op stays as it is.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _may_differ(node.target):
            node.target = _find_binding(node)


def _may_differ(target: object) -> bool:
    """Whether `target` is an op of torch that writes nothing, so that it can be tried."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return not target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def _find_binding(node: fx.Node) -> Call:
    op: Any = node.target
    given = sample_arguments(node)
    if given is None:
        return op
    key = (op, _pattern(given))
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
    """Arguments like the node's, without memory; None where too little is known of them."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    if any(v is None or not _is_known(v) for v in values):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _concrete(n.meta["val"]))
    return pytree.tree_map(_move_tensors, (tuple(args), dict(kwargs)))


def _is_known(value: object) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return all(not isinstance(n, torch.SymInt) or n.node.has_hint() for n in sizes)


def _concrete(value: Any) -> Any:
    """A tensor or number of the sizes that were traced."""
    if isinstance(value, torch.Tensor):
        sizes, strides = map(_hint, value.shape), map(_hint, value.stride())
        return torch.empty_strided(list(sizes), list(strides), dtype=value.dtype, device="meta")
    return _hint(value)


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _move_tensors(argument: Any) -> Any:
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _pattern(given: Given) -> object:
    """What a binding may choose an overload by: kinds of arguments, not their sizes."""
    leaves, spec = pytree.tree_flatten(given)
    return str(spec), tuple(map(_kind, leaves))


def _kind(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return type(leaf) if isinstance(leaf, int | float) else repr(leaf)


class _Trace(TorchDispatchMode):
    """Notes what reaches the dispatcher."""

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
    """What `call` sends to the dispatcher and gives back; None where it takes no such arguments."""
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
