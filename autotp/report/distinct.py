"""Merges the entries of a plan that differ only by their layer, and counts them.

Two entries share a row when they are equal but for the numbers in their paths:

    32 × model.layers.*.self_attn    column q_proj, k_proj, v_proj    row o_proj
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autotp.records.plan import CollectiveRecord, Pair, ParameterRecord, Plan
from autotp.records.replication import star_layers

T = TypeVar("T")
Tally = tuple[tuple[str, str, int, int, int], ...]
"""Counts of collectives: (phase, kind, payload bytes, time in picoseconds, count)."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """`count` equivalent pairs; `layouts` has their short parameter names, openers first."""

    count: int
    first: Pair
    path: str
    layouts: tuple[tuple[str, tuple[str, ...]], ...]
    collectives: Tally


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """`count` equivalent parameters; `paths` are their patterns, `bytes` is the sum over them."""

    count: int
    first: ParameterRecord
    paths: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """`count` equivalent collectives; bytes and time are the sums over them."""

    count: int
    first: CollectiveRecord
    path: str
    wire_bytes: int
    time_ps: int


def star_layers_of(paths: Sequence[str]) -> str:
    """Give the pattern of `paths`: `*` where their numbers differ.

    star_layers_of(["layers.0.mlp", "layers.1.mlp"]) == "layers.*.mlp"
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def list_places(paths: Sequence[str]) -> str:
    """List the patterns of `paths`, separated by commas."""
    return ", ".join(star_layers_of(group) for group in _group_by(paths, star_layers))


def list_pair_rows(plan: Plan) -> list[PairRow]:
    """List one row per distinct pair, in program order."""
    tallies = _count_collectives(plan)
    layouts = {pair.openers: _list_layouts(pair, plan) for pair in plan.pairs}

    def describe(pair: Pair) -> Hashable:
        sizes = (pair.role, pair.size, pair.local_sizes, pair.expression, pair.split)
        return (*sizes, star_layers(pair.module), layouts[pair.openers], tallies[pair.axis])

    return [
        PairRow(
            count=len(pairs),
            first=pairs[0],
            path=star_layers_of([pair.module for pair in pairs]),
            layouts=layouts[pairs[0].openers],
            collectives=tallies[pairs[0].axis],
        )
        for pairs in _group_by(plan.pairs, describe)
    ]


def list_replicated_rows(plan: Plan) -> list[ParameterRow]:
    """List the parameters with replicated bytes: one row per layout and reason."""
    records = [r for r in plan.parameters.values() if r.dim is None or r.replicated_bytes]
    groups = _group_by(records, lambda r: (r.layout, star_layers(r.reason)))
    rows = [replace(_parameter_row(g), bytes=sum(r.replicated_bytes for r in g)) for g in groups]
    return sorted(rows, key=lambda row: -row.bytes)


def list_other_rows(plan: Plan) -> list[ParameterRow]:
    """List the sharded parameters outside pairs, e.g. an embedding split along hidden."""
    owners = {_find_module(name) for pair in plan.pairs for name in (*pair.openers, *pair.closers)}
    others = [r for r in plan.parameters.values() if r.dim is not None]
    others = [r for r in others if not owners & {_find_module(name) for name in (r.name, *r.tied)}]
    groups = _group_by(others, lambda r: (star_layers(r.name), r.layout, r.dim, r.shape, r.shards))
    return [_parameter_row(group) for group in groups]


def list_collective_rows(plan: Plan) -> list[CollectiveRow]:
    """List one row per distinct collective: forward first, otherwise in program order."""

    def describe(record: CollectiveRecord) -> Hashable:
        return (record.phase, record.kind, record.payload_bytes, star_layers(record.where))

    rows = [
        CollectiveRow(
            count=len(group),
            first=group[0],
            path=star_layers_of([record.where for record in group]),
            wire_bytes=sum(record.wire_bytes for record in group),
            time_ps=sum(record.time_ps for record in group),
        )
        for group in _group_by(plan.collectives, describe)
    ]
    return sorted(rows, key=lambda row: row.first.phase != "forward")


def _parameter_row(group: list[ParameterRecord]) -> ParameterRow:
    by_pattern = _group_by(group, lambda record: star_layers(record.name))
    paths = tuple(star_layers_of([record.name for record in records]) for records in by_pattern)
    return ParameterRow(len(group), group[0], paths, sum(record.bytes for record in group))


def _count_collectives(plan: Plan) -> dict[str, Tally]:
    """Count, for every pair's axis, the collectives that its split requires."""
    counters: dict[str, Counter[tuple[str, str, int, int]]] = {
        p.axis: Counter() for p in plan.pairs
    }
    owners = {
        _find_module(name): pair.axis
        for pair in plan.pairs
        if pair.split
        for name in (*pair.openers, *pair.closers)
    }
    for record in plan.collectives:
        axis = record.axis or next(
            (owners[p] for p in _list_prefixes(record.where) if p in owners), ""
        )
        if axis in counters:
            key = (record.phase, record.kind, record.payload_bytes, record.time_ps)
            counters[axis][key] += 1
    return {axis: tuple((*key, n) for key, n in c.items()) for axis, c in counters.items()}


def _list_layouts(pair: Pair, plan: Plan) -> tuple[tuple[str, tuple[str, ...]], ...]:
    known = {name: r for r in plan.parameters.values() for name in (r.name, *r.tied)}
    found: dict[str, list[str]] = {}
    for name in (*pair.openers, *pair.closers):
        names = found.setdefault(known[name].layout, [])
        short = _shorten_name(name, pair.module)
        names.extend([short] if short not in names else [])
    return tuple((layout, tuple(names)) for layout, names in found.items())


def _shorten_name(name: str, module: str) -> str:
    """Give `name` relative to `module`, without a trailing `.weight` or `.bias`."""
    owner = _find_module(name)
    inner = owner.removeprefix(f"{module}.") if module else owner
    return star_layers(inner.rsplit(".", 1)[-1] if inner == module else inner)


def _find_module(name: str) -> str:
    """Give the module of the parameter `name`; a bare parameter counts as a module."""
    owner, _, last = name.rpartition(".")
    return owner if last in ("weight", "bias") and owner else name


def _list_prefixes(where: str) -> Iterator[str]:
    path = where.split(" ")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
