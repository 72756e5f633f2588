"""Which tables are vocabularies: those looked up by an integer input, or by what stands for one."""

import torch
from torch import fx

from autotp.capture.graph_facts import source_of
from autotp.oprules.rulebook import Rulebook
from autotp.planner.analysis import Analysis, Use

__all__ = ["is_table"]

aten = torch.ops.aten
ALIKE = frozenset(
    {
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    }
)
"""Makers of one number everywhere: as ids they stand for an input that was not given."""


def is_table(use: Use, k: int, analysis: Analysis, rulebook: Rulebook) -> bool:
    """Whether operand `k` is looked up by an integer input, moved about but not computed with."""
    if use.rule.emit != "lookup" or k != 0:
        return False
    ids = (o.value[0] for o in use.operands if o.value not in analysis.weights)
    return _is_moved(next(ids), rulebook, set())


def _is_moved(node: fx.Node, rulebook: Rulebook, seen: set[fx.Node]) -> bool:
    if node.op == "placeholder" or node.target in ALIKE:
        return True
    node = source_of(node)[0]
    row = rulebook.rows.get(str(node.target))
    if node in seen or row is None or not row.moves:
        return False
    seen.add(node)
    sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(_is_moved(n, rulebook, seen) for n in sources)
