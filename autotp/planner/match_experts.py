"""Experts: the axis that stacks the weights of all experts of a pair.

Each expert processes its own rows (a grouped product), or every expert all rows (a batched one).
Up and down projections both have the axis, so it has no opener and closer and is not a pair. But a
pair can be sharded along it: by complete experts, instead of each expert along its hidden axis. It
is a second home axis of the weights.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autotp.algebra.axis import Atom
from autotp.planner.analysis import Analysis, Matching, Use


def add_experts(analysis: Analysis, found: Matching, rest: Matching) -> Matching:
    """Both matchings as one, the experts of its pairs found, as one more home of their weights."""
    pairs, pair_of = found.pairs + rest.pairs, found.pair_of | rest.pair_of
    matching = replace(found, pairs=pairs, home=found.home | rest.home, pair_of=pair_of)
    weights = _find_expert_weights(analysis, matching)
    home = {name: (*matching.home[name], axis) for name, axis in weights.items()}
    experts = weights | _find_expert_biases(analysis, set(weights.values()))
    return replace(matching, home=matching.home | home, experts=experts)


def _find_expert_weights(analysis: Analysis, matching: Matching) -> dict[str, Atom]:
    """The axis of experts of each weight of a pair that has one."""
    shared = _find_shared_axes(analysis)
    paired = {axis for pair in matching.pairs for axis in pair.axes}
    found: dict[str, Atom] = {}
    for name, pair in matching.pair_of.items():
        sides = [[_list_axes(analysis, n) for n in names] for names in (pair.openers, pair.closers)]
        several = {a for n in (*pair.openers, *pair.closers) for a in shared[n]} - paired
        for axis in _list_axes(analysis, name):
            joint = all(any(axis in own for own in side) for side in sides)
            if axis in several and joint and not pair.vocabulary:
                found.setdefault(name, axis)
    return found


def _find_expert_biases(analysis: Analysis, experts: set[Atom]) -> dict[str, Atom]:
    """The expert axis of each bias that is looked up for the rows of an expert."""
    found: dict[str, Atom] = {}
    for use in analysis.uses.values() if experts else ():
        for factor in (f for f in use.rule.factors if f.grouped and f.kind == "reduce"):
            node = use.operands[factor.slots[0][0]].value[0]
            if str(node.target) in analysis.parameters:
                found.update((str(node.target), a) for a in analysis.forest.flatten(factor.dim))
    return found


def _list_axes(analysis: Analysis, name: str) -> dict[Atom, None]:
    """The axes that are complete dims of a parameter."""
    dims = analysis.dims[(analysis.parameters[name], 0)]
    flat = [analysis.forest.flatten(dim) for dim in dims]
    return dict.fromkeys(dim[0] for dim in flat if len(dim) == 1 and dim[0].is_splittable)


def _find_shared_axes(analysis: Analysis) -> dict[str, set[Atom]]:
    """For each parameter that is contracted, its axes that activations have too, or whose groups
    are.
    """
    found: dict[str, set[Atom]] = defaultdict(set)
    for name in analysis.parameters:
        for use, k in analysis.list_parameter_readers(name):
            found[name].update(_find_expert_axes(analysis, use, k))
    return found


def _find_expert_axes(analysis: Analysis, use: Use, k: int) -> Iterator[Atom]:
    """The axes along which operand `k`, contracted with an activation, is one weight of several."""
    active = {s for s, o in enumerate(use.operands) if o.value not in analysis.weights}
    slots = [({s for s, _ in f.slots if s >= 0}, f) for f in use.rule.factors]
    if not any(f.kind == "reduce" and k in own and own & active for own, f in slots):
        return
    for own, factor in slots:
        batch = factor.kind == "pass" and own & active
        if k in own and (batch or factor.grouped):
            yield from (a for a in analysis.forest.flatten(factor.dim) if a.is_splittable)
