"""Captures a forward with a cache: flat caches go in and out, and no code branches on lengths.

A cache with a sliding window compares the number of tokens with the window. The graph instead
slices to the window by computed sizes, so it is right both before and after the window is full.
"""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState, learn_dims, list_caches
from autotp.capture.inputs import Axes


@contextmanager
def remove_length_branches() -> Generator[None]:
    """Replace the branches on lengths in window caches, and in the choice to omit a mask."""
    with ExitStack() as stack:
        for cls in _list_window_layers():
            stack.enter_context(_replace_attribute(cls, "update", _update_window))
            stack.enter_context(_replace_attribute(cls, "get_mask_sizes", _compute_mask_sizes))
        if masking := sys.modules.get("transformers.masking_utils"):
            stack.enter_context(_replace_attribute(masking, "_ignore_causal_mask_sdpa", _keep_mask))
        yield


@contextmanager
def _replace_attribute(owner: object, name: str, value: object) -> Generator[None]:
    """Replace an attribute that a class or module defines, until the block ends."""
    defined = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, defined)


def _keep_mask(*_: Any, **__: Any) -> bool:
    return False


def _list_window_layers() -> list[type]:
    """The classes of cache layers that grow up to a window."""
    caches = sys.modules.get("transformers.cache_utils")
    found = getattr(caches, "DynamicSlidingWindowLayer", None)
    return [found] if found is not None else []


def _update_window(self: Any, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """The layer's own `update`, with slices of computed sizes in place of comparisons."""
    if not self.is_initialized:
        self.lazy_initialization(keys, values)
        full = keys, values
    else:
        full = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
    self.cumulative_length += keys.shape[-2]
    if self.record_past:
        self.keys, self.values = full
        seen = self.sliding_window - 1 + keys.shape[-2]
        return _take_last(full[0], seen), _take_last(full[1], seen)
    self.keys, self.values = (_take_last(x, self.sliding_window - 1) for x in full)
    return full


def _take_last(x: torch.Tensor, most: int) -> torch.Tensor:
    """The last `most` positions, or all if there are fewer."""
    length = x.shape[-2]
    first = torch.sym_max(0, length - most)
    # a view would make the capture check contiguity, which depends on the length
    return x.index_select(-2, torch.arange(first, length, device=x.device))


def _compute_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
    """The number of keys that a call attends to, and the position of the first."""
    kept: Any = self.keys.shape[-2] if self.is_initialized else 0
    if self.record_past:
        kept = torch.sym_min(kept, self.sliding_window - 1)
    return kept + query_length, self.cumulative_length - kept


def copy_fixed_states(state: CacheState) -> CacheState:
    """The cache with copies of tensors of fixed size: a forward may write to them in place."""
    grows = ["past" in dims.values() for dims in state.data_dims]
    leaves = [x if g else x.clone() for x, g in zip(state.leaves, grows, strict=True)]
    return CacheState(state.spec, leaves)


def tie_lengths(state: CacheState) -> None:
    """Tie the past lengths of one object, such as those of keys and values, to each other."""
    lengths: dict[str, Any] = {}
    for path, leaf, dims in zip(
        state.spec.list_paths(), state.leaves, state.data_dims, strict=True
    ):
        owner = path.rpartition(".")[0]
        for dim in (d for d, kind in dims.items() if kind == "past" and leaf.numel() != 0):
            equal = lengths.setdefault(owner, leaf.shape[dim]) == leaf.shape[dim]
            torch._check(equal)  # pyright: ignore[reportPrivateUsage]  the way to tell a capture


def list_cache_outputs(spec: pytree.TreeSpec) -> list[CacheState]:
    """The caches among the outputs, each with the numbers of its tensors in the flat output."""
    return list_caches(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))


def learn_cache_dims(exported: ExportedProgram, axes: Mapping[str, Axes]) -> None:
    """Learn the data dims of the caches among the outputs: those whose size is free."""
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None
    named = {node.name: node for node in exported.graph.nodes}
    names = [str(name) for name in exported.graph_signature.user_outputs]
    inputs = [str(name) for name in exported.graph_signature.user_inputs if str(name) in named]
    batches = _list_batch_sizes([named[name] for name in inputs], axes)
    for state in list_cache_outputs(out_spec):
        shapes = [named[names[number]].meta["val"].shape for number in state.leaves]
        learn_dims(state.spec, [_find_free_dims(shape, batches) for shape in shapes])


def _list_batch_sizes(inputs: Sequence[fx.Node], axes: Mapping[str, Axes]) -> list[Any]:
    """The batch sizes of the inputs; the program may not know that they are equal."""
    tensors = [n.meta["val"] for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
    return [
        val.shape[dim]
        for val, of in zip(tensors, axes.values(), strict=True)
        for dim, (kind, _) in of.items()
        if kind == "batch"
    ]


def _find_free_dims(shape: torch.Size, batches: Sequence[Any]) -> Mapping[int, str]:
    free = {d: s for d, s in enumerate(shape) if isinstance(s, torch.SymInt)}
    kinds = {d: "batch" if _is_one_of(s, batches) else "past" for d, s in free.items()}
    # where this call fixed the batch, another may not
    fixed = shape and type(shape[0]) is int and shape[0] in batches
    return {0: "batch"} | kinds if fixed else kinds


def _is_one_of(size: torch.SymInt, batches: Sequence[Any]) -> bool:
    known = [b.node.expr for b in batches if isinstance(b, torch.SymInt)]
    return size.node.expr in known
