"""Merges the evidence of several calls that were planned together and verified separately."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState
from autotp.records.evidence import Evidence


def fill_inputs(inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The inputs with random numbers by `seed` in place of the zeros in the tensors of a cache."""
    generator = torch.Generator().manual_seed(seed)

    def fill(value: object) -> object:
        if not isinstance(value, CacheState):
            return value
        return CacheState(value.spec, [_fill_input(leaf, generator) for leaf in value.leaves])

    return pytree.tree_map(fill, dict(inputs), is_leaf=lambda x: isinstance(x, CacheState))


def _fill_input(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not leaf.is_floating_point() or leaf.numel() == 0:
        return leaf
    return torch.randn(leaf.shape, generator=generator).to(leaf)


def merge_evidence(evidence: Sequence[Evidence], names: Sequence[str]) -> Evidence:
    """The evidence of all calls: the worst figures, all collectives, the first fault."""
    if len(evidence) == 1:
        return evidence[0]
    named = list(zip(names, evidence, strict=True))
    faults = [f"{name}: {e.first_divergence}" for name, e in named if e.first_divergence]
    return replace(
        evidence[0],
        ok=all(e.ok for e in evidence),
        max_abs_error=max(e.max_abs_error for e in evidence),
        max_rel_error=max(e.max_rel_error for e in evidence),
        collectives_predicted=_sum_counts([e.collectives_predicted for e in evidence]),
        collectives_seen=_sum_counts([e.collectives_seen for e in evidence]),
        first_divergence=next(iter(faults), None),
        notes=tuple(f"{name}: {note}" for name, e in named for note in e.notes),
    )


def _sum_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
