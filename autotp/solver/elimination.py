"""Exact minimisation of a sum of small tables by eliminating one variable after another.

The one idea: layers repeat, so nearly every elimination has been done before. Tables of equal
content get one serial number, and an elimination is looked up by the serials that it joins; its
result is again one serial, so repetition spreads from op to layer, and from layer to pairs of
layers, pairs of pairs. The order helps: among the variables of least degree, those go first whose
neighbourhood has seen the fewest eliminations, so that all layers shrink side by side instead of
one after another.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotp.solver.problem import Problem

__all__ = ["Step", "eliminate", "order_variables", "pack_costs", "count_entries", "find_width"]

Costs: TypeAlias = NDArray[np.int64]
Signature: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]

WORD = 2**62
"""Totals stay below this in each packed word: no sum overflows, and the sentinel is above them."""
SENTINEL = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Step:
    """The elimination of `variable` while `scope`, in increasing order, are its neighbours."""

    variable: int
    scope: tuple[int, ...]


@dataclass(slots=True)
class _Store:
    """Packed tables by serial number; the table and argmin of eliminations by signature.

    A signature is what a step joins: each table's serial with the places of its scope among the
    step's variables in increasing order, after (place of the variable that goes, ()).
    """

    tables: list[Costs] = field(default_factory=list[Costs])
    results: dict[Signature, tuple[int, NDArray[np.intp]]] = field(
        default_factory=dict[Signature, tuple[int, NDArray[np.intp]]]
    )

    def added(self, table: Costs) -> int:
        """The serial number of `table`, which becomes part of the store."""
        self.tables.append(table)
        return len(self.tables) - 1


def order_variables(
    sizes: Sequence[int], pairs: Iterable[tuple[int, int]], by_size: bool = False
) -> tuple[Step, ...]:
    """The order of least degree (`by_size`: of least joined table) over variables and `pairs`.

    Example: on a chain a - b - c the order is a, c, b: the ends have one neighbour each, b has two.

    Constraints:
    - Ties go to the neighbourhood with the fewest eliminations so far, then to the lower index; the
      order depends on nothing else.
    """
    adjacent = _list_neighbours(len(sizes), pairs)

    def weight(v: int) -> int:
        return sizes[v] * prod([sizes[u] for u in adjacent[v]]) if by_size else len(adjacent[v])

    current = [(weight(v), 0, v) for v in range(len(sizes))]
    heap = list(current)
    heapq.heapify(heap)
    steps: list[Step] = []
    while heap:
        entry = heapq.heappop(heap)
        v = entry[2]
        if entry != current[v]:
            continue
        near = adjacent[v]
        steps.append(Step(v, tuple(sorted(near))))
        current[v] = (-1, 0, v)
        for u in near:
            adjacent[u] |= near
            adjacent[u] -= {u, v}
        for u in near:
            current[u] = (weight(u), max(current[u][1], entry[1] + 1), u)
            heapq.heappush(heap, current[u])
    return tuple(steps)


def find_width(steps: Sequence[Step]) -> int:
    """The largest number of variables, less one, that a step joins."""
    return max((len(step.scope) for step in steps), default=0)


def count_entries(steps: Sequence[Step], sizes: Sequence[int]) -> int:
    """The number of entries of the largest table that the steps join."""
    return max((sizes[s.variable] * prod(sizes[u] for u in s.scope) for s in steps), default=1)


def pack_costs(problem: Problem) -> Costs:
    """The int64 matrix (words, levels) that packs a cost tuple into as few words as hold it.

    Example: levels whose totals stay below 10, 100 and 2^61 give `[[100, 1, 0], [0, 0, 1]]`.

    Constraints:
    - Packed words are ordered as the tuples are, for every sum of the problem's costs.
    - Costs are not negative, and no level's total reaches 2^62.
    """
    ranges = [total + 1 for total in _bound_totals(problem)]
    assert max(ranges, default=1) <= WORD, f"a level's total reaches 2^62: {ranges}"
    rows: list[list[int]] = []
    used = 1
    for level, size in enumerate(ranges):
        if not rows or used * size > WORD:
            rows.append([0] * len(ranges))
            used = 1
        used *= size
        rows[-1] = [n * size for n in rows[-1]]
        rows[-1][level] = 1
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(ranges))


def eliminate(problem: Problem, steps: Sequence[Step]) -> tuple[int, ...]:
    """The choice of least cost: each step's minimum in order, then each choice in reverse.

    Constraints:
    - Among equal minima a step takes the first choice in its variable's domain.
    """
    store = _Store()
    incident = _collect_tables(problem, store)
    best: list[NDArray[np.intp]] = []
    for step in steps:
        serial, argmin = _eliminate_variable(step, incident, store)
        best.append(argmin)
        for u in step.scope:
            incident[u][step.scope] = (*incident[u].get(step.scope, ()), serial)
    choice = [0] * len(problem.variables)
    for step, argmin in zip(reversed(steps), reversed(best), strict=True):
        choice[step.variable] = int(argmin[tuple([choice[u] for u in step.scope])])
    return tuple(choice)


def _list_neighbours(count: int, pairs: Iterable[tuple[int, int]]) -> list[set[int]]:
    adjacent: list[set[int]] = [set() for _ in range(count)]
    for a, b in pairs:
        if a != b:
            adjacent[a].add(b)
            adjacent[b].add(a)
    return adjacent


def _bound_totals(problem: Problem) -> list[int]:
    arrays = [v.costs for v in problem.variables] + [e.costs for e in problem.edges]
    times = Counter(id(a) for a in arrays)
    totals = [0] * len(problem.levels)
    for array in {id(a): a for a in arrays}.values():
        flat = array.reshape(len(totals), -1)
        assert flat.min() >= 0, "a cost is negative"
        for level, largest in enumerate(flat.max(axis=1).tolist()):
            totals[level] += largest * times[id(array)]
    return totals


Incident: TypeAlias = list[dict[tuple[int, ...], tuple[int, ...]]]
"""For each variable the tables that hold it: serials by scope."""


def _collect_tables(problem: Problem, store: _Store) -> Incident:
    matrix = pack_costs(problem)
    by_source: dict[tuple[int, str], int] = {}
    by_content: dict[tuple[tuple[int, ...], bytes], int] = {}

    def serial(costs: Costs, form: str) -> int:
        source = (id(costs), form)
        if source not in by_source:
            table = np.tensordot(matrix, np.einsum(form, costs), 1)
            content = (table.shape, table.tobytes())
            if content not in by_content:
                by_content[content] = store.added(table)
            by_source[source] = by_content[content]
        return by_source[source]

    tables: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for v, variable in enumerate(problem.variables):
        tables[v,].append(serial(variable.costs, "lk->lk"))
    for edge in problem.edges:
        a, b = edge.first, edge.second
        form = "lkm->lkm" if a < b else "lkm->lmk" if b < a else "lkk->lk"
        tables[tuple(sorted({a, b}))].append(serial(edge.costs, form))
    incident: Incident = [{} for _ in problem.variables]
    for scope, serials in tables.items():
        for v in scope:
            incident[v][scope] = tuple(sorted(serials))
    return incident


def _eliminate_variable(
    step: Step, incident: Incident, store: _Store
) -> tuple[int, NDArray[np.intp]]:
    members = sorted((*step.scope, step.variable))
    place = {u: i for i, u in enumerate(members)}
    parts: list[tuple[int, tuple[int, ...]]] = [(place[step.variable], ())]
    for scope, serials in incident[step.variable].items():
        where = tuple([place[u] for u in scope])
        parts += [(serial, where) for serial in serials]
        for u in scope:
            if u != step.variable:
                del incident[u][scope]
    signature = (parts[0], *sorted(parts[1:]))
    if signature not in store.results:
        table, argmin = _find_minimum(
            _sum_tables(signature[1:], len(members), store.tables), parts[0][0]
        )
        store.results[signature] = (store.added(table), argmin)
    return store.results[signature]


def _sum_tables(parts: Signature, rank: int, tables: Sequence[Costs]) -> Costs:
    total = np.zeros((1,) * (rank + 1), dtype=np.int64)
    for serial, where in sorted(parts, key=lambda part: len(part[1])):
        shape = [1] * rank
        for size, place in zip(tables[serial].shape[1:], where, strict=True):
            shape[place] = size
        total = total + tables[serial].reshape(-1, *shape)
    return total


def _find_minimum(table: Costs, place: int) -> tuple[Costs, NDArray[np.intp]]:
    """The lexicographic minimum over one dim, word after word, and its first index."""
    least: list[Costs] = []
    tied = np.ones((), dtype=np.bool_)
    for i, word in enumerate(table):
        open_word = np.where(tied, word, SENTINEL) if i else word
        low = open_word.min(axis=place, keepdims=True)
        tied = open_word == low
        least.append(low.squeeze(place))
    return np.stack(least), tied.argmax(axis=place)
