"""Runs an op without a row on shards, and finds how the results of the ranks combine.

A *split* is the place of a factor in one dim: the dim is viewed as `outer * size * inner`, and the
middle is divided among the ranks. Operands, results and gradients are placed as by a strategy that
shards the factor: an operand that lacks the factor gets a partial gradient, and so on.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from torch import Tensor

from autotp.oprules.discover.trial import Trial


class DimSplit(NamedTuple):
    """A dim viewed as `outer * size * inner`, of which the middle is sharded."""

    dim: int
    outer: int
    size: int
    inner: int

    def part(self, x: Tensor, part: range) -> Tensor:
        """The elements of `x` in the range `part` of the middle."""
        shape = list(x.shape)
        seen = x.reshape(*shape[: self.dim], self.outer, self.size, -1, *shape[self.dim + 1 :])
        shape[self.dim] = self.outer * len(part) * self.inner
        return seen.narrow(self.dim + 1, part.start, len(part)).reshape(shape)


class Combination(NamedTuple):
    """How the results of the ranks combine.

    - `kind`: pass or sum. `cuts`: for pass, the split of each result; None if it is replicated.
    - `bias`: for sum, the operands that must be partial too, so that they count only once.
    """

    kind: str
    cuts: tuple[DimSplit | None, ...] = ()
    bias: frozenset[int] = frozenset()

    def like(self, other: "Combination | None") -> bool:
        """Whether another, found at other sizes, is the same apart from the sizes."""
        if other is None or (self.kind, self.bias) != (other.kind, other.bias):
            return False
        return [c and c.dim for c in self.cuts] == [c and c.dim for c in other.cuts]


def split_range(size: int, ranks: int) -> list[range]:
    """Consecutive ranges of `size` elements, one per rank, as unequal as possible."""
    ranks = min(size, ranks)
    stops = [size - k for k in reversed(range(ranks))]
    return [range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


@dataclass(frozen=True, slots=True)
class ShardedTrial:
    """The operands of one trial, sharded over ranks by `cuts` into `parts`."""

    trial: Trial
    cuts: Mapping[int, DimSplit]
    parts: Sequence[range]

    def find_combination(self) -> Combination | None:
        """How results combine, forward and backward; None if they do not."""
        local = [self.trial.run(tensors) for tensors in self._ranks()]
        return next((j for j in self._forward(local) if self._returns(j)), None)

    def _ranks(self, bias: frozenset[int] = frozenset()) -> list[list[Tensor]]:
        """The operands of each rank; those in `bias` are random summands of the full ones."""
        full, generator = self.trial.operands, self.trial.generator(1)
        ranks = [
            [self.cuts[k].part(x, part) if k in self.cuts else x for k, x in enumerate(full)]
            for part in self.parts
        ]
        for k in sorted(bias):
            noise = [self.trial.noise(full[k], generator) for _ in self.parts[1:]]
            for tensors, x in zip(ranks, [full[k] - sum(noise), *noise], strict=True):
                tensors[k] = x
        return ranks

    # ── forward ──────────────────────────────────────────────────────────────────────────────

    def _forward(self, local: Sequence[Sequence[Tensor]]) -> Iterator[Combination]:
        """Every way in which the results of the ranks combine to the expected ones."""
        shapes = {tuple(tuple(x.shape) for x in results) for results in local}
        if shapes != {tuple(tuple(x.shape) for x in self.trial.results)}:
            columns = list(zip(self.trial.results, zip(*local, strict=True), strict=True))
            cuts = [self._find_split(full, pieces) for full, pieces in columns]
            if all(c or self._is_whole(*column) for c, column in zip(cuts, columns, strict=True)):
                yield Combination("pass", tuple(cuts))
        elif all(x.is_floating_point() for x in self.trial.results):
            yield from self._sums(local)

    def _is_whole(self, full: Tensor, pieces: Sequence[Tensor]) -> bool:
        return all(self.trial.close(full, x) for x in pieces)

    def _find_split(self, full: Tensor, pieces: Sequence[Tensor]) -> DimSplit | None:
        """The split of one result into these pieces."""
        for cut in self._list_splits(full, pieces):
            wanted = [cut.part(full, part) for part in self.parts]
            if all(self.trial.close(w, x) for w, x in zip(wanted, pieces, strict=True)):
                return cut
        return None

    def _list_splits(self, full: Tensor, pieces: Sequence[Tensor]) -> Iterator[DimSplit]:
        """The splits of a result into pieces of these shapes."""
        shapes, size = [list(x.shape) for x in pieces], self.parts[-1].stop
        for dim, length in enumerate(full.shape):
            rest = length // size
            made = [list(full.shape) for _ in self.parts]
            for shape, part in zip(made, self.parts, strict=True):
                shape[dim] = rest * len(part)
            if rest and length == rest * size and made == shapes:
                outers = [n for n in range(1, rest + 1) if rest % n == 0]
                yield from (DimSplit(dim, n, size, rest // n) for n in outers)

    def _sums(self, local: Sequence[Sequence[Tensor]]) -> Iterator[Combination]:
        if self._add_up(local):
            yield Combination("sum")
        others = [k for k, x in enumerate(self.trial.operands) if x.is_floating_point()]
        for bias in _subsets([k for k in others if k not in self.cuts]):
            if self._add_up([self.trial.run(tensors) for tensors in self._ranks(bias)]):
                yield Combination("sum", bias=bias)

    def _add_up(self, local: Sequence[Sequence[Tensor]]) -> bool:
        return self.trial.agrees([_total(xs) for xs in zip(*local, strict=True)])

    # ── backward ─────────────────────────────────────────────────────────────────────────────

    def _returns(self, joined: Combination) -> bool:
        """Whether gradients are right when results combine this way."""
        if not self.trial.returns:
            return True
        ranks, given = self._ranks(joined.bias), self._place_gradients(joined)
        found = [self.trial.backward(x, g) for x, g in zip(ranks, given, strict=True)]
        columns = zip(*found, strict=True)
        return all(self._is_gradient(k, list(own), joined) for k, own in enumerate(columns))

    def _is_gradient(self, operand: int, own: list[Tensor], joined: Combination) -> bool:
        full = self.trial.gradients[operand]
        if operand in self.cuts:
            wanted = [self.cuts[operand].part(full, part) for part in self.parts]
        elif operand in joined.bias:
            wanted = [full] * len(self.parts)
        else:
            wanted, own = [full], [_total(own)]
        pairs = zip(wanted, own, strict=True)
        return all(self.trial.close(w, g, self.trial.gradients[operand]) for w, g in pairs)

    def _place_gradients(self, joined: Combination) -> list[list[Tensor]]:
        """The gradients of the results on each rank: shards, full tensors, or summands."""
        columns = [self._place_gradient(k, g, joined) for k, g in enumerate(self.trial.given)]
        return [list(given) for given in zip(*columns, strict=True)]

    def _place_gradient(self, result: int, g: Tensor, joined: Combination) -> list[Tensor]:
        if joined.kind == "sum":
            return [g] * len(self.parts)
        cut = joined.cuts[result]
        if cut is not None:
            return [cut.part(g, p) for p in self.parts]
        generator = self.trial.generator(2)
        noise = [self.trial.noise(g, generator) for _ in self.parts[1:]]
        return [g - sum(noise), *noise]


def is_linear(trial: Trial, operands: frozenset[int]) -> bool:
    """Whether summands of `operands` give summands of the results, and right gradients."""
    generator = trial.generator(3)
    noise = {k: trial.noise(trial.operands[k], generator) for k in sorted(operands)}
    first = [x - noise[k] if k in noise else x for k, x in enumerate(trial.operands)]
    ranks = [first, [noise.get(k, x) for k, x in enumerate(trial.operands)]]
    local = zip(*(trial.run(tensors) for tensors in ranks), strict=True)
    if not trial.agrees([a + b for a, b in local]):
        return False
    if not trial.returns:
        return True
    found = zip(*(trial.backward(tensors, trial.given) for tensors in ranks), strict=True)
    for full, (k, (a, b)) in zip(trial.gradients, enumerate(found), strict=True):
        own = [a, b] if k in operands else [a + b]
        if not all(trial.close(full, g) for g in own):
            return False
    return True


def _total(summands: Sequence[Tensor]) -> Tensor:
    return reduce(operator.add, summands)


def _subsets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """The sets of one number each, and the set of all."""
    yield from (frozenset({k}) for k in numbers)
    if len(numbers) > 1:
        yield frozenset(numbers)
