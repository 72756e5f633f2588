"""The first wrong node of a sharded model, when it does not equal the whole one.

Forward: every value of the rewritten graphs is a value of the captured program, lying in a known
placement (its trace). Both are run; the first emitted value that breaks its placement's claim
(`agreement`) is named. Backward: a gradient is compared on each *edge*, from the node that reads a
value back to the value. The first wrong edge, from the loss backwards, names the reader: its own
gradient is right, what it hands on is not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autotp.capture.program import Program
from autotp.errors import VerifyError
from autotp.records.trace import Trace, TracedValue
from autotp.runtime.model import ShardedModel
from autotp.verification.agreement import CLAIMS, GRADIENT_KINDS, find_disagreement
from autotp.verification.emitted import EmittedGraph, Value, build_full_graph
from autotp.verification.likely_faults import explain_difference
from autotp.verification.measure import compute_gradients, compute_loss, list_outputs_besides_loss
from autotp.verification.simulate import (
    OUTPUT,
    Observe,
    Read,
    Simulation,
    find_variant,
    simulate,
    walk_ranks,
)

__all__ = ["ComparisonCase", "find_first_divergence"]

Edge: TypeAlias = tuple[str, str]
"""A value read in the ranks' graphs: the flat names of the value and of the node that reads it."""

Reading: TypeAlias = tuple[Value, str]
"""A value read in the program, and the node that reads it."""


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """A whole model and its ranks, and how closely they are to agree.

    - `dtype`: what is computed in; None: as the graphs say.
    - `tolerance`: the largest relative difference of a value that counts as right.
    - `negligible`: gradients below this part of the largest one are compared with that.
    """

    whole: nn.Module
    models: Sequence[ShardedModel]
    program: Program
    inputs: Mapping[str, Any]
    trace: Trace
    seed: int
    dtype: torch.dtype | None = None
    tolerance: float = 0.0
    negligible: float = 0.0

    def run_program(self, observe: Observe | None = None, read: Read | None = None) -> Simulation:
        """The captured program on the whole model, from the case's random state."""
        torch.manual_seed(self.seed)
        part = build_full_graph(self.whole, self.program)
        return walk_ranks(
            [part], self.program, self.inputs, observe=observe, read=read, dtype=self.dtype
        )

    def run_ranks(self, observe: Observe | None = None, read: Read | None = None) -> Simulation:
        """All ranks in lockstep, from the same random state."""
        torch.manual_seed(self.seed)
        return simulate(self.models, self.inputs, observe=observe, read=read, dtype=self.dtype)

    def emitted(self) -> EmittedGraph:
        """What the nodes of the ranks' graphs are."""
        return EmittedGraph(find_variant(self.models[0], self.inputs), self.program, self.trace)


def find_first_divergence(case: ComparisonCase, *, gradients: bool) -> str | None:
    """What the first wrong node is, where it stands and what it means; None if all are right."""
    found = _ForwardSearch(case).found()
    if found is None and gradients:
        found = _BackwardSearch(case).found()
    return found


class _ForwardSearch:
    """The search among values."""

    def __init__(self, case: ComparisonCase) -> None:
        self.case, self.names = case, case.emitted()
        self.values: dict[Value, Tensor] = {}
        self.first: str | None = None

    def found(self) -> str | None:
        """The first wrong value; the node that cannot run, if no value before it is wrong."""
        with torch.no_grad():
            self.case.run_program(observe=self._keep)
            try:
                self.case.run_ranks(observe=self._compare)
            except VerifyError as error:
                return self.first or str(error)
        return self.first

    def _keep(self, name: str, found: list[Tensor]) -> None:
        self.values[self.names.values[name]] = found[0]

    def _compare(self, name: str, parts: list[Tensor]) -> None:
        traced = self.names.of(name)
        whole = self.values.get(self.names.value(traced)) if traced else None
        if self.first is not None or traced is None or whole is None:
            return
        kind, tolerance = traced.placement.kind, self.case.tolerance
        if kind not in CLAIMS:
            return
        gap = find_disagreement(whole, parts, CLAIMS[kind], traced.placement.dim, traced.split)
        if gap.relative > tolerance:
            self.first = (
                f"{self.names.described(name)}: its value should be {traced.placement}, but {gap}. "
                f"{explain_difference(whole, parts, kind, tolerance, 'forward')}"
            )


