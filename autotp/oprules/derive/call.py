"""A node as rules see it, and the notation applied to it: factor names bound to dims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotp.algebra.axis import Dim, Forest
from autotp.algebra.size import Size
from autotp.oprules.derive.order import Orders
from autotp.oprules.notation import ELLIPSIS, Pattern, Signature
from autotp.oprules.rule import Factor, FactorKind, NodeRule, Row, Slot


@dataclass(slots=True)
class Call:
    """One node as a rule sees it.

    - `operands`: the dims of each present tensor operand; `sizes`: those of each result.
    - `positions`: for each tensor argument of the schema, its operand number, None if absent, -1 if
      it is a literal.
    - `arguments`: all arguments by schema name, with defaults.
    - `orders`: what is known about sorted positions.
    """

    forest: Forest
    operands: list[tuple[Dim, ...]]
    sizes: list[tuple[Size, ...]]
    positions: tuple[int | None, ...]
    arguments: Mapping[str, Any]
    row: Row
    orders: Orders

    def axis(self, value: int, rank: int) -> int:
        """`value` as a dim counted from 0."""
        return value % rank if rank else 0

    def fresh(self, result: int, dim: int, *, data: bool = False) -> Dim:
        """A new dim with the size of a result's dim."""
        return self.forest.add_dim(self.sizes[result][dim], data=data)


Builder = Callable[[Call], NodeRule | None]


def apply_notation(call: Call, signature: Signature) -> NodeRule | None:
    """The node rule by a signature; None if the ranks of the operands do not fit it."""
    binding = Binding(call, signature)
    for position, index in enumerate(call.positions[: len(signature.operands)]):
        if index is None or index < 0:
            continue
        if not binding.bind_operand(signature.operands[position], index):
            return None
    return binding.build_rule()


