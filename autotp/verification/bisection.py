"""Finds the first wrong node of a sharded model that does not equal the unsharded one.

Forward: every value of the rewritten graphs is a value of the captured program in a known placement
(its trace). Both are run; the first emitted value that violates the claim of its placement
(`agreement`) is reported. Backward: gradients are compared on each *edge*, from a node that reads a
value back to the value. The first wrong edge, from the loss backwards, identifies the reader: its
own gradient is right, the one that it passes on is not.
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

Edge: TypeAlias = tuple[str, str]
"""A value read in the ranks' graphs: the flat names of the value and of the node that reads it."""

Reading: TypeAlias = tuple[Value, str]
"""A value read in the program, and the node that reads it."""


@dataclass(frozen=True, slots=True)
class ComparisonCase:
    """An unsharded model and its ranks, and how closely they must agree.

    - `dtype`: of the computation; None: the dtypes in the graphs.
    - `tolerance`: the largest relative difference of a right value.
    - `negligible`: gradients below this fraction of the largest one are compared with it.
    """

    unsharded: nn.Module
    models: Sequence[ShardedModel]
    program: Program
    inputs: Mapping[str, Any]
    trace: Trace
    seed: int
    dtype: torch.dtype | None = None
    tolerance: float = 0.0
    negligible: float = 0.0

    def run_program(self, observe: Observe | None = None, read: Read | None = None) -> Simulation:
        """The captured program on the unsharded model, from the random state of the case."""
        torch.manual_seed(self.seed)
        graph = build_full_graph(self.unsharded, self.program)
        return walk_ranks(
            [graph], self.program, self.inputs, observe=observe, read=read, dtype=self.dtype
        )

    def run_ranks(self, observe: Observe | None = None, read: Read | None = None) -> Simulation:
        """All ranks in lockstep, from the same random state."""
        torch.manual_seed(self.seed)
        return simulate(self.models, self.inputs, observe=observe, read=read, dtype=self.dtype)

    def build_emitted(self) -> EmittedGraph:
        """The nodes of the ranks' graphs, and what they are in the program."""
        return EmittedGraph(find_variant(self.models[0], self.inputs), self.program, self.trace)


def find_first_divergence(case: ComparisonCase, *, gradients: bool) -> str | None:
    """The first wrong node, where it is and the likely fault; None if all are right."""
    fault = _ForwardSearch(case).find()
    if fault is None and gradients:
        fault = _BackwardSearch(case).find()
    return fault


class _ForwardSearch:
    """Searches the values."""

    def __init__(self, case: ComparisonCase) -> None:
        self.case, self.names = case, case.build_emitted()
        self.values: dict[Value, Tensor] = {}
        self.first: str | None = None

    def find(self) -> str | None:
        """The first wrong value; the node that cannot run, if all values before it are right."""
        with torch.no_grad():
            self.case.run_program(observe=self._keep)
            try:
                self.case.run_ranks(observe=self._compare)
            except VerifyError as error:
                return self.first or str(error)
        return self.first

    def _keep(self, name: str, results: list[Tensor]) -> None:
        self.values[self.names.values[name]] = results[0]

    def _compare(self, name: str, shards: list[Tensor]) -> None:
        traced = self.names.find_traced(name)
        expected = self.values.get(self.names.find_value(traced)) if traced else None
        if self.first is not None or traced is None or expected is None:
            return
        kind, tolerance = traced.placement.kind, self.case.tolerance
        if kind not in CLAIMS:
            return
        gap = find_disagreement(expected, shards, CLAIMS[kind], traced.placement.dim, traced.split)
        if gap.relative > tolerance:
            self.first = (
                f"{self.names.describe(name)}: its value should be {traced.placement}, but {gap}. "
                f"{explain_difference(expected, shards, kind, tolerance, 'forward')}"
            )


