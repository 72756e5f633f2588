"""What a forward carries between calls (keys and values, states of convolutions and recurrences),
as plain tensors.

A cache is a tree of plain objects: layers with tensors, flags, and numbers that count tokens. It
becomes a `CacheState`: the tree without its tensors, which is compared and hashed (`CacheSpec`),
and the tensors in order. A number that grows from call to call becomes a tensor of shape (number,
0): a graph reads it as a size, and it takes no memory.

No class of a cache or of a model is named here.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.errors import CaptureError
from autotp.records.plan import CacheRecord

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None), type, torch.Size)
_PLAIN = (torch.Tensor, *_CONSTANTS, torch.SymInt, list, tuple, dict, set, frozenset, nn.Module)
_DEEPEST = 16

COUNTED: Final[set[tuple[type, object]]] = set()
"""Class and attribute of the numbers that count tokens, as found by captures."""
_DATA_DIMS: Final[dict[object, tuple[Mapping[int, str], ...]]] = {}
"""For each tensor of a cache of that layout, the dims whose size belongs to the data, and their
kind, `batch` or `past`; learned from captures that return such a cache."""

Kind: TypeAlias = Literal["tensor", "count", "constant", "object", "list", "tuple", "dict"]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache without its tensors.

    - `kind`: of this subtree; `what`: the constant, or the class of an object.
    - `keys`: attribute names, dict keys or indices of `items`.

    Example: a layer with keys and values is `object`, its class, with the keys `keys`, `values`.
    """

    kind: Kind
    what: Any = None
    keys: tuple[Any, ...] = ()
    items: tuple["CacheSpec", ...] = ()

    def list_paths(self, prefix: str = "") -> Iterator[str]:
        """The path of each tensor, in order: `layers.0.keys`."""
        if self.kind in ("tensor", "count"):
            yield prefix
        for key, item in zip(self.keys, self.items, strict=True):
            yield from item.list_paths(f"{prefix}.{key}" if prefix else str(key))

    @property
    def layout(self) -> object:
        """What caches with corresponding tensors have in common: the class and the paths."""
        return self.what, tuple(self.list_paths())

    def __str__(self) -> str:
        """The class and a digest of all else, equal in all processes: `DynamicCache#1f0c`."""
        return make_mark(self)

    def __repr__(self) -> str:
        """The same: a tree of many layers is unreadable."""
        return str(self)


@dataclass(frozen=True, slots=True, eq=False)
class CacheState:
    """A cache as a graph takes it: its spec and its tensors."""

    spec: CacheSpec
    leaves: Sequence[Any]

    @property
    def is_known(self) -> bool:
        """Whether a capture has returned such a cache, so that its data dims are known."""
        return self.spec.layout in _DATA_DIMS

    @property
    def data_dims(self) -> tuple[Mapping[int, str], ...]:
        """For each tensor the dims whose size belongs to the data, with their kind."""
        return _DATA_DIMS.get(self.spec.layout, ({},) * len(self.leaves))

    def __getitem__(self, index: int) -> torch.Tensor:
        """A tensor by its number, as guards refer to it."""
        return self.leaves[index]


def _flatten(state: CacheState) -> tuple[list[Any], Any]:
    return list(state.leaves), state.spec


def _flatten_with_keys(state: CacheState) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
    make = cast("Callable[[int], pytree.KeyEntry]", pytree.SequenceKey)
    keys = map(make, range(len(state.leaves)))
    return list(zip(keys, state.leaves, strict=True)), state.spec


pytree.register_pytree_node(
    CacheState,
    _flatten,
    lambda leaves, spec: CacheState(cast("CacheSpec", spec), list(leaves)),
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="autotp.capture.cache.CacheState",
)


def is_cache(value: object) -> bool:
    """Whether `value` is an object that carries state: its class has a method `update…`."""
    return _is_object(value) and any(name.startswith("update") for name in dir(type(value)))


def _is_object(value: object) -> bool:
    """Whether `value` is neither a tensor, a constant nor a tree."""
    return (
        not isinstance(value, (*_PLAIN, CacheState))
        and hasattr(value, "__dict__")
        and not callable(value)
        and type(value) not in pytree.SUPPORTED_NODES
    )


