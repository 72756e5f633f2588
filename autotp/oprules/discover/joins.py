"""An op without a row, run on parts: how the ranks' results make the whole one, if they do.

A *cut* is where a factor stands in one dim: the dim is viewed as `outer * size * inner`, and the
ranks share the middle. Operands are placed, and results and gradients read, as a strategy that
cuts the factor would have them: what lacks the factor gets a partial gradient, and so on.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from torch import Tensor

from autotp.oprules.discover.trial import Trial

__all__ = ["DimSplit", "Combination", "ShardedTrial", "is_linear", "split_range"]


class DimSplit(NamedTuple):
    """A dim viewed as `outer * size * inner`, of which the middle is cut."""

    dim: int
    outer: int
    size: int
    inner: int

    def part(self, x: Tensor, part: range) -> Tensor:
        """The elements of `x` that are in `part` of the middle."""
        shape = list(x.shape)
        seen = x.reshape(*shape[: self.dim], self.outer, self.size, -1, *shape[self.dim + 1 :])
        shape[self.dim] = self.outer * len(part) * self.inner
        return seen.narrow(self.dim + 1, part.start, len(part)).reshape(shape)


class Combination(NamedTuple):
    """How the ranks' results make the whole.

    - `kind`: pass or sum. `cuts`: for pass, each result's cut; None if every rank has it all.
    - `bias`: for sum, the operands that must be partial too, lest they count once a rank.
    """

    kind: str
    cuts: tuple[DimSplit | None, ...] = ()
    bias: frozenset[int] = frozenset()

    def like(self, other: "Combination | None") -> bool:
        """Whether another, found at other sizes, is the same but for the sizes."""
        if other is None or (self.kind, self.bias) != (other.kind, other.bias):
            return False
        return [c and c.dim for c in self.cuts] == [c and c.dim for c in other.cuts]


def split_range(size: int, ranks: int) -> list[range]:
    """Consecutive parts of `size` elements, one a rank and as unequal as can be."""
    ranks = min(size, ranks)
    stops = [size - k for k in reversed(range(ranks))]
    return [range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


@dataclass(frozen=True, slots=True)
class ShardedTrial:
    """Operands of one trial cut over ranks, each rank's `part` of all `cuts`."""

    trial: Trial
    cuts: Mapping[int, DimSplit]
    parts: Sequence[range]

    def joined(self) -> Combination | None:
        """How results join, forward and backward; None if they do not."""
        local = [self.trial.run(tensors) for tensors in self._ranks()]
        return next((j for j in self._forward(local) if self._returns(j)), None)

    def _ranks(self, bias: frozenset[int] = frozenset()) -> list[list[Tensor]]:
        """Each rank's operands; those in `bias` are random summands of the whole."""
        whole, generator = self.trial.operands, self.trial.generator(1)
        ranks = [
            [self.cuts[k].part(x, part) if k in self.cuts else x for k, x in enumerate(whole)]
            for part in self.parts
        ]
        for k in sorted(bias):
            noise = [self.trial.noise(whole[k], generator) for _ in self.parts[1:]]
            for tensors, x in zip(ranks, [whole[k] - sum(noise), *noise], strict=True):
                tensors[k] = x
        return ranks

    # ── forward ──────────────────────────────────────────────────────────────────────────────

    def _forward(self, local: Sequence[Sequence[Tensor]]) -> Iterator[Combination]:
        """Every way in which the ranks' results make the whole ones."""
        shapes = {tuple(tuple(x.shape) for x in results) for results in local}
        if shapes != {tuple(tuple(x.shape) for x in self.trial.whole)}:
            columns = list(zip(self.trial.whole, zip(*local, strict=True), strict=True))
            cuts = [self._cut_of(whole, pieces) for whole, pieces in columns]
            if all(c or self._is_whole(*column) for c, column in zip(cuts, columns, strict=True)):
                yield Combination("pass", tuple(cuts))
        elif all(x.is_floating_point() for x in self.trial.whole):
            yield from self._sums(local)

    def _is_whole(self, whole: Tensor, pieces: Sequence[Tensor]) -> bool:
        return all(self.trial.close(whole, x) for x in pieces)

    def _cut_of(self, whole: Tensor, pieces: Sequence[Tensor]) -> DimSplit | None:
        """The cut of one result that gives these pieces."""
        for cut in self._cuts_of(whole, pieces):
            wanted = [cut.part(whole, part) for part in self.parts]
            if all(self.trial.close(w, x) for w, x in zip(wanted, pieces, strict=True)):
                return cut
        return None

    def _cuts_of(self, whole: Tensor, pieces: Sequence[Tensor]) -> Iterator[DimSplit]:
        """The cuts of a result that make pieces of these shapes."""
        shapes, size = [list(x.shape) for x in pieces], self.parts[-1].stop
        for dim, length in enumerate(whole.shape):
            rest = length // size
            made = [list(whole.shape) for _ in self.parts]
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
        """Whether gradients come back as they must when results join so."""
        if not self.trial.returns:
            return True
        ranks, given = self._ranks(joined.bias), self._given(joined)
        found = [self.trial.backward(x, g) for x, g in zip(ranks, given, strict=True)]
        columns = zip(*found, strict=True)
        return all(self._is_gradient(k, list(own), joined) for k, own in enumerate(columns))

    def _is_gradient(self, operand: int, own: list[Tensor], joined: Combination) -> bool:
        whole = self.trial.gradients[operand]
        if operand in self.cuts:
            wanted = [self.cuts[operand].part(whole, part) for part in self.parts]
        elif operand in joined.bias:
            wanted = [whole] * len(self.parts)
        else:
            wanted, own = [whole], [_total(own)]
        pairs = zip(wanted, own, strict=True)
        return all(self.trial.close(w, g, self.trial.gradients[operand]) for w, g in pairs)

    def _given(self, joined: Combination) -> list[list[Tensor]]:
        """Each rank's gradients of the results: parts, the whole, or summands of it."""
        columns = [self._shared(k, g, joined) for k, g in enumerate(self.trial.given)]
        return [list(given) for given in zip(*columns, strict=True)]

    def _shared(self, result: int, g: Tensor, joined: Combination) -> list[Tensor]:
        if joined.kind == "sum":
            return [g] * len(self.parts)
        cut = joined.cuts[result]
        if cut is not None:
            return [cut.part(g, p) for p in self.parts]
        generator = self.trial.generator(2)
        noise = [self.trial.noise(g, generator) for _ in self.parts[1:]]
        return [g - sum(noise), *noise]


def is_linear(trial: Trial, operands: frozenset[int]) -> bool:
    """Whether summands of `operands` give summands of the results, and gradients as they must."""
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
    for whole, (k, (a, b)) in zip(trial.gradients, enumerate(found), strict=True):
        own = [a, b] if k in operands else [a + b]
        if not all(trial.close(whole, g) for g in own):
            return False
    return True


def _total(summands: Sequence[Tensor]) -> Tensor:
    return reduce(operator.add, summands)


def _subsets(numbers: Sequence[int]) -> Iterator[frozenset[int]]:
    """The sets of one number, and of all."""
    yield from (frozenset({k}) for k in numbers)
    if len(numbers) > 1:
        yield frozenset(numbers)
