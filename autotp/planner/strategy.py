"""The ways one node can run on shards, derived from its rule and never written by hand.

A strategy gives every operand and result a placement. There are four kinds:

- *replicated*: everything R.
- *split*: one axis of one factor is sharded; slots that have it are S, contracting it gives P.
- *partial*: where the op is linear, P passes from a set of operands to the results.
- *shared*: where gradients flow, R~ passes from every differentiable operand to the results (the
  dual of partial; needs no linearity, since a backward pass is linear). Where no gradient comes
  back to the results, they are R.

An operand without the split axis, or next to a partial one, receives a partial gradient:
R~ in training, R without gradients.

Where rows are grouped (`algebra.grouped_rows`), rows and groups are sharded together: values with
the rows are G, weights with the groups S. Every value with a gradient must have one of the two,
else undefined rows would reach the gradient of another value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.algebra.partition import UNCUT, Offers, Part, Partition
from autotp.algebra.placement import PARTIAL, REPLICATED, SHARED, Placement
from autotp.algebra.split import Split
from autotp.oprules.rule import ALIGNED, Factor, NodeRule, Slot


@dataclass(frozen=True, slots=True)
class Strategy:
    """One joint placement of a node's operands and results. `label` is unique within the node."""

    label: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    partition: Partition = UNCUT


@dataclass(frozen=True, slots=True)
class Facts:
    """What strategies depend on besides the rule.

    - `operands`: the dims of each operand; `differentiable`: the operands that carry gradients;
      `constant`: those that depend on no parameter.
    - `floating`: whether every result is a floating-point tensor (partial sums of others are
      refused).
    - `flows`: whether a result carries a gradient.
    """

    operands: tuple[tuple[Dim, ...], ...]
    differentiable: frozenset[int]
    constant: frozenset[int]
    floating: bool
    flows: bool


def derive_strategies(
    rule: NodeRule,
    facts: Facts,
    forest: Forest,
    tp: int,
    *,
    training: bool,
    offers: Offers = Offers(),  # noqa: B008  immutable
) -> tuple[Strategy, ...]:
    """Every strategy of one node at group size `tp`, in a fixed order.

    Constraints: a split axis is static, no data size, and divisible by `tp` or offered otherwise. A
    contracted dim must be sharded in every segment, without copies (a replicated segment would be
    summed `tp` times).
    """
    maker = _StrategyMaker(rule, facts, forest, tp, training, offers)
    return tuple(maker.derive())