def learn_dims(spec: CacheSpec, dims: Sequence[Mapping[int, str]]) -> None:
    """Record the data dims of a cache's tensors, unless they are known."""
    _DATA_DIMS.setdefault(spec.layout, tuple(dims))


def flatten_cache(cache: object) -> CacheState:
    """The spec and the tensors of a cache; the tensors are not copied.

    Raises CaptureError for what a graph cannot carry: streams, functions, cycles.
    """
    leaves: list[torch.Tensor] = []
    spec = _Flattener(type(cache).__name__, leaves).flatten(cache, (), type(None), "")
    return CacheState(spec, leaves)


def rebuild_cache(state: CacheState) -> Any:
    """A new cache of the same classes with the tensors of `state`."""
    return _make_object(state.spec, iter(state.leaves))


def restore_cache(cache: object, state: CacheState) -> None:
    """Put the tensors of `state` into the objects of `cache`, which keep their identity."""
    _fill_object(cache, state.spec, iter(state.leaves))


def flatten_caches(tree: Any) -> Any:
    """`tree` with every cache in it flattened."""
    return pytree.tree_map(_flatten_value, tree)


def rebuild_caches(tree: Any) -> Any:
    """`tree` with every flat cache in it rebuilt."""
    return pytree.tree_map(_rebuild_value, tree, is_leaf=_is_flat)


def restore_caches(output: Any, given: Mapping[str, Any]) -> Any:
    """`output` with real caches: the ones in the inputs, updated in place, where there are any."""
    states = list_caches(output)
    if not states:
        return output
    caches = [x for x in pytree.tree_leaves(dict(given)) if is_cache(x)]
    known = {id(state): cache for state, cache in zip(states, caches, strict=False)}

    def restore(x: Any) -> Any:
        if not _is_flat(x) or id(x) not in known:  # a compiler guards on objects passed to id()
            return _rebuild_value(x)
        restore_cache(known[id(x)], x)
        return known[id(x)]

    return pytree.tree_map(restore, output, is_leaf=_is_flat)


def widen_caches(inputs: Mapping[str, Any], records: Mapping[str, CacheRecord]) -> dict[str, Any]:
    """The inputs with each sharded tensor of a cache replaced by zeros of the unsharded size."""
    states = [v for v in inputs.values() if isinstance(v, CacheState)]
    widened = {id(s): _widen(s, f"{k}." if k else "", records) for k, s in enumerate(states)}
    return {name: widened.get(id(value), value) for name, value in inputs.items()}


def _widen(state: CacheState, prefix: str, records: Mapping[str, CacheRecord]) -> CacheState:
    leaves = list(state.leaves)
    for i, path in enumerate(state.spec.list_paths()):
        record = records.get(prefix + path)
        if record is not None and record.dim is not None and record.dim < leaves[i].dim():
            shape = list(leaves[i].shape)
            shape[record.dim] = record.size
            leaves[i] = leaves[i].new_zeros(shape)
    return CacheState(state.spec, leaves)


def list_caches(tree: Any) -> list[CacheState]:
    """The flat caches in `tree`, in order."""
    return [x for x in pytree.tree_leaves(tree, is_leaf=_is_flat) if isinstance(x, CacheState)]


def _is_flat(value: object) -> bool:
    return isinstance(value, CacheState)


def _flatten_value(value: Any) -> Any:
    return flatten_cache(value) if is_cache(value) else value


def _rebuild_value(value: Any) -> Any:
    return rebuild_cache(value) if isinstance(value, CacheState) else value


