"""Rules of products with grouped rows: each group of rows is multiplied by its own weight."""

from dataclasses import replace

from torch import fx

from autotp.algebra.axis import Atom, Dim
from autotp.algebra.grouped_rows import Groups
from autotp.oprules.derive.call import Call, apply_notation
from autotp.oprules.notation import parse_rule
from autotp.oprules.rule import Factor, NodeRule

_PRODUCT = parse_rule("t i, e i o -> t o")


def grouped_product(call: Call) -> NodeRule | None:
    """A product of grouped rows with one matrix per group: rows and groups are sharded together.

    Options: `bounds` = the argument that says where each group of rows ends. It is replicated.
    """
    rule = apply_notation(call, _PRODUCT)
    bounds = call.arguments.get(str(call.row.options["bounds"]))
    if rule is None or not isinstance(bounds, fx.Node):
        return None
    rows, experts = (_find_leaf(call, d) for d in (call.operands[0][0], call.operands[1][0]))
    if rows and experts and _can_share_groups(call, rows, experts, bounds.name):
        rows.groups = rows.groups or Groups(experts.name, bounds.name)
        return replace(rule, factors=tuple(_mark_grouped(f, bounds.name) for f in rule.factors))
    return rule


def _can_share_groups(call: Call, rows: Atom, experts: Atom, bounds: str) -> bool:
    """Whether the rows are not grouped yet, or by the same experts and bounds."""
    known = rows.groups
    if known is None:
        return True
    of = call.forest.find_axis(known.axis)
    same = known.bounds == bounds and of.size == experts.size
    return same and call.forest.unify((of,), (experts,))


def _find_leaf(call: Call, dim: Dim) -> Atom | None:
    """The leaf that a dim consists of; None if it has several."""
    flat = call.forest.flatten(dim)
    return flat[0] if len(flat) == 1 and flat[0].segments is None else None


def _mark_grouped(factor: Factor, bounds: str) -> Factor:
    return replace(factor, grouped=bounds) if factor.kind == "unshardable" else factor
