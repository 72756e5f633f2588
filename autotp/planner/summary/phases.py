"""The phases of a plan: prefill and decode, planned together."""

from collections.abc import Sequence
from dataclasses import replace

from autotp.records.plan import PhaseRecord, Plan

_NAMES = ("prefill", "decode")


def add_phases(first: Plan, later: Sequence[Plan], often: Sequence[int]) -> Plan:
    """The plan `first` with all phases and the longest cache; unchanged without `later` plans."""
    if not later:
        return first
    plans = zip(_NAMES, often, (first, *later), strict=True)
    cache = max(plan.memory.get("kv_cache", 0) for plan in (first, *later))
    return replace(
        first,
        phases=tuple(_summarise_phase(*of) for of in plans),
        memory={**first.memory, "kv_cache": cache},
        caches={**first.caches, **{k: c for plan in later for k, c in plan.caches.items()}},
        warnings=tuple(dict.fromkeys(w for plan in (first, *later) for w in plan.warnings)),
    )


def _summarise_phase(name: str, calls: int, plan: Plan) -> PhaseRecord:
    time = sum(record.time_ps for record in plan.collectives)
    return PhaseRecord(name, calls, plan.variant, plan.sizes, plan.collectives, time)
