"""The figures of one comparison: each output and gradient, ranks against the unsharded model."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from autotp.records.plan import ParameterRecord, Plan
from autotp.verification.agreement import Difference, find_disagreement
from autotp.verification.measure import Results


class Quantity(NamedTuple):
    """What a figure measures: an output or a gradient."""

    kind: Literal["output", "gradient"]
    name: str

    def __str__(self) -> str:
        """E.g. `logits`, `gradient of lm_head.weight`."""
        return self.name if self.kind == "output" else f"gradient of {self.name}"


@dataclass(slots=True)
class Figures:
    """All differences of one run; `failure`: why the ranks could not run, empty if they did."""

    gaps: dict[Quantity, Difference] = field(default_factory=dict[Quantity, Difference])
    collectives: Counter[str] = field(default_factory=Counter[str])
    failure: str = ""

    def find_above(self, limit: float) -> set[Quantity]:
        """The quantities that differ by more than `limit`."""
        return {about for about, gap in self.gaps.items() if gap.relative > limit}

    def find_worst(self, negligible: float) -> float:
        """The largest relative difference that is neither zero nor infinite.

        Gradients are divided by at least `negligible` × the largest gradient.
        """
        finite = [(about, g) for about, g in self.gaps.items() if 0 < g.relative < math.inf]
        scales = {about: gap.absolute / gap.relative for about, gap in finite}
        floor = negligible * max((s for a, s in scales.items() if a.kind == "gradient"), default=0)
        floors = {"gradient": floor, "output": 0.0}
        relative = (gap.absolute / max(scales[about], floors[about.kind]) for about, gap in finite)
        return max(relative, default=0.0)

    def select(self, kind: str) -> dict[str, Difference]:
        """The differences of all outputs, or of all gradients, by name."""
        return {about.name: gap for about, gap in self.gaps.items() if about.kind == kind}


def measure_gaps(
    unsharded: Results, ranks: Sequence[Results], plan: Plan | None, negligible: float
) -> dict[Quantity, Difference]:
    """How far the ranks are from the unsharded model, in each output and gradient.

    - `plan`: says how gradients are concatenated; without one, each is replicated.
    - `negligible`: gradients below this fraction of the largest one are compared with it: some,
      such as those of a bias before softmax, are zero except for rounding.
    """
    records = _index_records(plan)
    floor = negligible * _find_largest(unsharded.gradients.values())
    gaps = {Quantity("output", name): gap for name, gap in _measure_outputs(unsharded, ranks)}
    return gaps | {
        Quantity("gradient", name): _measure_gradient(
            unsharded, ranks, name, records.get(name), floor
        )
        for name in unsharded.gradients
    }


def _measure_outputs(
    unsharded: Results, ranks: Sequence[Results]
) -> Iterator[tuple[str, Difference]]:
    """The difference of each output, on the rank where it is largest."""
    for name in {**unsharded.outputs, **ranks[0].outputs}:
        sides = [results.outputs.get(name) for results in (unsharded, *ranks)]
        present = [x for x in sides if x is not None]
        if len(present) < len(sides):
            yield name, _make_infinite("only one side has this output")
        elif broken := _find_nonfinite(present):
            yield name, _make_infinite(broken)
        else:
            yield name, find_disagreement(present[0], present[1:], "each")


def _measure_gradient(
    unsharded: Results,
    ranks: Sequence[Results],
    name: str,
    record: ParameterRecord | None,
    floor: float,
) -> Difference:
    """The difference of one gradient: of the concatenated shards, or else on the worst rank.

    Constraints: a missing gradient counts as zeros.
    """
    sides = [results.gradients[name] for results in (unsharded, *ranks)]
    like = next((x for x in sides if x is not None), None)
    if like is None:
        return Difference(0.0, 0.0)
    shapes = (
        [record.shape, *(s.shape for s in record.shards)] if record else [like.shape] * len(sides)
    )
    full, *shards = [
        _make_zeros(s, like) if x is None else x for x, s in zip(sides, shapes, strict=True)
    ]
    if broken := _find_nonfinite([full, *shards]):
        return _make_infinite(broken)
    if record is None or record.dim is None:
        return find_disagreement(full, shards, "each", floor=floor)
    return find_disagreement(full, shards, "concatenation", record.dim, record.split, floor=floor)


def _index_records(plan: Plan | None) -> dict[str, ParameterRecord]:
    records = plan.parameters.values() if plan else ()
    return {name: record for record in records for name in (record.name, *record.tied)}


def _make_zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)


def _make_infinite(reason: str) -> Difference:
    return Difference(math.inf, math.inf, reason=reason)


def _find_nonfinite(sides: Sequence[Tensor]) -> str:
    """Which side has NaN or infinity, which are wrong even if all agree; empty if none has."""
    who = ["the unsharded model", *(f"rank {rank}" for rank in range(len(sides) - 1))]
    counts: Mapping[str, int] = {
        w: int((~x.isfinite()).sum()) for w, x in zip(who, sides, strict=True)
    }
    return next((f"{w} has {n} values of NaN or infinity" for w, n in counts.items() if n), "")


def _find_largest(tensors: Iterable[Tensor | None]) -> float:
    sizes = [float(x.abs().max()) for x in tensors if x is not None and x.numel()]
    return max(sizes, default=0.0)
