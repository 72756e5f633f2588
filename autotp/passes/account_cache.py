"""What a plan says of the cache: how each of its tensors lies over the ranks, and its bytes."""

from collections.abc import Callable

from autotp.analysis import Kept, kept_outputs
from autotp.core.partition import Partition
from autotp.core.placement import Placement
from autotp.core.plan import CacheRecord
from autotp.core.split import Split
from autotp.passes.account_found import Found
from autotp.sizes import Pricing

__all__ = ["cache_bytes", "caches"]


def caches(found: Found, named: Callable[[str], str]) -> dict[str, CacheRecord]:
    """The tensors of the cache by path; `named` gives an axis the name that people read."""
    kept = kept_outputs(found.analysis)
    return {k.path: _record(k, found.decision.kept[k.number], found, named) for k in kept}


def cache_bytes(found: Found, pricing: Pricing, tp: int) -> int:
    """The bytes that the fullest rank holds of all tensors that the call gives."""
    total = 0
    for kept in kept_outputs(found.analysis):
        size = pricing.bytes(found.analysis.metas[kept.value])
        split = _split(kept, found.decision.kept[kept.number], found)
        total += size * split.local_length(0, tp) // split.length() if split else size
    return total


def _split(kept: Kept, placement: Placement, found: Found) -> Split | None:
    if not placement.is_split:
        return None
    dim = found.analysis.dims[kept.value][placement.dim]
    return found.analysis.forest.split(dim, Partition.of(placement.axis))


def _record(
    kept: Kept, placement: Placement, found: Found, named: Callable[[str], str]
) -> CacheRecord:
    split = _split(kept, placement, found)
    if split is None:
        return CacheRecord(kept.path)
    size = int(found.analysis.metas[kept.value].shape[placement.dim])
    return CacheRecord(kept.path, placement.dim, named(placement.axis), size, split.encode())
