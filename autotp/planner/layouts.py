"""The layouts that people name: by the op that reads a parameter, not by how it is stored.

column      sharded along an axis that the op produces (dim 1 of GPT-2's transposed weights)
row         sharded along an axis that the op contracts
expert      sharded along the expert axis: every rank has complete experts
vocabulary  an embedding or head sharded along the vocabulary; wins over column
norm        a replicated vector that scales or shifts an activation
replicated  the same full tensor on every rank
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import fx

from autotp.algebra.placement import Placement
from autotp.errors import PlanError
from autotp.planner.analysis import Analysis, Matching, Use

LAYOUTS = ("column", "row", "vocabulary", "expert", "replicated")
"""The layouts that an override may request."""


class Layouts:
    """The layouts of one program's parameters."""

    def __init__(self, analysis: Analysis, matching: Matching) -> None:
        self.analysis, self.matching = analysis, matching
        self.experts = {axis.name for axis in matching.experts.values()}

    def name_layout(self, name: str, placement: Placement) -> str:
        """The layout of parameter `name` in `placement`."""
        if name not in self.analysis.parameters:
            return "replicated"
        if not placement.is_split:
            return "norm" if self.is_norm(name) else "replicated"
        pair = self.matching.pair_of.get(name)
        axes = placement.partition.axes
        if self.is_by_expert(name, axes):
            return "expert"
        opens = pair is not None and pair.vocabulary and name in pair.openers
        if pair is not None and opens and {a.name for a in pair.axes} & set(axes):
            return "vocabulary"
        return "row" if self._is_contracted_along(name, axes) else "column"

    def fits(self, name: str, placement: Placement, layout: str) -> bool:
        """Whether `placement` satisfies an override to `layout`."""
        if not placement.is_split:
            return layout == "replicated"
        axes = placement.partition.axes
        if self.is_by_expert(name, axes):
            return layout == "expert"
        contracted = self._is_contracted_along(name, axes)
        plain = "row" if contracted else "column"  # a head along the vocabulary is column-parallel
        return layout in (plain, self.name_layout(name, placement))

    def is_by_expert(self, name: str, axes: Iterable[str]) -> bool:
        """Whether a weight or bias of experts is sharded along the expert axis."""
        return not self.experts.isdisjoint(axes) and not self._is_router(name)

    def _is_router(self, name: str) -> bool:
        """Whether a weight is contracted but is not an expert's: it selects the experts."""
        if name in self.matching.experts:
            return False
        return any(_is_contracted(use, k) for use, k in self.analysis.list_parameter_readers(name))

    def is_norm(self, name: str) -> bool:
        """Whether a vector scales or shifts an activation, rather than being a product's bias."""
        node = self.analysis.parameters[name]
        if len(self.analysis.dims[(node, 0)]) != 1:
            return False
        return all(
            use.rule.ruled
            and self._find_product(use, k) is None
            and all(f.kind != "reduce" for f in use.rule.factors)
            for use, k in self.analysis.list_parameter_readers(name)
        )

    def is_bias(self, name: str) -> bool:
        """Whether a parameter is only ever added to a product."""
        return bool(self.find_products(name))

    def find_products(self, name: str) -> list[fx.Node]:
        """The products that a parameter is only ever added to; empty if it is read otherwise."""
        found = [
            self._find_product(use, k) for use, k in self.analysis.list_parameter_readers(name)
        ]
        return [node for node in found if node] if None not in found else []

    def _find_product(self, use: Use, k: int) -> fx.Node | None:
        """The product that operand `k` is added to, in the same op or right after it."""
        if k in use.rule.bias:
            return use.node
        if len(use.operands) != 2 or frozenset({0, 1}) not in use.rule.linear:
            return None
        product = self.analysis.uses.get(use.operands[1 - k].value[0])
        if product is None or all(f.kind != "reduce" for f in product.rule.factors):
            return None
        return product.node

    def _is_contracted_along(self, name: str, axes: tuple[str, ...]) -> bool:
        for use, k in self.analysis.list_parameter_readers(name):
            for factor in use.rule.factors:
                leaves = {a.name for a in self.analysis.forest.list_leaves(factor.dim)}
                if leaves.intersection(axes) and any(s == k for s, _ in factor.slots):
                    return factor.kind == "reduce"
        return False


def _is_contracted(use: Use, k: int) -> bool:
    """Whether operand `k` is contracted with another."""
    reduced = ({s for s, _ in f.slots} for f in use.rule.factors if f.kind == "reduce")
    return any(k in own and len(own) > 1 for own in reduced)


def matches_glob(name: str, glob: str) -> bool:
    """Whether an override's glob names a parameter, with or without its last component."""
    return fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob)


def check_layout(glob: str, layout: str) -> None:
    """Raise PlanError if `layout`, requested by an override's glob, is not a layout."""
    if layout not in LAYOUTS:
        close = get_close_matches(layout, LAYOUTS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PlanError(
            f"overrides: {glob!r} requests layout {layout!r}; the layouts are "
            f"{', '.join(LAYOUTS)}.{hint}"
        )