class _BackwardSearch:
    """Searches the gradients of readings."""

    def __init__(self, case: ComparisonCase) -> None:
        self.case, self.names = case, case.build_emitted()
        self.expected = self._compute_expected()
        sizes = (float(x.abs().max()) for x in self.expected.values() if x.numel())
        self.floor = max(sizes, default=0.0) * case.negligible

    def find(self) -> str | None:
        """The reader that passes on the first wrong gradient, from the loss backwards."""
        ranks = _EdgeGradients()
        run = self.case.run_ranks(read=ranks.read)
        edges = ranks.compute(run.outputs, self.case)
        shared = self._find_shared(edges)
        faults = (self._explain(edge, edges[edge], shared) for edge in reversed(edges))
        return next((fault for fault in faults if fault), None)

    def _compute_expected(self) -> dict[Reading, Tensor]:
        """The gradient that each reading of the program contributes to the value it reads."""
        edges = _EdgeGradients()
        run = self.case.run_program(read=edges.read)
        gradients = edges.compute(run.outputs, self.case)
        return {(self.names.values[v], reader): g[0] for (v, reader), g in gradients.items()}

    def _find_shared(self, edges: Iterable[Edge]) -> set[Reading]:
        """Readings of the program whose gradient is spread over several edges."""
        direct: Counter[Reading] = Counter()
        for edge in edges:
            traced = self.names.find_traced(edge[0])
            if traced is not None and not self.names.is_conversion(traced, edge[1]):
                direct.update(self._list_readings(traced, edge))
        return {reading for reading, count in direct.items() if count > 1}

    def _list_readings(self, traced: TracedValue, edge: Edge) -> list[Reading]:
        """The readings of the program that an edge represents."""
        value = self.names.find_value(traced)
        readings = ((value, reader) for reader in self.names.find_consumers(value, edge[1]))
        return [reading for reading in readings if reading in self.expected]

    def _explain(self, edge: Edge, shards: list[Tensor], shared: set[Reading]) -> str | None:
        """What is wrong with the gradient that an edge passes to its value; None if it is right."""
        traced = self.names.find_traced(edge[0])
        readings = self._list_readings(traced, edge) if traced else []
        if traced is None or not readings or not shared.isdisjoint(readings):
            return None
        if traced.placement.kind not in GRADIENT_KINDS:
            return None
        expected = torch.stack([self.expected[reading] for reading in readings]).sum(0)
        kind, tolerance = GRADIENT_KINDS[traced.placement.kind], self.case.tolerance
        dim, split = traced.placement.dim, traced.split
        gap = find_disagreement(expected, shards, CLAIMS[kind], dim, split, floor=self.floor)
        if gap.relative <= tolerance:
            return None
        name, reader = edge
        fault = explain_difference(expected, shards, kind, tolerance, "backward")
        described = reader if reader == OUTPUT else self.names.describe(reader)
        return (
            f"{described}: its own gradient is right, but the one that it passes to {name} "
            f"({traced.placement}) is not: {gap}. {fault}"
        )


class _EdgeGradients:
    """An alias of each value for each node that reads it, on each rank, to separate gradients."""

    def __init__(self) -> None:
        self.aliases: dict[Edge, dict[int, Tensor]] = {}

    def read(self, rank: int, value: str, reader: str, tensor: Tensor) -> Tensor:
        """The alias of `tensor` that `reader` reads on `rank`."""
        if not tensor.requires_grad:
            return tensor
        known = self.aliases.setdefault((value, reader), {})
        return known.setdefault(rank, tensor.view_as(tensor))

    def compute(self, outputs: Sequence[Any], case: ComparisonCase) -> dict[Edge, list[Tensor]]:
        """The gradient of each edge that has one, on each rank, in program order."""
        aside = list_outputs_besides_loss(case.program)
        losses = [compute_loss(output, case.seed, aside) for output in outputs]
        edges = {edge: list(ranks.values()) for edge, ranks in self.aliases.items()}
        gradients = iter(compute_gradients(losses, [x for own in edges.values() for x in own]))
        rows = {edge: [(x, next(gradients)) for x in own] for edge, own in edges.items()}
        return {
            edge: [torch.zeros_like(x) if g is None else g for x, g in row]
            for edge, row in rows.items()
            if any(g is not None for _, g in row)
        }
