"""How the tensors of a cache may lie: as earlier calls left them, and going out as coming in."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autotp.algebra.partition import Partition
from autotp.algebra.placement import REPLICATED, Placement
from autotp.capture.graph_facts import Value
from autotp.errors import PlanError
from autotp.planner.analysis import Analysis, Kept, kept_outputs
from autotp.planner.terms import Terms
from autotp.solver.problem import LEVELS

__all__ = ["Caches"]

Cut = tuple[int | None, tuple[int, ...]]
"""What of a value each rank has, apart from how axes are called: a dim and its encoded split."""


class Caches:
    """The tensors of a program's cache.

    - `outputs`: those that it gives; `paths`: those that it takes, by placeholder.
    """

    def __init__(self, analysis: Analysis, terms: Terms) -> None:
        self.analysis, self.terms = analysis, terms
        self.outputs = kept_outputs(analysis)
        self.paths = {kept.taken: kept.path for kept in self.outputs if kept.taken}

    def taken(self, node: fx.Node, wanted: Sequence[Placement]) -> list[Placement]:
        """How an input may lie: whole if it is no cache's, else as readers want it."""
        path = self.paths.get(node)
        if path is None:
            return [REPLICATED]
        cuts = sorted(p for p in wanted if p.kind == "S")
        return self._as_before(path, (node, 0), [REPLICATED, *cuts])

    def given(self, kept: Kept, made: Sequence[Placement]) -> list[Placement]:
        """How an output may lie: as it was made, or whole."""
        cuts = [p for p in dict.fromkeys(made) if p.kind == "S"]
        return self._as_before(kept.path, kept.value, [REPLICATED, *cuts])

    def tied(
        self, kept: Kept, before: Sequence[Placement], after: Sequence[Placement]
    ) -> NDArray[np.int64]:
        """The costs of an edge by which an output lies as the input whose place it takes."""
        assert kept.taken is not None
        ins = [self._cut(p, (kept.taken, 0)) for p in before]
        outs = [self._cut(p, kept.value) for p in after]
        table = np.zeros((len(LEVELS), len(ins), len(outs)), np.int64)
        table[LEVELS.index("forbidden")] = [[came != goes for goes in outs] for came in ins]
        return table

    def _as_before(self, path: str, value: Value, domain: Sequence[Placement]) -> list[Placement]:
        """What of `domain` is left where calls before this one have left the tensor somehow."""
        record = self.terms.caches.get(path)
        # another class of cache may keep another tensor at that path
        rank = len(self.analysis.dims[value])
        if record is None or (record.dim is not None and record.dim >= rank):
            return list(domain)
        left = [p for p in domain if self._cut(p, value) == (record.dim, record.split)]
        if not left:
            cut = f"cut along {record.axis} ({record.size})" if record.size else "whole"
            raise PlanError(
                f"the cache's {path}: earlier calls hold it {cut}, which of the {len(domain)} "
                "placements in this graph none is. Start from an empty cache."
            )
        return left

    def _cut(self, placement: Placement, value: Value) -> Cut:
        if not placement.is_split:
            return None, ()
        dim = self.analysis.dims[value][placement.dim]
        split = self.analysis.forest.split(dim, Partition.of(placement.axis))
        return placement.dim, split.encode() if split else ()
