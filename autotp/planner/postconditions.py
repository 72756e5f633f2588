"""The postconditions of propagate, match and formulate, on which the next stage relies.

Each yields faults, with the node, its module path and its source line, and with both sides of the
contradiction.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.algebra.placement import REPLICATED, Placement
from autotp.algebra.size import Size
from autotp.capture.graph_facts import Value, describe_node, find_source, list_results
from autotp.capture.sizes import Sizes
from autotp.oprules.rule import Factor, Operand, Slot
from autotp.oprules.rulebook import Rulebook
from autotp.planner.analysis import Analysis, AxisPair, Matching, Use
from autotp.planner.formulate import PlacementProblem
from autotp.solver.problem import LEVELS, Problem

# ── propagate ────────────────────────────────────────────────────────────────────────────────────


def find_analysis_faults(analysis: Analysis, rulebook: Rulebook) -> Iterator[str]:
    """Each way in which dims, rules and flags of `analysis` contradict its graph or one another."""
    yield from _check_forest(analysis)
    yield from _check_coverage(analysis)
    yield from _check_dims(analysis)
    yield from _check_flags(analysis)
    reader = _RuleReader(analysis)
    for use in analysis.uses.values():
        yield from (f"{describe_node(use.node)}: {reason}" for reason in reader.find_faults(use))


def _check_forest(analysis: Analysis) -> Iterator[str]:
    """Every atom has the size of what it stands for; rows are grouped by nodes of the graph."""
    forest = analysis.forest
    names = {node.name for node in analysis.program.graph.nodes}
    for atom in (a for a in forest.atoms if a.parent is None):
        if atom.parts is not None and forest.size(atom.parts) != atom.size:
            yield (
                f"axis {atom.name} of size {atom.size} is a product of size "
                f"{forest.size(atom.parts)}: {forest.format(atom.parts)}"
            )
        if atom.segments is not None and _sum_sizes(forest, atom.segments) not in (None, atom.size):
            yield (
                f"axis {atom.name} of size {atom.size} is a sum of size "
                f"{_sum_sizes(forest, atom.segments)}"
            )
        if atom.groups is not None and atom.groups.bounds not in names:
            yield (
                f"rows of axis {atom.name} are grouped by {atom.groups.bounds}, which is not a node"
            )


def _sum_sizes(forest: Forest, segments: Iterable[Dim]) -> Size | None:
    """The sum of the sizes of `segments`; None where it is not a static one."""
    sizes = [forest.size(s).static for s in segments]
    static = [n for n in sizes if n is not None]
    return Size(sum(static)) if len(static) == len(sizes) else None


def _check_coverage(analysis: Analysis) -> Iterator[str]:
    """Every node that reads a value with dims has a use, but for those that take its sizes only."""
    order: dict[fx.Node, int] = {}
    for number, node in enumerate(analysis.program.graph.nodes):
        order[node] = number
        if node.op != "call_function" or find_source(node)[0] is not node or node in analysis.uses:
            continue
        read = [n for n in node.all_input_nodes if find_source(n) in analysis.dims]
        if read and str(node.target) != "aten.sym_size.int":
            yield (
                f"{describe_node(node)}: reads {read[0].name}, which depends on a parameter, but "
                "was not analysed"
            )
    places = [order.get(node, -1) for node in analysis.uses]
    if -1 in places or places != sorted(places):
        yield "the analysed nodes are not nodes of the graph in its order"


def _check_dims(analysis: Analysis) -> Iterator[str]:
    """There is one dim for each dim in the graph, and their sizes agree."""
    forest, sizes = analysis.forest, Sizes()
    if analysis.dims.keys() != analysis.metas.keys():
        yield f"{len(analysis.dims)} values have dims, {len(analysis.metas)} have metas"
    for (node, number), dims in analysis.dims.items():
        meta = list_results(node).get(number)
        if meta is None:
            yield f"{describe_node(node)}: has no result {number}, but dims for it"
            continue
        found, wanted = tuple(forest.size(d) for d in dims), sizes.read(meta)
        if found != wanted:
            yield (
                f"{describe_node(node)}: result {number} has sizes {_format_sizes(wanted)}, but "
                f"its dims have sizes {_format_sizes(found)}: "
                f"{', '.join(forest.format(d) for d in dims)}"
            )


def _check_flags(analysis: Analysis) -> Iterator[str]:
    """Weights and differentiable values have dims; gradients are of floating-point values."""
    for name, node in analysis.parameters.items():
        if (node, 0) not in analysis.weights or str(node.target) != name:
            yield f"parameter {name} is read by {describe_node(node)}, which is not its weight"
    for kind in ("weights", "differentiable"):
        flagged: set[Value] = getattr(analysis, kind)
        for node, number in flagged - analysis.dims.keys():
            yield f"{describe_node(node)}: result {number} is among {kind}, but has no dims"
    for value in analysis.differentiable & analysis.metas.keys():
        dtype = analysis.metas[value].dtype
        if not dtype.is_floating_point and not dtype.is_complex:
            yield f"{describe_node(value[0])}: takes a gradient, but is of {dtype}"


@dataclass(slots=True)
class _RuleReader:
    """Rules of nodes compared with their operands and results; each dim is flattened once."""

    analysis: Analysis
    sizes: Sizes = field(default_factory=Sizes)
    flat: dict[Dim, Dim] = field(default_factory=dict[Dim, Dim])

    def find_faults(self, use: Use) -> Iterator[str]:
        """Each way in which one node's rule contradicts the node."""
        for k, operand in enumerate(use.operands):
            yield from (f"operand {k} {reason}" for reason in self._check_operand(use, operand))
        yield from self._check_results(use)
        count = len(use.operands)
        for numbers in (*use.rule.linear, use.rule.bias):
            if any(not 0 <= k < count for k in numbers):
                yield f"its rule speaks of operands {sorted(numbers)}, but it has {count}"
        for factor in use.rule.factors:
            text = f"{factor.kind} factor {self.analysis.forest.format(factor.dim)}"
            yield from (f"{text}: {reason}" for reason in self._check_factor(use, factor))

    def _check_operand(self, use: Use, operand: Operand) -> Iterator[str]:
        analysis = self.analysis
        found = _find_argument(use.node, operand)
        if not isinstance(found, fx.Node):
            yield f"is argument {operand.argument} of the node, which is {found!r}, not a tensor"
            return
        dims = analysis.dims.get(find_source(found))
        if dims is not None:
            if find_source(found) != operand.value or dims != operand.dims:
                yield f"is {found.name}, but the rule was found for {operand.value[0].name}"
            return
        sizes = tuple(analysis.forest.size(d) for d in operand.dims)
        wanted = self.sizes.read(found.meta["val"])
        if sizes != wanted:
            yield (
                f"({found.name}) has sizes {_format_sizes(wanted)}, but its dims have "
                f"{_format_sizes(sizes)}"
            )

    def _check_results(self, use: Use) -> Iterator[str]:
        made, given = list_results(use.node), use.rule.results
        if len(given) != max(made, default=-1) + 1:
            yield f"its rule gives {len(given)} results, the node makes {len(made)}"
            return
        for number in made:
            if self.analysis.dims.get((use.node, number)) != given[number]:
                yield f"result {number} has other dims than its rule gives"

    def _check_factor(self, use: Use, factor: Factor) -> Iterator[str]:
        if (factor.kind == "reduce") != bool(factor.join):
            yield f"is joined by {factor.join!r}"
        if factor.kind == "reduce" and any(s < 0 for s, _ in factor.slots):
            yield "is contracted, but is in a result"
        for slot in factor.slots:
            dim = _find_dim(use, slot)
            if dim is None:
                yield f"is at {_describe_slot(slot)}, which does not exist"
            elif factor.kind != "unshardable" and not self._agree(factor.dim, dim):
                forest = self.analysis.forest
                yield (
                    f"of size {forest.size(factor.dim)} is at {_describe_slot(slot)}, which is "
                    f"{forest.format(dim)} of size {forest.size(dim)}"
                )

    def _agree(self, factor: Dim, dim: Dim) -> bool:
        """Whether a dim is a factor, a piece of it, or a product or sum that contains it."""
        one, other = self._flat(factor), self._flat(dim)
        if one == other:
            return True
        forest = self.analysis.forest
        ours, theirs = set(forest.list_leaves(factor)), set(forest.list_leaves(dim))
        return ours <= theirs or theirs <= ours

    def _flat(self, dim: Dim) -> Dim:
        found = self.flat.get(dim)
        if found is None:
            found = self.flat[dim] = self.analysis.forest.flatten(dim)
        return found


