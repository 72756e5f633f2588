"""The cache in a plan: the placement and bytes of each of its tensors."""

from collections.abc import Callable, Iterable

from autotp.algebra.partition import Partition
from autotp.algebra.split import Split
from autotp.capture.sizes import Pricing
from autotp.planner.analysis import CacheOutput, list_cache_outputs
from autotp.planner.summary.findings import Findings
from autotp.records.plan import CacheRecord


def summarise_caches(
    findings: Findings, name_axis: Callable[[Partition], str], pricing: Pricing
) -> dict[str, CacheRecord]:
    """The tensors of the cache by path; `name_axis` returns the printed name of an axis."""
    kept = list_cache_outputs(findings.analysis)
    return {k.path: _summarise_cache(k, findings, name_axis, pricing) for k in kept}


def count_cache_bytes(records: Iterable[CacheRecord], tp: int) -> int:
    """The bytes of all tensors on the fullest rank."""
    return sum(_count_rank_bytes(record, tp) for record in records)


def _count_rank_bytes(record: CacheRecord, tp: int) -> int:
    if record.dim is None:
        return record.bytes
    split = Split.decode(record.split)
    return record.bytes * split.local_length(0, tp) // split.length()


def _summarise_cache(
    kept: CacheOutput, findings: Findings, name_axis: Callable[[Partition], str], pricing: Pricing
) -> CacheRecord:
    analysis, placement = findings.analysis, findings.decision.caches[kept.number]
    meta = analysis.metas[kept.value]
    size = pricing.count_bytes(meta)
    split = analysis.split(kept.value, placement)
    if split is None:
        return CacheRecord(kept.path, bytes=size)
    length = int(meta.shape[placement.dim])
    axis = name_axis(placement.partition)
    return CacheRecord(kept.path, placement.dim, axis, length, split.encode(), size)
