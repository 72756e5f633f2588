"""What a plan says of the cache: how each of its tensors lies over the ranks."""

from collections.abc import Callable

from autotp.analysis import Kept, kept_outputs
from autotp.core.partition import Partition
from autotp.core.placement import Placement
from autotp.core.plan import CacheRecord
from autotp.passes.account_found import Found

__all__ = ["caches"]


def caches(found: Found, named: Callable[[str], str]) -> dict[str, CacheRecord]:
    """The tensors of the cache by path; `named` gives an axis the name that people read."""
    kept = kept_outputs(found.analysis)
    return {k.path: _record(k, found.decision.kept[k.number], found, named) for k in kept}


def _record(
    kept: Kept, placement: Placement, found: Found, named: Callable[[str], str]
) -> CacheRecord:
    if not placement.is_split:
        return CacheRecord(kept.path)
    analysis = found.analysis
    dim = analysis.dims[kept.value][placement.dim]
    split = analysis.forest.split(dim, Partition.of(placement.axis))
    assert split is not None, f"{placement} has no split"
    size = int(analysis.metas[kept.value].shape[placement.dim])
    return CacheRecord(kept.path, placement.dim, named(placement.axis), size, split.encode())
