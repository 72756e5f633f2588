"""What an op allows: rows as in rules/, and rows applied to a node.

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

FactorKind: TypeAlias = Literal["pass", "reduce", "unshardable"]
ALIGNED = 8
"""Elements: 16 bytes of a 2-byte dtype, the alignment of strides that some kernels require."""

Slot: TypeAlias = tuple[int, int]
"""(operand, dim), with operands numbered from 0; results are numbered ~0, ~1, …"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of rules/, for one op; the keys are described in rules/README.md.

    - `signature`: the rule in the notation, or None if `derive` names a rule that depends on
      arguments.
    - `reduce`: for each contracted factor, how shards combine: "sum" or "mean" leave a partial sum;
      "max" and "none" may not be sharded.
    - `whole`: unshardable factors. `block`: those of which a rank must have consecutive elements.
      `aligned`: those of which it must have a multiple of `ALIGNED` elements.
    - `linear`: sets of operands (numbers as in the rule) that may be partial together.
    - `bias`: operands that are partial when a factor is reduced.
    - `options`: what `derive` needs besides the node's arguments.
    - `emit`: the local form that the rewriter gives the op; empty if the op is the same on shards.
    - `loss`: the op is a loss over its classes, so an axis that reaches it reaches an output.
    - `stops`: operands to which no gradient passes, though the result is floating-point.
    - `moves`: the op copies elements and computes nothing, so that ids remain ids.
    - `samples`: calls of the op, with which the row is verified.
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
        reduced = [f"{f}: {how}" for f, how in sorted(self.reduce.items())]
        sets = [", ".join(map(str, sorted(operands))) for operands in self.linear]
        bias = [f"bias {', '.join(map(str, sorted(self.bias)))}"] if self.bias else []
        whole = [f"whole: {', '.join(sorted(self.whole))}"] if self.whole else []
        linear = [f"linear in {' or '.join(sets)}"] if sets else []
        return "; ".join([rule, *reduced, *whole, *linear, *bias])


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of one node: its dim and the slots that have it.

    - `kind`: pass, reduce (contracted: sharding leaves a partial sum) or unshardable.
    - `join`: "sum" or "mean" for a reduced factor.
    - `block`: a rank must have consecutive elements of it.
    - `aligned`: a rank must have a multiple of `ALIGNED` elements of it.
    - `grouped`: the bounds of row groups along which it may nevertheless be sharded.
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

    - `value`: the value read; `dims`: its dims at this use.
    - `argument`, `item`: its position in the schema and in a list argument (-1 if not in a list).
    """

    value: Value
    dims: tuple[Dim, ...]
    argument: int | str
    item: int


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A row applied to one node; operands are numbered among the tensors that are present.

    - `results`: the dims of each result.
    - `linear`, `bias`: as in Row, renumbered; sets with a literal operand are dropped.
    - `emit`, `extra`: the local form and the dims it needs (pieces of a slice, sections of a
      split).
    - `ruled`: False if no row was found, so that everything is replicated.
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
    """The result of running an op without a row: a row, or why the op needs replicated operands."""

    op: str
    row: Row | None
    reason: str = ""
