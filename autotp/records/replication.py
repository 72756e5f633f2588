"""Replicated parameters, grouped over the layers.

2 × model.layers.*.mlp.gate.weight (1.2 %): not in a pair: …
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from autotp.records.plan import ParameterRecord

MUCH: Final = 0.1
"""The share of replicated bytes above which a plan has a warning."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ReplicatedGroup:
    """`count` equivalent parameters, and the sum of their replicated bytes.

    - `pattern`: their name, with `*` for the numbers in it; `reasons`: why, in the same notation.
    """

    pattern: str
    count: int
    bytes: int
    reasons: tuple[str, ...]


def group_by_layer(parameters: Mapping[str, ParameterRecord]) -> list[ReplicatedGroup]:
    """Group the parameters with replicated bytes by pattern, the largest first."""
    groups: dict[str, list[ParameterRecord]] = {}
    for record in parameters.values():
        if record.replicated_bytes:
            groups.setdefault(star_layers(record.name), []).append(record)
    found = [
        ReplicatedGroup(
            name, len(group), sum(r.replicated_bytes for r in group), _describe_reasons(group)
        )
        for name, group in groups.items()
    ]
    return sorted(found, key=lambda group: -group.bytes)


def describe_excess_replication(parameters: Mapping[str, ParameterRecord], tp: int) -> str:
    """Describe the replication on `tp` ranks if it exceeds a tenth of the bytes; else give ""."""
    listed = group_by_layer(parameters)
    total = sum(r.bytes for r in parameters.values())
    replicated = sum(group.bytes for group in listed)
    if tp == 1 or replicated <= MUCH * total:
        return ""
    largest = "; ".join(
        f"{group.count} × {group.pattern} ({100 * group.bytes / total:.3g} %): "
        f"{' or '.join(group.reasons)}"
        for group in listed[:_SHOWN]
    )
    more = f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return (
        f"{100 * replicated / total:.3g} % of the parameter bytes are replicated on every rank, "
        f"more than {100 * MUCH:.0f} %. The largest: {largest}{more} (see 'Replicated parameters')"
    )


def star_layers(text: str) -> str:
    """Replace the numbers in dotted paths by `*`: `model.layers.*.mlp`."""
    return re.sub(r"(?:(?<=\.)|(?<=at )|^)\d+(?!\w)", "*", text)


def _describe_reasons(group: Iterable[ParameterRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(star_layers(r.reason) for r in group))
