"""What every rank holds whole: parameters that repeat over the layers counted as one.

2 x model.layers.*.mlp.gate.weight, 1.2 % of the bytes: it is in no pair: …
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from autotp.records.plan import ParameterRecord

__all__ = ["ReplicatedGroup", "group_by_layer", "describe_excess_replication", "star_layers"]

MUCH: Final = 0.1
"""The share of the bytes above which a plan is warned about."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ReplicatedGroup:
    """`count` parameters alike, with the bytes of them that every rank holds.

    - `pattern`: their name, `*` for the numbers in it; `reasons`: why, in the same notation.
    """

    pattern: str
    count: int
    bytes: int
    reasons: tuple[str, ...]


def group_by_layer(parameters: Mapping[str, ParameterRecord]) -> list[ReplicatedGroup]:
    """Each distinct parameter of which every rank holds something, the largest first."""
    groups: dict[str, list[ParameterRecord]] = {}
    for record in parameters.values():
        if record.whole_bytes:
            groups.setdefault(star_layers(record.name), []).append(record)
    found = [
        ReplicatedGroup(
            name, len(group), sum(r.whole_bytes for r in group), _describe_reasons(group)
        )
        for name, group in groups.items()
    ]
    return sorted(found, key=lambda held: -held.bytes)


def describe_excess_replication(parameters: Mapping[str, ParameterRecord], tp: int) -> str:
    """The warning that `tp` ranks hold more than a tenth of the bytes whole; else empty."""
    listed = group_by_layer(parameters)
    total = sum(r.bytes for r in parameters.values())
    whole = sum(held.bytes for held in listed)
    if tp == 1 or whole <= MUCH * total:
        return ""
    told = "; ".join(
        f"{held.count} × {held.pattern} ({100 * held.bytes / total:.3g} %): "
        f"{' or '.join(held.reasons)}"
        for held in listed[:_SHOWN]
    )
    more = f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return (
        f"every rank holds {100 * whole / total:.3g} % of the parameter bytes whole, "
        f"more than {100 * MUCH:.0f} %. The largest: {told}{more} (see 'Whole on every rank')"
    )


def star_layers(text: str) -> str:
    """`text` with `*` for the numbers in dotted paths: `model.layers.*.mlp`."""
    return re.sub(r"(?:(?<=\.)|(?<=at )|^)\d+(?!\w)", "*", text)


def _describe_reasons(group: Iterable[ParameterRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(star_layers(r.reason) for r in group))