class _BackwardSearch:
    """The search among the gradients of readings."""

    def __init__(self, case: ComparisonCase) -> None:
        self.case, self.names = case, case.emitted()
        self.whole = self._readings()
        sizes = (float(x.abs().max()) for x in self.whole.values() if x.numel())
        self.floor = max(sizes, default=0.0) * case.negligible

    def found(self) -> str | None:
        """The reader that hands on the first wrong gradient, from the loss backwards."""
        ranks = _EdgeGradients()
        run = self.case.run_ranks(read=ranks.read)
        edges = ranks.gradients(run.outputs, self.case)
        shared = self._shared(edges)
        found = (self._wrong(edge, edges[edge], shared) for edge in reversed(edges))
        return next((text for text in found if text), None)

    def _readings(self) -> dict[Reading, Tensor]:
        """What each reading of the program gives the value it reads."""
        edges = _EdgeGradients()
        run = self.case.run_program(read=edges.read)
        found = edges.gradients(run.outputs, self.case)
        return {(self.names.values[v], reader): g[0] for (v, reader), g in found.items()}

    def _shared(self, edges: Iterable[Edge]) -> set[Reading]:
        """Readings of the program that several edges make up: no one of them is the whole."""
        direct: Counter[Reading] = Counter()
        for edge in edges:
            traced = self.names.of(edge[0])
            if traced is not None and not self.names.converts(traced, edge[1]):
                direct.update(self._realised(traced, edge))
        return {reading for reading, count in direct.items() if count > 1}

    def _realised(self, traced: TracedValue, edge: Edge) -> list[Reading]:
        """The readings of the program that an edge stands for."""
        value = self.names.value(traced)
        readings = ((value, reader) for reader in self.names.consumers(value, edge[1]))
        return [reading for reading in readings if reading in self.whole]

    def _wrong(self, edge: Edge, parts: list[Tensor], shared: set[Reading]) -> str | None:
        """What is wrong with the gradient that an edge gives its value; None if it is right."""
        traced = self.names.of(edge[0])
        readings = self._realised(traced, edge) if traced else []
        if traced is None or not readings or not shared.isdisjoint(readings):
            return None
        if traced.placement.kind not in GRADIENT_KINDS:
            return None
        whole = torch.stack([self.whole[reading] for reading in readings]).sum(0)
        kind, tolerance = GRADIENT_KINDS[traced.placement.kind], self.case.tolerance
        dim, split = traced.placement.dim, traced.split
        gap = find_disagreement(whole, parts, CLAIMS[kind], dim, split, floor=self.floor)
        if gap.relative <= tolerance:
            return None
        name, reader = edge
        fault = explain_difference(whole, parts, kind, tolerance, "backward")
        described = reader if reader == OUTPUT else self.names.described(reader)
        return (
            f"{described}: its own gradient is right, but what it gives {name} "
            f"({traced.placement}) is not: {gap}. {fault}"
        )


class _EdgeGradients:
    """An alias of each value for each node that reads it, on each rank, so that gradients part."""

    def __init__(self) -> None:
        self.aliases: dict[Edge, dict[int, Tensor]] = {}

    def read(self, rank: int, value: str, reader: str, tensor: Tensor) -> Tensor:
        """What a walk is to read through."""
        if not tensor.requires_grad:
            return tensor
        known = self.aliases.setdefault((value, reader), {})
        return known.setdefault(rank, tensor.view_as(tensor))

    def gradients(self, outputs: Sequence[Any], case: ComparisonCase) -> dict[Edge, list[Tensor]]:
        """The gradient of each edge that has one, on each rank, in program order."""
        aside = list_outputs_besides_loss(case.program)
        losses = [compute_loss(output, case.seed, aside) for output in outputs]
        edges = {edge: list(ranks.values()) for edge, ranks in self.aliases.items()}
        found = iter(compute_gradients(losses, [x for own in edges.values() for x in own]))
        rows = {edge: [(x, next(found)) for x in own] for edge, own in edges.items()}
        return {
            edge: [torch.zeros_like(x) if g is None else g for x, g in row]
            for edge, row in rows.items()
            if any(g is not None for _, g in row)
        }