class Binding:
    """Binds factor names to dims while one signature is matched against one call."""

    def __init__(self, call: Call, signature: Signature) -> None:
        self.call, self.signature = call, signature
        self.dims: dict[str, Dim] = {}
        self.slots: dict[str, list[Slot]] = {}
        self.broken: set[str] = set()
        self.ones: set[str] = set()  # factors with size 1 somewhere

    def bind_operand(self, pattern: Pattern, index: int) -> bool:
        """Whether operand `index` fits `pattern`; binds its factors."""
        dims = self.call.operands[index]
        patterns = self._expand_pattern(pattern, len(dims))
        if len(patterns) != len(dims):
            return False
        for at, (names, dim) in enumerate(zip(patterns, dims, strict=True)):
            if not self._bind(names, dim, (index, at)):
                return False
        return True

    def _expand_pattern(self, pattern: Pattern, rank: int) -> list[tuple[str, ...]]:
        """The pattern for `rank` dims, unchanged if it does not fit."""
        if pattern[:1] != ((ELLIPSIS,),):
            return list(
                pattern[max(0, len(pattern) - rank) :]
            )  # fewer dims: broadcast from the right
        count = rank - len(pattern) + 1
        if count < 0:
            return list(pattern)
        leading = [(f"{ELLIPSIS}{k}",) for k in reversed(range(count))]  # aligned from the right
        return [*leading, *pattern[1:]]

    def _bind(self, names: tuple[str, ...], dim: Dim, slot: Slot) -> bool:
        forest = self.call.forest
        if not forest.flatten(dim):  # size 1: broadcast, or every factor of the group has size 1
            self.ones.update(names)
            return True
        if len(names) == 1:
            return self._bind_one(names[0], dim, slot)
        return self._bind_group(names, dim, slot)

    def _bind_one(self, name: str, dim: Dim, slot: Slot) -> bool:
        self.slots.setdefault(name, []).append(slot)
        if name not in self.dims:
            self.dims[name] = dim
        elif self.call.forest.size(self.dims[name]) != self.call.forest.size(dim) or not (
            self.call.forest.unify(self.dims[name], dim)
        ):
            self.broken.add(name)
        return True

    def _bind_group(self, names: tuple[str, ...], dim: Dim, slot: Slot) -> bool:
        forest = self.call.forest
        known = [n for n in names if n in self.dims]
        unknown = [n for n in names if n not in self.dims]
        if len(unknown) > 1:
            unknown = [n for n in unknown if n not in self.ones]
        if len(unknown) > 1:
            return False
        if unknown:
            rest = forest.size(dim)
            for name in known:
                quotient = rest.over(forest.size(self.dims[name]))
                if quotient is None:
                    return False
                rest = quotient
            self.dims[unknown[0]] = forest.add_dim(rest)
        named = [n for n in names if n in self.dims]
        united = forest.unify(tuple(atom for n in named for atom in self.dims[n]), dim)
        for name in named:
            self.slots.setdefault(name, []).append(slot)
            if not united:
                self.broken.add(name)
        return True

    def build_rule(self) -> NodeRule:
        """The node rule of everything bound."""
        results = tuple(self._build_result(k, p) for k, p in enumerate(self.signature.results))
        row = self.call.row
        return NodeRule(
            factors=tuple(self._build_factor(name) for name in self.slots),
            results=results,
            linear=renumber_sets(self.call, row.linear),
            bias=frozenset(
                i for b in row.bias if (i := find_operand(self.call, b)) is not None and i >= 0
            ),
            emit=row.emit,
            loss=row.loss,
        )

    def _build_result(self, number: int, pattern: Pattern) -> tuple[Dim, ...]:
        out: list[Dim] = []
        for at, names in enumerate(self._expand_pattern(pattern, len(self.call.sizes[number]))):
            size = self.call.sizes[number][at]
            dim = tuple(a for n in names for a in self.dims.get(n, ()))
            if self.call.forest.size(dim) != size:  # broadcast, or sizes whose equality is unknown
                self.broken.update(names)
                dim = self.call.forest.add_dim(size)
            for name in names:
                if name in self.slots:
                    self.slots[name].append((~number, at))
            out.append(dim)
        return tuple(out)

    def _build_factor(self, name: str) -> Factor:
        join = self.call.row.reduce.get(name, "")
        kind: FactorKind = "pass"
        if name in self.broken or name in self.call.row.whole or join in ("max", "none"):
            kind = "unshardable"
        elif join:
            kind = "reduce"
        join = join if kind == "reduce" else ""
        block = name in self.call.row.block
        aligned = name in self.call.row.aligned
        return Factor(kind, self.dims[name], tuple(self.slots[name]), join, block, aligned)


def find_operand(call: Call, number: int) -> int | None:
    """The operand number of tensor argument `number`: None if it is absent, -1 if a literal."""
    return call.positions[number] if number < len(call.positions) else None


def renumber_sets(call: Call, sets: Sequence[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """Linear sets of present operands, without those that contain a literal (`x + 1.0`)."""
    out: list[frozenset[int]] = []
    for operands in sets:
        numbers = [find_operand(call, n) for n in sorted(operands)]
        if -1 not in numbers and any(n is not None for n in numbers):
            renumbered = frozenset(n for n in numbers if n is not None)
            if renumbered not in out:
                out.append(renumbered)
    return tuple(out)


def move_dims(call: Call, source: Sequence[int | None]) -> NodeRule:
    """The rule of an op that moves dims: `source[j]` is the operand dim of result dim j."""
    dims = call.operands[0]
    results = tuple(() if s is None else dims[s] for s in source)
    factors = [
        Factor("pass", dims[s], ((0, s), (~0, j)))
        for j, s in enumerate(source)
        if s is not None and dims[s]
    ]
    factors += [
        Factor("unshardable", dims[i], ((0, i),))
        for i in range(len(dims))
        if i not in source and dims[i]
    ]
    return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit=call.row.emit)
