"""A rank's shards of the caches that a call is given."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from autotp.algebra.split import Split
from autotp.capture.cache import CacheState, restore_cache
from autotp.errors import CaptureError
from autotp.records.plan import CacheRecord
from autotp.runtime.ops.blocks import slice_block


def slice_caches(
    inputs: Mapping[str, Any], records: Mapping[str, CacheRecord], rank: int, tp: int
) -> Mapping[str, Any]:
    """Slice the full tensors of caches among the inputs for this rank.

    A cache is full if the unsharded model made it, or if it was allocated at its sizes. Raises
    CaptureError for a tensor that is neither full nor this rank's shard.
    """
    found: dict[str, list[torch.Tensor]] = {}
    states = ((name, v) for name, v in inputs.items() if isinstance(v, CacheState))
    for number, (name, state) in enumerate(states):
        prefix = f"{number}." if number else ""
        for i, (path, leaf) in enumerate(zip(state.spec.list_paths(), state.leaves, strict=True)):
            record = records.get(prefix + path)
            if record is None or record.dim is None or leaf.numel() == 0:
                continue
            mine, given = _find_local_size(record.split, rank, tp), leaf.shape[record.dim]
            if given == mine:
                continue
            if given != record.size:
                raise CaptureError(
                    f"{name}: {path} has size {given} at dim {record.dim}; the full size is "
                    f"{record.size}, and rank {rank} of {tp} has {mine}. Start from an empty "
                    f"cache, or give the cache of the unsharded model, with size {record.size}."
                )
            own = found.setdefault(name, list(state.leaves))
            own[i] = _slice_tensor(leaf, record, rank, tp)
    if not found:
        return inputs
    return {n: CacheState(v.spec, found[n]) if n in found else v for n, v in inputs.items()}


def slice_full_caches(
    given: Mapping[str, Any],
    inputs: Mapping[str, Any],
    records: Mapping[str, CacheRecord],
    rank: int,
    tp: int,
) -> Mapping[str, Any]:
    """Slice the caches as `slice_caches` does, those in `given` as well."""
    own = slice_caches(inputs, records, rank, tp)
    for name, state in own.items():
        if state is not inputs[name]:
            restore_cache(given[name], state)
    return own


def _slice_tensor(full: torch.Tensor, record: CacheRecord, rank: int, tp: int) -> torch.Tensor:
    """Slice a copy, which does not keep the full tensor alive."""
    assert record.dim is not None
    return slice_block(full, record.dim, Split.decode(record.split), rank, tp).clone()


@lru_cache(maxsize=256)
def _find_local_size(split: tuple[int, ...], rank: int, tp: int) -> int:
    return Split.decode(split).local_length(rank, tp)