def _format_sizes(sizes: Iterable[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _find_argument(node: fx.Node, operand: Operand) -> object:
    at = operand.argument
    given = node.kwargs.get(at) if isinstance(at, str) else node.args[at]
    return given if operand.item < 0 else cast("Sequence[object]", given)[operand.item]


def _find_dim(use: Use, slot: Slot) -> Dim | None:
    """The dim at `slot`; None where the node has no such operand, result or dim."""
    number, at = slot
    sides = [o.dims for o in use.operands] if number >= 0 else list(use.rule.results)
    number = number if number >= 0 else ~number
    return sides[number][at] if number < len(sides) and 0 <= at < len(sides[number]) else None


def _describe_slot(slot: Slot) -> str:
    number, dim = slot
    return f"dim {dim} of " + (f"operand {number}" if number >= 0 else f"result {~number}")


# ── match ────────────────────────────────────────────────────────────────────────────────────────


def find_matching_faults(analysis: Analysis, matching: Matching) -> Iterator[str]:
    """Each way in which the pairs and homes of `matching` contradict `analysis`."""
    owners: dict[Atom, AxisPair] = {}
    for pair in matching.pairs:
        yield from (f"{_describe_pair(pair)}: {reason}" for reason in _check_pair(analysis, pair))
        for axis in pair.axes:
            if owners.setdefault(axis, pair) is not pair:
                yield f"axis {axis.name} is in two pairs: {_describe_pair(pair)} and another"
    pairs = set(matching.pairs)
    for name, pair in matching.pair_of.items():
        if pair not in pairs:
            yield f"parameter {name} is in {_describe_pair(pair)}, which is none of the pairs"
        if name not in (*pair.openers, *pair.closers):
            yield f"parameter {name} neither opens nor closes its pair: {_describe_pair(pair)}"
    if odd := matching.home.keys() ^ matching.pair_of.keys():
        yield f"parameters with a pair or with home axes, but not both: {', '.join(sorted(odd))}"
    experts = {name: (axis,) for name, axis in matching.experts.items()}
    for name, axes in (*matching.home.items(), *experts.items()):
        own = set(_list_axes(analysis, name))
        if strange := [axis.name for axis in axes if axis not in own]:
            yield f"parameter {name}: its axes {', '.join(strange)} are none of its own"


def _check_pair(analysis: Analysis, pair: AxisPair) -> Iterator[str]:
    """Each way in which a pair is none: its axes, and the parameters that open and close it."""
    forest = analysis.forest
    for axis in pair.axes:
        leaf = forest.find(axis) is axis and axis.parts is None and axis.segments is None
        if not leaf or (axis.size.static or 0) < 2 or axis.data:
            yield f"{axis.name} of size {axis.size} is not an axis that can be split"
    if not pair.axes or not pair.openers or not (pair.closers or pair.vocabulary):
        yield f"has {len(pair.openers)} openers and {len(pair.closers)} closers"
    for name in (*pair.openers, *pair.closers):
        if name not in analysis.parameters:
            yield f"{name} is not a parameter of the graph"


def _list_axes(analysis: Analysis, name: str) -> Iterator[Atom]:
    """The axes of a parameter; none if it is unknown."""
    node = analysis.parameters.get(name)
    for dim in analysis.dims[(node, 0)] if node is not None else ():
        yield from analysis.forest.list_leaves(dim)


def _describe_pair(pair: AxisPair) -> str:
    axes = ", ".join(f"{a.name} ({a.size})" for a in pair.axes)
    return (
        f"pair {pair.role.name} along {axes}: {', '.join(pair.openers)} → {', '.join(pair.closers)}"
    )


# ── formulate ────────────────────────────────────────────────────────────────────────────────────


def find_problem_faults(analysis: Analysis, formulated: PlacementProblem) -> Iterator[str]:
    """Each way in which the placement problem is malformed, or is not the one of `analysis`."""
    problem = formulated.problem
    if problem.levels != LEVELS:
        yield f"the problem has levels {problem.levels}, not {LEVELS}"
        return
    malformed = [*_check_choices(problem), *_check_tables(problem)]
    yield from malformed
    if malformed:
        return
    meanings = list(_list_meanings(formulated))
    yield from _check_meanings(analysis, formulated, meanings)
    yield from _check_domains(analysis, formulated)
    yield from _check_replicated(problem, dict(meanings))


def _check_choices(problem: Problem) -> Iterator[str]:
    for variable in problem.variables:
        if not variable.domain:
            yield f"variable {variable.name} has no choice"
        if len(set(variable.domain)) != len(variable.domain):
            yield f"variable {variable.name} has a choice twice: {', '.join(variable.domain)}"


def _list_tables(problem: Problem) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """The costs of each variable and edge, with the one or two variables that they are of."""
    yield from (((k,), variable.costs) for k, variable in enumerate(problem.variables))
    yield from (((edge.first, edge.second), edge.costs) for edge in problem.edges)


def _check_tables(problem: Problem) -> Iterator[str]:
    """Costs are of existing variables, one for each choice, and never negative."""
    variables, seen = problem.variables, set[int]()
    for ends, costs in _list_tables(problem):
        if len(set(ends)) < len(ends) or not all(0 <= v < len(variables) for v in ends):
            yield f"an edge joins the variables {ends} of {len(variables)}"
            continue
        names = " – ".join(variables[v].name for v in ends)
        wanted = (len(LEVELS), *(len(variables[v].domain) for v in ends))
        if costs.shape != wanted or costs.dtype != np.int64:
            yield f"{names}: its costs are {costs.dtype} of {costs.shape}, not int64 of {wanted}"
        if id(costs) not in seen and costs.size and costs.min() < 0:  # tables are shared
            level = LEVELS[int(np.argwhere(costs < 0)[0][0])]
            yield f"{names}: has a negative cost, {costs.min()}, at level {level}"
        seen.add(id(costs))


def _list_meanings(formulated: PlacementProblem) -> Iterator[tuple[int, Sequence[Any]]]:
    """Each variable that stands for something, with what its choices stand for."""
    for found in (formulated.parameters, formulated.uses, formulated.delivered, formulated.caches):
        yield from cast("Iterable[tuple[int, Sequence[Any]]]", found.values())


def _check_meanings(
    analysis: Analysis, formulated: PlacementProblem, meanings: Sequence[tuple[int, Sequence[Any]]]
) -> Iterator[str]:
    """Everything that was analysed is decided by one variable of its own, choice by choice."""
    variables = formulated.problem.variables
    for node in analysis.uses.keys() - formulated.uses.keys():
        yield f"{describe_node(node)}: has no variable for its strategy"
    for name in analysis.parameters.keys() - formulated.parameters.keys():
        yield f"parameter {name} has no variable for its placement"
    seen: set[int] = set()
    for number, domain in meanings:
        if number in seen:
            yield f"variable {variables[number].name} decides two things"
        elif len(domain) != len(variables[number].domain):
            yield (
                f"variable {variables[number].name} has {len(variables[number].domain)} choices, "
                f"for {len(domain)} things to choose from"
            )
        seen.add(number)
    for number, variable in enumerate(variables):
        if number not in seen and len(variable.domain) != 1:
            yield f"variable {variable.name} decides nothing by its {len(variable.domain)} choices"


def _check_domains(analysis: Analysis, formulated: PlacementProblem) -> Iterator[str]:
    """Placements are of dims that exist, and of axes that they have."""
    for node, (_, strategies) in formulated.uses.items():
        use = analysis.uses.get(node)
        if use is None:
            yield f"{describe_node(node)}: has a variable, but was not analysed"
            continue
        ranks = [len(o.dims) for o in use.operands], [len(dims) for dims in use.rule.results]
        for strategy in strategies:
            given = strategy.operands, strategy.results
            if any(not _fits(p, r) for p, r in zip(given, ranks, strict=True)):
                yield (
                    f"{describe_node(node)}: strategy {strategy.label} places "
                    f"{', '.join(map(str, (*strategy.operands, *strategy.results)))}, but operands "
                    f"and results have {ranks} dims"
                )
    for name, (_, domain) in formulated.parameters.items():
        dims = analysis.dims[(analysis.parameters[name], 0)]
        for placement in domain:
            if not _fits([placement], [len(dims)]) or (
                placement.is_split
                and analysis.forest.split(dims[placement.dim], placement.partition) is None
            ):
                yield (
                    f"parameter {name} may be placed {placement}, but its dims are "
                    f"{', '.join(analysis.forest.format(d) for d in dims)}"
                )


def _fits(placements: Sequence[Placement], ranks: Sequence[int]) -> bool:
    """Whether there is one placement for each value, of a dim that it has."""
    return len(placements) == len(ranks) and all(
        p.dim < rank and (p.dim >= 0) == (p.is_split or p.is_grouped)
        for p, rank in zip(placements, ranks, strict=True)
    )


def _check_replicated(problem: Problem, meanings: Mapping[int, Sequence[Any]]) -> Iterator[str]:
    """All replicated is legal, unless what was requested, or a cache, excludes it."""
    choice = [_find_replicated_choice(meanings.get(v)) for v in range(len(problem.variables))]
    if None in choice:
        return
    chosen = cast("list[int]", choice)
    for ends, costs in _list_tables(problem):
        if costs[(0, *(chosen[v] for v in ends))]:
            both = [problem.variables[v] for v in ends]
            labels = [v.domain[chosen[k]] for k, v in zip(ends, both, strict=True)]
            yield (
                f"{' – '.join(v.name for v in both)}: {' with '.join(labels)} is forbidden, so the "
                "unsharded model is not a solution"
            )


def _find_replicated_choice(domain: Sequence[Any] | None) -> int | None:
    """The choice by which everything is replicated; None where there is none."""
    if domain is None:
        return 0
    return next(
        (k for k, chosen in enumerate(domain) if _list_placements(chosen) <= {REPLICATED}), None
    )


def _list_placements(chosen: Any) -> set[Placement]:
    """The placements in a choice: of a parameter, of a delivered value, or of a strategy."""
    if isinstance(chosen, Placement):
        return {chosen}
    return {*(chosen if isinstance(chosen, tuple) else (*chosen.operands, *chosen.results))}
