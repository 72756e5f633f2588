"""Match: axes become pairs of openers and closers, found by dataflow alone.

For an axis that some weight produces (opener, column-parallel), walk its value forward by passing
factors: a weight that contracts it is a closer (row-parallel). If every op on the way passes
the axis on, the reach is *clean* and the axis *pairable*: query, key, value → output;
gate, up → down. The residual's hidden axis meets norms, so it is not a pair. A weight that produces
a pairable axis opens its pair even if a norm follows it (queries normalised over all heads). An
axis that cleanly reaches an output or a loss over classes, and the rows of an embedding, are a
vocabulary.

Parameters in no pair are then examined again with a weaker condition: a reduction over the axis may
be on the way (a decomposed norm between heads and their output), which costs collectives but no
memory. The residual's axis still does not qualify: it ends in a head or an output.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

import networkx as nx
import torch
from torch import fx

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.capture.graph_facts import Value, find_source
from autotp.oprules.rule import Factor
from autotp.oprules.rulebook import Role, Rulebook
from autotp.planner.analysis import Analysis, AxisPair, Matching, Use, list_model_outputs
from autotp.planner.match_experts import add_experts


@dataclass(slots=True)
class _Reach:
    """What one axis meets on its way forward."""

    clean: bool = True
    output: bool = False
    closers: set[str] = field(default_factory=set[str])
    grouped: set[str] = field(default_factory=set[str])
    interior: set[str] = field(default_factory=set[str])
    together: list[tuple[Atom, ...]] = field(default_factory=list[tuple[Atom, ...]])


def match(analysis: Analysis, rulebook: Rulebook) -> Matching:
    """The pairs of an analysed program, with roles from the rulebook."""
    found = _PairFinder(analysis, rulebook).find_pairs()
    rest = frozenset(analysis.parameters) - set(found.home)
    summed = _PairFinder(analysis, rulebook, rest).find_pairs() if len(rest) > 1 else Matching()
    return add_experts(analysis, found, summed)


VOCABULARY = Role("vocabulary", frozenset(), "vocabulary")


class _PairFinder:
    """Openers, closers and families; with `rest`, of those alone, whose axes may be reduced."""

    def __init__(
        self, analysis: Analysis, rulebook: Rulebook, rest: frozenset[str] | None = None
    ) -> None:
        self.rest = rest
        self.analysis, self.forest, self.rulebook = analysis, analysis.forest, rulebook
        self.outputs = list_model_outputs(analysis)
        self.openers: dict[Atom, list[str]] = defaultdict(list)
        self.closers: dict[Atom, list[str]] = defaultdict(list)
        self.followers: dict[Atom, list[str]] = defaultdict(list)
        self.grouped: dict[Atom, list[str]] = defaultdict(list)
        self.interior: dict[Atom, set[str]] = defaultdict(set)
        self.vocabulary: dict[Atom, list[str]] = defaultdict(list)
        self.produced: set[Atom] = set()  # the axes of openers that no activation has
        self.embeddings: set[str] = set()
        self.heads: set[str] = set()
        self.families: nx.Graph[Atom] = nx.Graph()
        self.origins: dict[Value, tuple[str, ...]] = {}

    # ── openers ──────────────────────────────────────────────────────────────────────────────

    def open_pairs(self) -> None:
        """Walk forward from every opener and every embedding."""
        for use in self.analysis.uses.values():
            for k, operand in enumerate(use.operands):
                if operand.value in self.analysis.weights and operand.value in self.analysis.dims:
                    self._visit_weight(use, k)

    def _visit_weight(self, use: Use, k: int) -> None:
        names = self._list_parameters(use.operands[k].value)
        if self.rest is not None and not self.rest.issuperset(names):
            return
        if is_vocabulary(use, k, self.analysis, self.rulebook):
            for atom in self._list_embedding_axes(use, k):
                _extend(self.vocabulary[atom], names)
            self.embeddings.update(names)
        elif self.contracts(use, k):
            for atom in self._list_produced_axes(use, k):
                if self._open_axis(use, atom, names):
                    self.produced.add(atom)
            for atom in self.forest.list_leaves(use.rule.extra.get("groups", ((),))[0]):
                self._open_axis(use, atom, names)

    def _open_axis(self, use: Use, atom: Atom, names: tuple[str, ...]) -> bool:
        """Note what `atom` meets on its way from `use`; whether that is a clean way to a closer.

        The groups of a product are opened too: each rank slices its own from a replicated value.
        """
        reach = self.trace_axis((use.node, 0), atom)
        if self.rest is not None and (reach.output or not reach.closers <= self.rest):
            return False
        if not reach.clean:
            _extend(self.followers[atom], names)
            return False
        if reach.output:
            _extend(self.vocabulary[atom], names)
            self.heads.update(names)
        if not reach.closers:
            return False
        reach.interior.add(str(use.node.target))
        _extend(self.openers[atom], names)
        _extend(self.closers[atom], sorted(reach.closers))
        _extend(self.grouped[atom], sorted(reach.grouped))
        self.interior[atom] |= reach.interior
        self.families.add_node(atom)
        for group in reach.together:
            self.families.add_edges_from(combinations(group, 2))
        return True

    def contracts(self, use: Use, weight: int) -> bool:
        """Whether operand `weight` is contracted with an activation (a Linear-like node)."""
        values = [o.value in self.analysis.weights for o in use.operands]
        for factor in use.rule.factors:
            if factor.kind == "reduce":
                sides = [values[k] for k, _ in factor.slots if k >= 0]
                if any(k == weight for k, _ in factor.slots) and not all(sides):
                    return True
        return False

    def _list_produced_axes(self, use: Use, k: int) -> Iterable[Atom]:
        """Axes of operand `k` that pass to a result and that no activation has."""
        for factor in use.rule.factors:
            operands = {s for s, _ in factor.slots if s >= 0}
            weights = all(use.operands[s].value in self.analysis.weights for s in operands)
            if factor.kind == "pass" and k in operands and weights:
                yield from dict.fromkeys(
                    a for a in self.forest.list_leaves(factor.dim) if a.is_splittable
                )

    def _list_embedding_axes(self, use: Use, k: int) -> Iterable[Atom]:
        for factor in use.rule.factors:
            if factor.kind == "reduce" and any(s == k for s, _ in factor.slots):
                yield from (a for a in self.forest.list_leaves(factor.dim) if a.is_splittable)

    # ── the walk ─────────────────────────────────────────────────────────────────────────────

    def trace_axis(self, start: Value, axis: Atom) -> _Reach:
        """What `axis` meets from `start` on, by passing factors; stops at the first unclean op."""
        reach, seen, todo = _Reach(), {start}, [start]
        while todo and reach.clean:
            value = todo.pop(0)
            reach.output |= value in self.outputs
            for use, k in self.analysis.readers[value]:
                for found in self._follow_axis(use, k, axis, reach):
                    if found not in seen:
                        seen.add(found)
                        todo.append(found)
        return reach

    def _follow_axis(self, use: Use, k: int, axis: Atom, reach: _Reach) -> Iterable[Value]:
        """The results of `use` that carry `axis` on; notes closers and unclean ops."""
        touched = self._find_factors(use, k, axis)
        if any(f.kind == "reduce" for f in touched):
            closers = self._find_partners(use, k, touched)
            reach.closers |= closers
            reach.clean &= bool(closers) or self.rest is not None
            return ()
        if use.rule.loss and any(f.kind == "unshardable" for f in touched):
            reach.output = True
            return ()
        if not touched or any(f.kind == "unshardable" for f in touched):
            reach.clean = False
            return ()
        reach.interior.add(str(use.node.target))
        reach.grouped |= self._find_partners(use, k, touched)
        if self._mixes_activations(use):
            reach.together += self._list_family_axes(use, k)
        results = {
            ~s for f in touched for s, d in f.slots if s < 0 and self._carries_axis(use, s, d, axis)
        }
        return [(use.node, r) for r in sorted(results)]

    def _find_factors(self, use: Use, k: int, axis: Atom) -> list[Factor]:
        return [
            f
            for f in use.rule.factors
            if any(s == k for s, _ in f.slots) and self.forest.contains(f.dim, axis)
        ]

    def _carries_axis(self, use: Use, slot: int, dim: int, axis: Atom) -> bool:
        return self.forest.contains(use.rule.results[~slot][dim], axis)

    def _find_partners(self, use: Use, k: int, touched: Sequence[Factor]) -> set[str]:
        """Parameters that share factors with operand `k`, if `use` is a product with a weight.

        Where the factors are contracted those are closers, and where they pass grouped: each group
        of channels has a product of its own.
        """
        shared = {s for f in touched for s, _ in f.slots if s >= 0 and s != k}
        others = [use.operands[i].value for i in shared if self.contracts(use, i)]
        weights = [value for value in others if value in self.analysis.weights]
        return {name for value in weights for name in self._list_parameters(value)}

    def _mixes_activations(self, use: Use) -> bool:
        """Whether activations are multiplied with each other over some dim (attention)."""
        for factor in use.rule.factors:
            operands = [s for s, _ in factor.slots if s >= 0]
            if factor.kind != "pass" and len(operands) > 1 and all(s >= 0 for s, _ in factor.slots):
                return not any(use.operands[s].value in self.analysis.weights for s in operands)
        return False

    def _list_family_axes(self, use: Use, k: int) -> list[tuple[Atom, ...]]:
        """Static axes that share a dim of operand `k`: factors of one head dim."""
        dims = use.operands[k].dims
        groups = [tuple(a for a in self.forest.list_leaves(d) if a.is_splittable) for d in dims]
        return [g for g in groups if len(g) > 1]

    def _list_parameters(self, value: Value) -> tuple[str, ...]:
        """Names of the parameters that a weight value is made of."""
        found = self.origins.get(value)
        if found is None:
            node = value[0]
            if node.op == "get_attr":
                found = (str(node.target),) if str(node.target) in self.analysis.parameters else ()
            else:
                use = self.analysis.uses.get(node)
                operands = use.operands if use else ()
                found = tuple(
                    dict.fromkeys(n for o in operands for n in self._list_parameters(o.value))
                )
            self.origins[value] = found
        return found

    # ── pairs and homes ──────────────────────────────────────────────────────────────────────

    def find_pairs(self) -> Matching:
        """Pairs by family, the vocabulary first, and each parameter's home."""
        self.open_pairs()
        out = Matching()
        for atom, names in self.vocabulary.items():
            out.pairs.append(
                AxisPair(
                    (atom,),
                    tuple(names),
                    tuple(self.closers.get(atom, ())),
                    VOCABULARY,
                    True,
                    frozenset(),
                )
            )
        for family in nx.connected_components(self.families.subgraph(self.openers)):
            axes = tuple(sorted(family, key=lambda a: a.number))
            if not any(a in self.vocabulary for a in axes):
                out.pairs.append(self._build_pair(self._order_major_first(axes)))
        self._assign_pairs(out)
        return out

    def _order_major_first(self, axes: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """Axes in the order in which the widest opener's dim has them; without one that has all,
        those of the most openers first.
        """
        for name in (n for a in axes for n in self.openers[a]):
            node = self.analysis.parameters[name]
            order = [
                a
                for d in self.analysis.dims[(node, 0)]
                for a in self.forest.list_leaves(d)
                if a in axes
            ]
            if len(set(order)) == len(axes):
                return tuple(dict.fromkeys(order))
        return tuple(sorted(axes, key=lambda a: -len(self.openers[a])))

    def _build_pair(self, axes: tuple[Atom, ...]) -> AxisPair:
        # what produces grouped channels need not produce them sharded
        inner = [n for a in axes if a in self.produced for n in self.followers[a]]
        inner += [n for a in axes for n in self.grouped[a]]
        openers = [*inner, *(n for a in axes for n in self.openers[a])]
        closers = tuple(dict.fromkeys(n for a in axes for n in self.closers[a]))
        inside = frozenset(op for a in axes for op in self.interior[a])
        role = next(r for r in self.rulebook.roles if not r.inside or r.inside & inside)
        return AxisPair(
            axes,
            self._sort_parameters(openers),
            self._sort_parameters(closers),
            role,
            False,
            inside,
        )

    def _sort_parameters(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(n for n in self.analysis.parameters if n in wanted)

    def _assign_pairs(self, out: Matching) -> None:
        """Give each parameter the pair that most parameter bytes share; drop pairs without any.

        A pair whose closers are all assigned elsewhere is dropped (the head size of one
        key-value head, if the output projection is sharded by heads): its openers are reassigned.
        """
        every = tuple(out.pairs)
        weight = {
            p: sum(count_carried_bytes(self.analysis, n, p.axes) for n in {*p.openers, *p.closers})
            for p in out.pairs
        }
        while True:
            out.pair_of = self._choose_pairs(out.pairs, weight)
            closed_pairs = {p for n, p in out.pair_of.items() if p.vocabulary or n in p.closers}
            if closed_pairs >= set(out.pair_of.values()):
                break
            out.pairs = [p for p in out.pairs if p in closed_pairs]
        adjacent = {
            n: self._list_adjacent_pairs(n, p, out.pairs, weight) for n, p in out.pair_of.items()
        }
        settled = set(out.pair_of.values())
        out.pairs = [p for p in out.pairs if p in settled or _can_merge(p, adjacent)]
        for name, pair in out.pair_of.items():
            inside = (p for p in out.pairs if name in (*p.openers, *p.closers))
            others = adjacent[name] if pair.vocabulary else inside  # in a chain the costs decide
            mine = (pair, *(p for p in others if p in out.pairs and not p.vocabulary))
            spare = self._list_spare_pairs(name, pair, every)
            of = dict.fromkeys(a for p in (*mine, *spare) for a in self._list_home_axes(name, p))
            out.home[name] = tuple(of)

    def _list_adjacent_pairs(
        self,
        name: str,
        settled: AxisPair,
        pairs: list[AxisPair],
        weight: Mapping[AxisPair, Fraction | int],
    ) -> list[AxisPair]:
        """Other pairs of a parameter, in segments of a fused dim that lack the settled pair's
        axes: attention and MLP in one projection.
        """
        dims = self.analysis.dims[(self.analysis.parameters[name], 0)]
        sums = (a for dim in dims for a in self.forest.flatten(dim) if a.segments is not None)
        sections = [
            set(self.forest.list_leaves(s)) for a in sums for s in self.forest.list_segments(a)
        ]
        kept = [settled]
        for pair in sorted(pairs, key=lambda p: (-weight[p], p.axes[0].number)):
            if name in pair.openers or name in pair.closers:
                taken = {a for p in kept for a in p.axes}
                own = any(s & set(pair.axes) and not s & taken for s in sections)
                kept += [pair] if own and not pair.vocabulary else []
        return kept[1:]

    def _choose_pairs(
        self, pairs: list[AxisPair], weight: Mapping[AxisPair, Fraction | int]
    ) -> dict[str, AxisPair]:
        found: dict[str, AxisPair] = {}
        for name in self.analysis.parameters:
            mine = [p for p in pairs if name in p.openers or name in p.closers]
            plain = [p for p in mine if not p.vocabulary]
            closed = [p for p in plain if name in p.closers]
            heads = any(p.vocabulary and name in p.openers for p in mine)
            if name not in self.embeddings and (closed or not heads):
                # the last closer's own output is not a vocabulary, nor is a residual output
                grouped = [p for p in mine if p not in closed and self._is_grouped(name, p)]
                mine = closed + grouped if closed else plain or mine
            mine.sort(key=lambda p: (not p.vocabulary, -weight[p], p.axes[0].number))
            found.update((name, p) for p in mine[:1])
        return found

    def _is_grouped(self, name: str, pair: AxisPair) -> bool:
        return any(name in self.grouped[a] for a in pair.axes)

    def _list_spare_pairs(
        self, name: str, pair: AxisPair, pairs: Iterable[AxisPair]
    ) -> Iterable[AxisPair]:
        """Other pairs of a parameter whose own has groups of channels, which may be few."""
        if any(self.grouped[a] for a in pair.axes):
            yield from (p for p in pairs if p is not pair and name in (*p.openers, *p.closers))

    def _list_home_axes(self, name: str, pair: AxisPair) -> tuple[Atom, ...]:
        node = self.analysis.parameters[name]
        leaves = [a for d in self.analysis.dims[(node, 0)] for a in self.forest.list_leaves(d)]
        if name in self.embeddings - self.heads:  # a tied embedding follows its head
            return tuple(dict.fromkeys(a for a in leaves if a.is_splittable))
        return tuple(a for a in pair.axes if a in leaves)


def _can_merge(pair: AxisPair, adjacent: Mapping[str, list[AxisPair]]) -> bool:
    """Whether an opener and a closer have the pair as an adjacent one."""
    return all(
        any(pair in adjacent.get(n, ()) for n in names) for names in (pair.openers, pair.closers)
    )


def _extend(names: list[str], more: Iterable[str]) -> None:
    names += [n for n in more if n not in names]


def count_carried_bytes(analysis: Analysis, name: str, axes: tuple[Atom, ...]) -> Fraction:
    """The bytes of parameter `name` that carry `axes`: those of its segments with them."""
    value = (analysis.parameters[name], 0)
    meta = analysis.metas[value]
    shares = (_find_share(analysis.forest, dim, axes) for dim in analysis.dims[value])
    return Fraction(meta.nbytes) * max(shares, default=Fraction(0))


def _find_share(forest: Forest, dim: Dim, axes: tuple[Atom, ...]) -> Fraction:
    flat = forest.flatten(dim)
    if any(atom in axes for atom in flat):
        return Fraction(1)
    sums = [forest.list_segments(a) for a in flat if a.segments is not None]
    return max((_mix_shares(forest, sections, axes) for sections in sums), default=Fraction(0))


def _mix_shares(forest: Forest, sections: tuple[Dim, ...], axes: tuple[Atom, ...]) -> Fraction:
    sizes = [forest.size(s).coefficient for s in sections]
    shares = [_find_share(forest, s, axes) for s in sections]
    return Fraction(sum(n * s for n, s in zip(sizes, shares, strict=True))) / max(sum(sizes), 1)


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
"""Ops that fill with one number: as ids they replace an input that was not passed."""


def is_vocabulary(use: Use, k: int, analysis: Analysis, rulebook: Rulebook) -> bool:
    """Whether operand `k` is an embedding whose ids are an integer input, at most moved."""
    if use.rule.emit != "lookup" or k != 0:
        return False
    ids = (o.value[0] for o in use.operands if o.value not in analysis.weights)
    return _is_moved_input(next(ids), rulebook, set())


def _is_moved_input(node: fx.Node, rulebook: Rulebook, seen: set[fx.Node]) -> bool:
    if node.op == "placeholder" or node.target in ALIKE:
        return True
    node = find_source(node)[0]
    row = rulebook.rows.get(str(node.target))
    if node in seen or row is None or not row.moves:
        return False
    seen.add(node)
    sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(_is_moved_input(n, rulebook, seen) for n in sources)
