"""What a plan says of the cache: how each of its tensors lies over the ranks, and its bytes."""

from collections.abc import Callable, Iterable

from autotp.algebra.partition import Partition
from autotp.algebra.split import Split
from autotp.capture.sizes import Pricing
from autotp.planner.analysis import CacheOutput, list_cache_outputs
from autotp.planner.summary.findings import Findings
from autotp.records.plan import CacheRecord

__all__ = ["summarise_caches", "count_cache_bytes"]


def summarise_caches(
    findings: Findings, named: Callable[[Partition], str], pricing: Pricing
) -> dict[str, CacheRecord]:
    """The tensors of the cache by path; `named` gives an axis the name that people read."""
    kept = list_cache_outputs(findings.analysis)
    return {k.path: _record(k, findings, named, pricing) for k in kept}


def count_cache_bytes(records: Iterable[CacheRecord], tp: int) -> int:
    """The bytes of all tensors on the fullest rank."""
    return sum(_held(record, tp) for record in records)


def _held(record: CacheRecord, tp: int) -> int:
    if record.dim is None:
        return record.bytes
    split = Split.decode(record.split)
    return record.bytes * split.local_length(0, tp) // split.length()


def _record(
    kept: CacheOutput, findings: Findings, named: Callable[[Partition], str], pricing: Pricing
) -> CacheRecord:
    analysis, placement = findings.analysis, findings.decision.kept[kept.number]
    meta = analysis.metas[kept.value]
    size = pricing.bytes(meta)
    split = analysis.split(kept.value, placement)
    if split is None:
        return CacheRecord(kept.path, bytes=size)
    length = int(meta.shape[placement.dim])
    axis = named(placement.partition)
    return CacheRecord(kept.path, placement.dim, axis, length, split.encode(), size)
