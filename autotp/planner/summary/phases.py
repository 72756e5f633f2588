"""What a plan says of calls that were planned together with its own."""

from collections.abc import Sequence
from dataclasses import replace

from autotp.records.plan import PhaseRecord, Plan

__all__ = ["add_phases"]

_NAMES = ("prefill", "decode")


def add_phases(first: Plan, later: Sequence[Plan], often: Sequence[int]) -> Plan:
    """The plan `first`, itself one without `later` ones, with all phases and the longest cache."""
    if not later:
        return first
    plans = zip(_NAMES, often, (first, *later), strict=True)
    held = max(plan.memory.get("kv_cache", 0) for plan in (first, *later))
    return replace(
        first,
        phases=tuple(_summarise_phase(*of) for of in plans),
        memory={**first.memory, "kv_cache": held},
        caches={**first.caches, **{k: c for plan in later for k, c in plan.caches.items()}},
        warnings=tuple(dict.fromkeys(w for plan in (first, *later) for w in plan.warnings)),
    )


def _summarise_phase(name: str, calls: int, plan: Plan) -> PhaseRecord:
    time = sum(record.time_ps for record in plan.collectives)
    return PhaseRecord(name, calls, plan.variant, plan.sizes, plan.collectives, time)