@dataclass(slots=True)
class _Flattener:
    """Flattens one cache."""

    name: str
    leaves: list[torch.Tensor]

    def flatten(self, value: Any, path: tuple[Any, ...], owner: type, key: object) -> CacheSpec:
        if isinstance(value, torch.Tensor):
            self.leaves.append(value)
            return CacheSpec("tensor")
        if isinstance(value, torch.SymInt):
            COUNTED.add((owner, key))
            return self._add_count(value)
        if type(value) is int and value > 0 and (owner, key) in COUNTED:
            return self._add_count(value)
        if isinstance(value, _CONSTANTS):
            return CacheSpec("constant", value)
        if len(path) > _DEEPEST:
            raise CaptureError(
                self._explain_refusal(path, f"nested more than {_DEEPEST} deep, or a cycle")
            )
        return self._flatten_tree(value, path)

    def _add_count(self, number: int | torch.SymInt) -> CacheSpec:
        self.leaves.append(torch.empty((cast("int", number), 0)))
        return CacheSpec("count")

    def _flatten_tree(self, value: Any, path: tuple[Any, ...]) -> CacheSpec:
        kind: Kind
        if isinstance(value, list | tuple):
            sequence = cast("Sequence[object]", value)
            kind, items = (
                ("list" if isinstance(value, list) else "tuple"),
                dict(enumerate(sequence)),
            )
        elif type(value) is dict:
            kind, items = "dict", cast("dict[Any, object]", value)
        elif _is_object(value):
            kind, items = "object", cast("dict[Any, object]", vars(value))
        else:
            raise CaptureError(self._explain_refusal(path, f"a {type(value).__name__}"))
        owner = type(value)
        if not path:  # flags that generation sets on a cache for its own use
            items = {k: v for k, v in items.items() if not (str(k)[:1] == "_" and type(v) is bool)}
        specs = tuple(self.flatten(v, (*path, k), owner, k) for k, v in items.items())
        return CacheSpec(kind, owner if kind == "object" else None, tuple(items), specs)

    def _explain_refusal(self, path: tuple[Any, ...], what: str) -> str:
        return (
            f"the cache {self.name}: {'.'.join(map(str, path))} is {what}, which a graph can "
            "neither take nor return. Use a plain cache, without offloading or quantisation."
        )


def _make_object(spec: CacheSpec, leaves: Iterator[Any]) -> Any:
    if spec.kind == "tensor":
        return next(leaves)
    if spec.kind == "count":
        return next(leaves).shape[0]
    if spec.kind == "constant":
        return spec.what
    values = [_make_object(item, leaves) for item in spec.items]
    if spec.kind == "object":
        made = spec.what.__new__(spec.what)
        vars(made).update(zip(spec.keys, values, strict=True))
        return made
    if spec.kind == "dict":
        return dict(zip(spec.keys, values, strict=True))
    return values if spec.kind == "list" else tuple(values)


def _fill_object(old: Any, spec: CacheSpec, leaves: Iterator[Any]) -> Any:
    """The value for the place of `old`: the same object, updated, if its class is the same."""
    if spec.kind == "object" and type(old) is spec.what:
        attributes = vars(old)
        for key, item in zip(spec.keys, spec.items, strict=True):
            attributes[key] = _fill_object(attributes.get(key), item, leaves)
        return old
    if spec.kind == "list" and type(old) is list and len(cast("list[Any]", old)) == len(spec.items):
        old[:] = [_fill_object(o, item, leaves) for o, item in zip(old, spec.items, strict=True)]
        return old
    return _make_object(spec, leaves)


def make_mark(spec: CacheSpec) -> str:
    """The class and a digest of all else, computed so that a compiler can trace it."""
    return _compute_mark(spec) if torch.compiler.is_compiling() else _cached_mark(spec)


def _compute_mark(spec: CacheSpec) -> str:
    name = spec.what.__name__ if isinstance(spec.what, type) else spec.kind
    return f"{name}#{_digest_spec(_describe_spec(spec))}"


_cached_mark = lru_cache(maxsize=256)(_compute_mark)


@torch.compiler.assume_constant_result
def _digest_spec(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:8]


def _describe_spec(spec: CacheSpec) -> str:
    what = spec.what.__qualname__ if isinstance(spec.what, type) else repr(spec.what)
    inner = ", ".join(
        [f"{k!r}: {_describe_spec(i)}" for k, i in zip(spec.keys, spec.items, strict=True)]
    )
    return f"{spec.kind} {what} ({inner})"
