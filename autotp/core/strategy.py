"""The ways one node can run on shards, derived from its rule and never written by hand.

A strategy gives every operand and result a placement. There are four kinds:

- *replicated*: everything R.
- *split*: one axis of one factor is cut; slots that have it are S, a contracted one leaves P.
- *partial*: where the op is linear, P passes from a set of operands to the results.
- *shared*: where gradients flow, R~ passes from every differentiable operand to the results (the
  dual of partial; needs no linearity, since a backward pass is linear).

An operand that lacks the split axis, or stands beside a partial one, receives a partial gradient:
R~ in training, R without gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autotp.core.axis import Atom, Dim, Forest
from autotp.core.placement import PARTIAL, REPLICATED, SHARED, Placement, split
from autotp.core.rule import Factor, NodeRule

__all__ = ["Facts", "Strategy", "strategies"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One joint placement of a node's operands and results. `label` is unique within the node."""

    label: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    axis: str = ""


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


def strategies(
    rule: NodeRule, facts: Facts, forest: Forest, tp: int, *, training: bool
) -> tuple[Strategy, ...]:
    """Every strategy of one node at group size `tp`, in a fixed order.

    Constraints: a split axis is static, no data size, divisible by `tp`. Every segment of a
    contracted dim must have it (*cover*: a segment without it is whole on every rank, and would be
    summed `tp` times); in training every segment of every dim that has it (else the gradient of the
    node's input is whole for one segment and partial for another).
    """
    maker = _Maker(rule, facts, forest, tp, training)
    return tuple(maker.all())


@dataclass(slots=True)
class _Maker:
    rule: NodeRule
    facts: Facts
    forest: Forest
    tp: int
    training: bool

    def all(self) -> Iterator[Strategy]:
        count, results = len(self.facts.operands), len(self.rule.results)
        yield Strategy("replicated", (REPLICATED,) * count, (REPLICATED,) * results)
        if not self.rule.ruled or self.tp == 1:
            return
        for number, factor in enumerate(self.rule.factors):
            for axis in dict.fromkeys(self.forest.leaves(factor.dim)):
                strategy = self.split(number, factor, axis)
                if strategy is not None:
                    yield strategy
        yield from self.passing()

    def lacking(self, operand: int) -> Placement:
        """The placement of an operand that receives a partial gradient."""
        partial = self.training and operand in self.facts.differentiable
        return SHARED if partial else REPLICATED

    def split(self, number: int, factor: Factor, axis: Atom) -> Strategy | None:
        """The strategy that cuts `axis` of `factor`, or None if it is illegal."""
        size = axis.size.static
        if factor.kind == "whole" or axis.data or size is None or size % self.tp:
            return None
        covered = self.training or factor.kind == "reduce"
        operands = [self.lacking(k) for k in range(len(self.facts.operands))]
        results = [REPLICATED for _ in self.rule.results]
        for slot, dim in factor.slots:
            dims = self.facts.operands[slot] if slot >= 0 else self.rule.results[~slot]
            if not self.forest.contains(dims[dim], axis):
                if covered:
                    return None
                continue
            if not self._cuts(dims[dim], axis, covered=covered, block=factor.block):
                return None
            (operands if slot >= 0 else results)[slot if slot >= 0 else ~slot] = split(
                dim, axis.name
            )
        if factor.kind == "reduce":
            if not self.facts.floating:
                return None
            results = [PARTIAL for _ in results]
            for k in self.rule.bias:
                operands[k] = PARTIAL
        return Strategy(f"{number}:{axis.name}", tuple(operands), tuple(results), axis.name)

    def _cuts(self, dim: Dim, axis: Atom, *, covered: bool, block: bool) -> bool:
        if covered and not self.forest.covers(dim, axis):
            return False
        cut = self.forest.split(dim, axis)
        return cut is not None and (cut.is_block or not block)

    def passing(self) -> Iterator[Strategy]:
        """P passed through linear sets, and R~ passed."""
        results = len(self.rule.results)
        for operands in self.rule.linear if self.facts.floating else ():
            if not operands & self.facts.constant:
                chosen = [
                    PARTIAL if k in operands else self.lacking(k)
                    for k in range(len(self.facts.operands))
                ]
                label = "partial:" + ",".join(str(k) for k in sorted(operands))
                yield Strategy(label, tuple(chosen), (PARTIAL,) * results)
        if self.training and self.facts.flows:
            shared = [self.lacking(k) for k in range(len(self.facts.operands))]
            yield Strategy("shared", tuple(shared), (SHARED,) * results)
