"""Exact minimisation of a sum of small cost tables by eliminating one variable after another.

Layers repeat, so nearly every elimination has been computed before. Tables of equal content get one
serial number, and an elimination is looked up by the serials of its tables; its result is one
serial again, so reuse extends from ops to layers, pairs of layers, and so on. The order helps:
among the variables of least degree, those whose neighbourhood has seen the fewest eliminations go
first, so that all layers are reduced in parallel rather than one after another.
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

Costs: TypeAlias = NDArray[np.int64]
Signature: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]

LIMIT = 2**62
"""Totals stay below this in each packed integer: no sum overflows or reaches the sentinel."""
SENTINEL = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Step:
    """The elimination of `variable`, whose neighbours are then `scope`, in increasing order."""

    variable: int
    scope: tuple[int, ...]


@dataclass(slots=True)
class _Store:
    """Packed tables by serial number; the table and argmin of eliminations by signature.

    A signature is (place of the eliminated variable, ()), then each table's serial with the places
    of its scope among the step's variables in increasing order.
    """

    tables: list[Costs] = field(default_factory=list[Costs])
    results: dict[Signature, tuple[int, NDArray[np.intp]]] = field(
        default_factory=dict[Signature, tuple[int, NDArray[np.intp]]]
    )

    def add(self, table: Costs) -> int:
        """Add `table` and return its serial number."""
        self.tables.append(table)
        return len(self.tables) - 1


def order_variables(
    sizes: Sequence[int], pairs: Iterable[tuple[int, int]], by_size: bool = False
) -> tuple[Step, ...]:
    """Order the variables by least degree (`by_size`: by least combined table).

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
    """Find the largest number of variables, less one, in a step."""
    return max((len(step.scope) for step in steps), default=0)


def count_entries(steps: Sequence[Step], sizes: Sequence[int]) -> int:
    """Count the entries of the largest combined table of the steps."""
    return max((sizes[s.variable] * prod(sizes[u] for u in s.scope) for s in steps), default=1)


def pack_costs(problem: Problem) -> Costs:
    """Build the int64 matrix (packed integers, levels) that packs a cost tuple.

    Example: levels whose totals stay below 10, 100 and 2^61 give `[[100, 1, 0], [0, 0, 1]]`.

    Constraints:
    - Packed costs are ordered as the tuples are, for every sum of the problem's costs.
    - Costs are not negative, and no level's total reaches 2^62.
    """
    ranges = [total + 1 for total in _bound_totals(problem)]
    assert max(ranges, default=1) <= LIMIT, f"a level's total reaches 2^62: {ranges}"
    rows: list[list[int]] = []
    used = 1
    for level, size in enumerate(ranges):
        if not rows or used * size > LIMIT:
            rows.append([0] * len(ranges))
            used = 1
        used *= size
        rows[-1] = [n * size for n in rows[-1]]
        rows[-1][level] = 1
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(ranges))


def eliminate(problem: Problem, steps: Sequence[Step]) -> tuple[int, ...]:
    """Find the choice of least cost: minima step by step, then the choices in reverse.

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
"""For each variable, the serials of its tables by scope."""


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
                by_content[content] = store.add(table)
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
        store.results[signature] = (store.add(table), argmin)
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
    """Find the lexicographic minimum over one dim, and its first index."""
    least: list[Costs] = []
    tied = np.ones((), dtype=np.bool_)
    for i, row in enumerate(table):
        candidates = np.where(tied, row, SENTINEL) if i else row
        low = candidates.min(axis=place, keepdims=True)
        tied = candidates == low
        least.append(low.squeeze(place))
    return np.stack(least), tied.argmax(axis=place)
