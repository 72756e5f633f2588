"""What an op allows: rows as they stand in rules/, and what a row says of one node.

A *row* is data: a signature in the notation, kinds of its factors, sets of operands in which the op
is linear. A *node rule* is a row applied to one node of a graph: factors with their dims and slots.
Every strategy of the node is derived from it; none is written by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autotp.algebra.axis import Dim
from autotp.capture.graph_facts import Value
from autotp.oprules.notation import Signature

__all__ = ["ALIGNED", "Discovery", "Factor", "FactorKind", "NodeRule", "Operand", "Row", "Slot"]

FactorKind: TypeAlias = Literal["pass", "reduce", "unshardable"]
ALIGNED = 8
"""Elements: 16 bytes of the narrowest floating type in use, what some kernels ask of a stride."""

Slot: TypeAlias = tuple[int, int]
"""(operand, dim) for operands counted from 0; results are counted ~0, ~1, …"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of rules/: what is known of one op.

    - `signature`: the rule in the notation, or None if `derive` names a rule that depends on
      arguments.
    - `reduce`: contracted factor to how shards join: "sum" or "mean" leave a partial sum; "max" and
      "none" may not be split.
    - `whole`: factors that must not be split. `block`: those of which a rank must hold consecutive
      elements. `aligned`: those of which it must hold a multiple of `ALIGNED` elements.
    - `linear`: sets of operands (numbers as in the rule) that may be partial together.
    - `bias`: operands that are partial when a factor is reduced.
    - `options`: what `derive` needs besides the node's arguments.
    - `emit`: the local form the rewriter gives the op; empty if the op is the same on shards.
    - `loss`: the op is a loss over its classes, so an axis that reaches it reaches an output.
    - `stops`: operands to which no gradient passes, though the result is floating-point.
    - `moves`: the op copies elements without computing (a lookup by its result is one by its
      operand).
    - `samples`: calls of the op, to test the row by.
    """

    op: str
    signature: Signature | None
    reduce: Mapping[str, str] = field(default_factory=dict[str, str])
    whole: frozenset[str] = frozenset()
    block: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    bias: frozenset[int] = frozenset()
    derive: str = ""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    emit: str = ""
    loss: bool = False
    moves: bool = False
    stops: frozenset[int] = frozenset()
    note: str = ""
    source: str = ""
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The row on one line, in the notation: `b i, o i, o -> b o; i: sum; linear in 0, 2`."""
        rule = str(self.signature) if self.signature else f"by arguments: {self.derive}"
        joins = [f"{f}: {join}" for f, join in sorted(self.reduce.items())]
        sets = [", ".join(map(str, sorted(operands))) for operands in self.linear]
        bias = [f"bias {', '.join(map(str, sorted(self.bias)))}"] if self.bias else []
        whole = [f"whole: {', '.join(sorted(self.whole))}"] if self.whole else []
        linear = [f"linear in {' or '.join(sets)}"] if sets else []
        return "; ".join([rule, *joins, *whole, *linear, *bias])


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of one node: its dim expression and the slots where it stands.

    - `kind`: pass, reduce (contracted: splitting leaves a partial sum) or whole.
    - `join`: "sum" or "mean" for a reduced factor.
    - `block`: a rank must hold consecutive elements of it.
    - `aligned`: a rank must hold a multiple of `ALIGNED` elements of it.
    - `grouped`: the bounds of rows with which it may be cut all the same, by whole groups.
    """

    kind: FactorKind
    dim: Dim
    slots: tuple[Slot, ...]
    join: str = ""
    block: bool = False
    aligned: bool = False
    grouped: str = ""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand of a node.

    - `value`: what is read; `dims`: its dims at this use.
    - `argument`, `item`: where it stands (schema position; index in a list, or -1).
    """

    value: Value
    dims: tuple[Dim, ...]
    argument: int | str
    item: int


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A row applied to one node; operands are numbered among the tensors that are really there.

    - `results`: the dims of each result.
    - `linear`, `bias`: as in Row, renumbered; sets with an absent or literal operand are gone.
    - `emit`, `extra`: the local form and the dims it needs (pieces of a slice, sections of a
      split).
    - `ruled`: False when no row was found, so that everything is whole.
    """

    factors: tuple[Factor, ...]
    results: tuple[tuple[Dim, ...], ...]
    linear: tuple[frozenset[int], ...] = ()
    bias: frozenset[int] = frozenset()
    emit: str = ""
    extra: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict[str, tuple[Dim, ...]])
    ruled: bool = True
    loss: bool = False


@dataclass(frozen=True, slots=True)
class Discovery:
    """What running an op without a row told: a row found, or the reason why it acts whole."""

    op: str
    row: Row | None
    reason: str = ""