@dataclass(slots=True)
class _StrategyMaker:
    rule: NodeRule
    facts: Facts
    forest: Forest
    tp: int
    training: bool
    offers: Offers

    def derive(self) -> Iterator[Strategy]:
        count, results = len(self.facts.operands), len(self.rule.results)
        yield Strategy("replicated", (REPLICATED,) * count, (REPLICATED,) * results)
        if not self.rule.ruled or self.tp == 1:
            return
        for number, partition in self.list_partitions():
            strategy = self.split_factor(number, partition)
            if strategy is not None:
                yield strategy
        yield from self.pass_through()

    def list_partitions(self) -> Iterator[tuple[int, Partition]]:
        """What may be sharded, with the number of the first factor that has it."""
        joint = dict.fromkeys(self.offers.joint)
        for number, factor in enumerate(self.rule.factors):
            leaves = dict.fromkeys(self.forest.list_leaves(factor.dim))
            for axis in leaves:
                if self._divides(axis):
                    yield number, Partition((Part(axis.name),))
                elif axis.groups:
                    yield from self._partition_rows(number, axis)
            names = {leaf.name for leaf in leaves}
            for partition in [p for p in joint if not names.isdisjoint(p.axes)]:
                del joint[partition]
                yield number, partition

    def _partition_rows(self, number: int, rows: Atom) -> Iterator[tuple[int, Partition]]:
        """Grouped rows, sharded together with their groups."""
        of, bounds = rows.groups.axis if rows.groups else "", rows.groups and rows.groups.bounds
        along = [f.dim for f in self.rule.factors if f.grouped == bounds]
        groups = [
            a
            for dim in ((self.forest.find_axis(of),), *along)
            for a in self.forest.list_leaves(dim)
        ]
        groups = list(dict.fromkeys(a for a in groups if a is not rows))
        if all(self._divides(axis) for axis in groups):
            yield number, Partition(tuple(Part(a.name) for a in (rows, *groups)))

    def _divides(self, axis: Atom) -> bool:
        size = axis.size.static
        if axis.data or axis.groups or size is None:
            return False
        return size % self.tp == 0 or (size >= self.tp and axis.name in self.offers.uneven)

    def place_operand_without(self, operand: int) -> Placement:
        """The placement of an operand that receives a partial gradient."""
        partial = self.training and operand in self.facts.differentiable
        return SHARED if partial else REPLICATED

    def split_factor(self, number: int, partition: Partition) -> Strategy | None:
        """The strategy that shards `partition` in factor `number`, or None if it is illegal."""
        rows = self.forest.find_grouped_rows(partition)
        bounds = rows.groups.bounds if rows and rows.groups else None
        touched = self._find_split_factors(number, partition)
        kinds = ["pass" if f.grouped and f.grouped == bounds else f.kind for f in touched]
        reduced = [f for f, kind in zip(touched, kinds, strict=True) if kind == "reduce"]
        if "unshardable" in kinds or (reduced and len(touched) > 1):
            return None
        if reduced and not (self.facts.floating and self._contracts(reduced[0], partition)):
            return None
        if not all(self._fits(f, partition) for f in touched):
            return None
        slots = {slot for f in touched for slot in f.slots}
        place = self._place if rows is None else self._place_with_rows(rows)
        operands = [place(k, slots, partition) for k in range(len(self.facts.operands))]
        results = [place(~r, slots, partition) for r in range(len(self.rule.results))]
        if None in operands or None in results:
            return None
        for k in self.rule.bias if reduced else ():
            operands[k] = PARTIAL
        if reduced:
            results = [PARTIAL for _ in results]
        label = f"{number}:{partition}"
        made = tuple(p for p in operands if p), tuple(p for p in results if p)
        return Strategy(label, *made, partition)

    def _find_split_factors(self, number: int, partition: Partition) -> list[Factor]:
        """Factor `number`, and those that have the remaining axes of `partition`."""
        first = self.rule.factors[number]
        rest = partition.without(self.forest.restrict((first.dim,), partition).axes)
        others = [f for f in self.rule.factors if f is not first and self._has_axes(f.dim, rest)]
        return [first, *others]

    def _place_with_rows(
        self, rows: Atom
    ) -> Callable[[int, set[Slot], Partition], Placement | None]:
        """`_place` where rows are grouped: values with them are G, alone in their dim."""

        def place(slot: int, slots: set[Slot], partition: Partition) -> Placement | None:
            dims = self._dims(slot)
            cut = [d for d, dim in enumerate(dims) if self._has_axes(dim, partition)]
            found = [d for d in cut if (slot, d) in slots]
            if any(self.forest.contains(dims[d], rows) for d in found):
                alone = len(found) == 1 and self.forest.flatten(dims[found[0]]) == (rows,)
                own = Partition((Part(rows.name),))
                return Placement("G", found[0], own) if alone else None
            if slot < 0 or (not found and self.place_operand_without(slot) == SHARED):
                return None
            return self._place(slot, slots, partition)

        return place

    def _has_axes(self, dim: Dim, partition: Partition) -> bool:
        return bool(partition.parts) and bool(self.forest.restrict((dim,), partition).parts)

    def _split_dims(self, factor: Factor, partition: Partition) -> Iterator[Split | None]:
        """The split of each dim of `factor`; None for a dim without one."""
        for slot, dim in factor.slots:
            yield self.forest.split(self._dims(slot)[dim], partition)

    def _contracts(self, factor: Factor, partition: Partition) -> bool:
        """Whether the ranks' sums over `factor` are disjoint and together complete."""
        cuts = self._split_dims(factor, partition)
        return all(cut is not None and cut.is_exact(self.tp) for cut in cuts)

    def _fits(self, factor: Factor, partition: Partition) -> bool:
        """Whether shards are contiguous, and aligned, if the factor requires it."""
        if not (factor.block or factor.aligned):
            return True
        cuts = [cut for cut in self._split_dims(factor, partition) if cut]
        if not cuts:
            return False  # grouped rows
        known = [cut for cut in cuts if cut.is_known]
        lengths = [cut.local_length(r, self.tp) for cut in known for r in range(self.tp)]
        aligned = not factor.aligned or all(n % ALIGNED == 0 for n in lengths)
        blocks = all(cut.is_known and cut.is_block(self.tp) for cut in cuts)
        return aligned and (blocks or not factor.block)

    def _dims(self, slot: int) -> tuple[Dim, ...]:
        return self.facts.operands[slot] if slot >= 0 else self.rule.results[~slot]

    def _place(self, slot: int, slots: set[Slot], partition: Partition) -> Placement | None:
        """The placement of an operand or result; None if there is none."""
        dims = self._dims(slot)
        cut = [
            d for d, dim in enumerate(dims) if (slot, d) in slots and self._has_axes(dim, partition)
        ]
        if not cut:
            return self._place_without(slot)
        here = self.forest.restrict([dims[d] for d in cut], partition)
        splits = [self.forest.split(dims[d], here) for d in cut]
        if any(s is None for s in splits) or len(cut) > 2:
            return None
        if len(cut) == 2:
            apart = prod(self._count_shards(s) for s in splits if s) == self.tp
            return Placement("SS", cut[0], here) if apart else None
        copied = any(not s.is_exact(self.tp) for s in splits if s)
        return Placement("S~" if copied and self.training else "S", cut[0], here)

    def _count_shards(self, split: Split) -> int:
        """The number of shards of every segment of a dim; 0 if they differ."""
        copies = {split.count_copies(s, self.tp) for s in split.segments}
        return self.tp // copies.pop() if len(copies) == 1 else 0

    def _place_without(self, slot: int) -> Placement:
        """The placement of a value without the axes: its gradient is partial."""
        if slot >= 0:
            return self.place_operand_without(slot)
        return SHARED if self.training and self.facts.flows else REPLICATED

    def pass_through(self) -> Iterator[Strategy]:
        """P passed through linear sets, and R~ passed."""
        results = len(self.rule.results)
        for operands in self.rule.linear if self.facts.floating else ():
            if not operands & self.facts.constant:
                chosen = [
                    PARTIAL if k in operands else self.place_operand_without(k)
                    for k in range(len(self.facts.operands))
                ]
                label = "partial:" + ",".join(str(k) for k in sorted(operands))
                yield Strategy(label, tuple(chosen), (PARTIAL,) * results)
        shared = [self.place_operand_without(k) for k in range(len(self.facts.operands))]
        if self.training and self.facts.flows:
            yield Strategy("shared", tuple(shared), (SHARED,) * results)
        elif SHARED in shared:  # no gradient comes back, so none is counted twice
            yield Strategy("shared", tuple(shared), (REPLICATED,) * results)
