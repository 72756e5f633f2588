"""Finds the factors of an op without a row: which dims of which operands can be sharded together.

Candidates are tried in a fixed order: dims of equal size, one of each operand, most operands first;
then dims that are multiples of others (query heads of key-value heads), sharded as blocks; then
what such a factor leaves of them. A candidate must hold at all sizes, for all draws, on two and on
three ranks. For an op with very many operands, only the first candidates are tried.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, product
from typing import Literal, TypeAlias, TypeVar

from autotp.algebra.size import Size
from autotp.oprules.discover.call import OpaqueCall, Values, evaluate_size
from autotp.oprules.discover.joins import (
    Combination,
    DimSplit,
    ShardedTrial,
    is_linear,
    split_range,
)
from autotp.oprules.discover.trial import Trial
from autotp.oprules.rule import Slot

Mode: TypeAlias = Literal["all", "major", "within"]
"""Which factor of a dim of N elements it is, next to another of n elements."""

_MOST_CANDIDATES = 400  # counted, not timed: all ranks must stop together
_MOST_LINEAR = 4  # operands of which all sets are tried


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a factor in an operand."""

    dim: int
    mode: Mode

    def split(self, length: int, n: int) -> DimSplit | None:
        """The split of a dim of `length` with a factor of `n`; None if `n` does not divide it."""
        if length % n:
            return None
        outer, size, inner = {
            "all": (1, length, 1),
            "major": (1, n, length // n),
            "within": (n, length // n, 1),
        }[self.mode]
        return DimSplit(self.dim, outer, size, inner)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Places in operands of a factor of size `base`, or of the factor next to one of that size."""

    base: Size
    places: Mapping[int, Place]

    def cuts(self, call: OpaqueCall, values: Values) -> dict[int, DimSplit] | None:
        """The split of each operand at these sizes; None if there is none into more than one."""
        n = evaluate_size(self.base, values)
        found = {
            k: p.split(evaluate_size(call.shapes[k][p.dim], values), n)
            for k, p in self.places.items()
        }
        cuts = {k: c for k, c in found.items() if c is not None}
        sizes = {c.size for c in cuts.values()}
        return cuts if len(cuts) == len(found) and len(sizes) == 1 and min(sizes) > 1 else None


@dataclass(frozen=True, slots=True)
class FoundFactor:
    """A factor that holds: how results combine when it is sharded, for each family of sizes."""

    candidate: Candidate
    cuts: tuple[dict[int, DimSplit], ...]
    joined: tuple[Combination, ...]


def find_factors(call: OpaqueCall, families: Sequence[Sequence[Trial]]) -> list[FoundFactor]:
    """Every factor of the op; no two of them overlap in a dim."""
    search = _Search(call, families)
    for stage in (_list_equal, _list_multiples, _list_rests):
        candidates = stage(call, families[0][0].values, search.found)
        for candidate in islice(filter(search.is_free, candidates), _MOST_CANDIDATES):
            search.attempt(candidate)
    return search.found


class _Search:
    """The factors found so far, and their places."""

    def __init__(self, call: OpaqueCall, families: Sequence[Sequence[Trial]]) -> None:
        self.call, self.families = call, families
        self.found: list[FoundFactor] = []
        self.taken: set[tuple[int, int, str]] = set()

    def attempt(self, candidate: Candidate) -> None:
        """Add a candidate if it holds."""
        made = [candidate.cuts(self.call, trials[0].values) for trials in self.families]
        cuts = [c for c in made if c is not None]
        if len(cuts) < len(made):
            return
        joined: list[Combination] = []
        for at, (trials, cut) in enumerate(zip(self.families, cuts, strict=True)):
            found = _find_combination(trials, cut, ranks=2 + at)
            if found is None or (joined and not found.like(joined[0])):
                return
            joined.append(found)
        self.found.append(FoundFactor(candidate, tuple(cuts), tuple(joined)))
        self.taken |= {(k, p.dim, p.mode) for k, p in candidate.places.items()}

    def is_free(self, candidate: Candidate) -> bool:
        """Whether no place of a candidate overlaps with a factor found."""
        return not any(self._is_taken(k, p) for k, p in candidate.places.items())

    def _is_taken(self, operand: int, place: Place) -> bool:
        modes = {m for k, dim, m in self.taken if (k, dim) == (operand, place.dim)}
        return not modes <= ({"major"} if place.mode == "within" else set[str]())


def _find_combination(
    trials: Sequence[Trial], cuts: Mapping[int, DimSplit], ranks: int
) -> Combination | None:
    """How results combine at the sizes of one family, the same for all draws; None if not."""
    parts = split_range(next(iter(cuts.values())).size, ranks)
    first: Combination | None = None
    for trial in trials:
        found = _attempt(ShardedTrial(trial, cuts, parts).find_combination, None)
        if found is None or (first is not None and found != first):
            return None
        first = found
    return first


T = TypeVar("T")


def _attempt(attempt: Callable[[], T], refused: T) -> T:
    """The result of an attempt; `refused` if the op does not accept such operands."""
    try:
        return attempt()
    except Exception:  # noqa: BLE001  any op, on shards that it may not be made for
        return refused


# ── candidates ───────────────────────────────────────────────────────────────────────────────────


def _list_equal(
    call: OpaqueCall, values: Values, found: Sequence[FoundFactor]
) -> Iterator[Candidate]:
    """Dims of one size, at most one of each operand."""
    for base in _list_bases(call):
        options = [
            [None, *(Place(d, "all") for d, s in enumerate(shape) if s == base)]
            for shape in call.shapes
        ]
        yield from _list_choices(base, options)


def _list_multiples(
    call: OpaqueCall, values: Values, found: Sequence[FoundFactor]
) -> Iterator[Candidate]:
    """Dims of one size with others that are multiples of it."""
    for base in _list_bases(call):
        options = [
            [None, *_list_places(shape, base, values)] if base.static else [None]
            for shape in call.shapes
        ]
        for candidate in _list_choices(base, options):
            if {p.mode for p in candidate.places.values()} == {"all", "major"}:
                yield candidate


def _list_places(shape: Sequence[Size], base: Size, values: Values) -> Iterator[Place]:
    n = evaluate_size(base, values)
    for dim, size in enumerate(shape):
        if size == base:
            yield Place(dim, "all")
        elif (
            size.static and evaluate_size(size, values) % n == 0 and evaluate_size(size, values) > n
        ):
            yield Place(dim, "major")


def _list_rests(
    call: OpaqueCall, values: Values, found: Sequence[FoundFactor]
) -> Iterator[Candidate]:
    """What a factor found leaves of the dims that are its multiples."""
    for factor in list(found):
        places = factor.candidate.places
        left = {k: Place(p.dim, "within") for k, p in places.items() if p.mode == "major"}
        options = [[None, left[k]] if k in left else [None] for k in range(len(call.shapes))]
        yield from _list_choices(factor.candidate.base, options)


def _list_bases(call: OpaqueCall) -> list[Size]:
    return list(dict.fromkeys(s for shape in call.shapes for s in shape if s.static not in (0, 1)))


def _list_choices(base: Size, options: Sequence[Sequence[Place | None]]) -> Iterator[Candidate]:
    """One option for each operand, most places first."""
    every = ({k: p for k, p in enumerate(chosen) if p is not None} for chosen in product(*options))
    for places in sorted(every, key=len, reverse=True):
        if places:
            yield Candidate(base, places)


# ── what is in no factor ─────────────────────────────────────────────────────────────────────────


def find_ties(trial: Trial, found: Sequence[FoundFactor]) -> dict[Slot, Slot]:
    """Dims in no factor, mapped to the first dim of an earlier operand that must have equal size.

    Example: the head size of queries must be that of keys, or they could not be multiplied.
    """
    taken = {(k, p.dim) for f in found for k, p in f.candidate.places.items()}
    shapes = enumerate(trial.call.shapes)
    slots = [(k, d) for k, shape in shapes for d in range(len(shape)) if (k, d) not in taken]
    out: dict[Slot, Slot] = {}
    for one, other in combinations(slots, 2):
        if other not in out and one[0] < other[0] and _is_tied(trial, one, other):
            out[other] = out.get(one, one)
    return out


def _is_tied(trial: Trial, one: Slot, other: Slot) -> bool:
    """Whether two dims have equal sizes in the model, and the op refuses unequal ones."""
    shapes, length = trial.call.shapes, trial.operands[other[0]].shape[other[1]]
    if shapes[one[0]][one[1]] != shapes[other[0]][other[1]] or length < 2:
        return False
    tensors = list(trial.operands)
    tensors[other[0]] = tensors[other[0]].narrow(other[1], 0, length - 1)
    return _attempt(partial(trial.run, tensors), None) is None


# ── linear sets ──────────────────────────────────────────────────────────────────────────────────


def find_linear_sets(families: Sequence[Sequence[Trial]]) -> list[frozenset[int]]:
    """The sets of operands in which the op is linear."""
    trials = [t for trials in families for t in trials]
    floats = [k for k, x in enumerate(trials[0].operands) if x.is_floating_point()]
    if not all(x.is_floating_point() for x in trials[0].results):
        return []
    return [
        operands
        for operands in _list_sets(floats)
        if all(_attempt(partial(is_linear, t, operands), False) for t in trials)
    ]


def _list_sets(operands: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of few operands; of many, each alone and all together."""
    if len(operands) <= _MOST_LINEAR:
        for chosen in range(1, 1 << len(operands)):
            yield frozenset(o for k, o in enumerate(operands) if chosen >> k & 1)
        return
    yield from (frozenset({o}) for o in operands)
    yield frozenset(operands)
