"""Which layer a node of the flat graph belongs to, and in which order layers and other nodes run.

A region is named by its layer's path (`model.layers.3`), the root by the empty string. Parameters
follow their readers. Sizes belong to no region: each region reads or computes its own.
"""

import heapq
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

import torch
from torch import fx

from autotp.algebra.placement import CONVERSION_OPS
from autotp.capture.graph_facts import list_module_paths, name_op

ROOT = ""
SYM_SIZE = torch.ops.aten.sym_size.int

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_ARITHMETIC = ("_operator", "math")
_FREE = {f"autotp::{op}" for op, conversion in CONVERSION_OPS.items() if conversion.forward.aliases}

Unit: TypeAlias = str | fx.Node
"""What is ordered: a region by its path, or one node of the root."""

Source: TypeAlias = tuple[fx.Node, int]
"""A tensor and the dim of it where a size stands."""


class Flat:
    """The flat graph, the region of each value, and where regions read sizes.

    `values` are the nodes that regions are made of: all but parameters and sizes. `needs` and
    `outputs` hold what enters and leaves a region; they follow `region` by `update_regions`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """The facts of `graph`, whose regions come from module stacks."""
        self.sizes = _find_sizes(graph)
        self.parameters = [n for n in graph.nodes if n.op == "get_attr"]
        self.values = [n for n in graph.nodes if n.op != "get_attr" and n not in self.sizes]
        self.region = _assign_regions(self.values)
        self.members: dict[str, list[fx.Node]] = {}
        self.needs: dict[str, list[fx.Node]] = {}
        self.outputs: dict[str, list[fx.Node]] = {}
        self._first = _find_size_sources(self.values)
        placeholders = [n for n in self.values if n.op == "placeholder"]
        self._at_hand = {ROOT: _find_size_sources(placeholders)}

    def update_regions(self) -> None:
        """Recompute `members`, `needs` and `outputs` from `region`."""
        self.region |= {n: self._find_parameter_region(n) for n in self.parameters}
        self.members = {}
        for node in self.values:
            self.members.setdefault(self.region[node], []).append(node)
        paths = [path for path in self.members if path != ROOT]
        self.needs = {path: self._list_inputs(path) for path in paths}
        read = {n for path in paths for n in self.needs[path]}
        read |= {n for node in self.members[ROOT] for n in self.list_reads(node, ROOT)}
        self.outputs = {path: [n for n in self.members[path] if n in read] for path in paths}

    def list_reads(self, node: fx.Node, path: str) -> Iterator[fx.Node]:
        """The parameters and values that `node` of region `path` reads, also for its sizes."""
        for operand in node.all_input_nodes:
            if operand not in self.sizes:
                yield operand
            elif (source := self.find_source(operand, path)) is not None:
                yield source[0]
            else:
                yield from self.list_reads(operand, path)

    def find_source(self, size: fx.Node, path: str) -> Source | None:
        """Where region `path` reads `size`; None if it computes it from other sizes."""
        expression = self.sizes[size]
        found = self._at_hand[path].get(expression)
        if found is not None or size.target is not SYM_SIZE:
            return found
        tensor, dim = size.args
        assert isinstance(tensor, fx.Node)
        assert isinstance(dim, int)
        return self._first.get(expression, (tensor, dim))

    def _list_inputs(self, path: str) -> list[fx.Node]:
        members = self.members[path]
        inputs = dict.fromkeys(
            i for n in members for i in n.all_input_nodes if self.region.get(i, path) != path
        )
        self._at_hand[path] = _find_size_sources(inputs)
        reads = (n for member in members for n in self.list_reads(member, path))
        return list(dict.fromkeys(n for n in reads if self.region[n] != path))

    def _find_parameter_region(self, node: fx.Node) -> str:
        readers = {self.region[user] for user in node.users if user not in self.sizes}
        path = readers.pop() if len(readers) == 1 else ROOT
        return path if str(node.target).startswith(f"{path}.") else ROOT


def order_regions(flat: Flat) -> list[Unit]:
    """Regions and root nodes, each after what it needs, else by program order."""
    while True:
        flat.update_regions()
        before = _list_dependencies(flat)
        sorter = TopologicalSorter(before)
        try:
            sorter.prepare()
        except CycleError as error:
            _break_cycle(flat, {u for u in error.args[1] if isinstance(u, str)}, before)
        else:
            return list(_iterate_in_order(flat, sorter))


def _list_dependencies(flat: Flat) -> dict[Unit, set[Unit]]:
    reads: dict[Unit, Iterable[fx.Node]] = {n: flat.list_reads(n, ROOT) for n in flat.members[ROOT]}
    reads |= flat.needs
    return {
        unit: {flat.region[n] or n for n in nodes if n.op != "get_attr"}
        for unit, nodes in reads.items()
    }


def _break_cycle(flat: Flat, paths: set[str], before: Mapping[Unit, set[Unit]]) -> None:
    """Change regions so that `paths`, which are on one cycle, no longer are."""
    between = _find_between(next(iter(paths)), before)
    if len(paths) == 1 and not any(isinstance(unit, str) for unit in between):
        flat.region |= dict.fromkeys((n for n in between if isinstance(n, fx.Node)), *paths)
    else:
        flat.region |= {n: ROOT for n in flat.values if flat.region[n] in paths}


def _find_between(path: str, before: Mapping[Unit, set[Unit]]) -> set[Unit]:
    """The other units on the paths from region `path` back to it."""
    after: dict[Unit, set[Unit]] = {unit: set() for unit in before}
    for unit, earlier in before.items():
        for other in earlier:
            after[other].add(unit)
    return (_find_reachable(path, before) & _find_reachable(path, after)) - {path}


def _find_reachable(start: Unit, edges: Mapping[Unit, set[Unit]]) -> set[Unit]:
    seen: set[Unit] = set()
    stack = [start]
    while stack:
        fresh = edges[stack.pop()] - seen
        seen |= fresh
        stack.extend(fresh)
    return seen


def _iterate_in_order(flat: Flat, sorter: TopologicalSorter[Unit]) -> Iterator[Unit]:
    position = {n: (n.op != "placeholder", i) for i, n in enumerate(flat.values)}
    ready: list[tuple[tuple[bool, int], int]] = []
    units: list[Unit] = []
    while sorter.is_active():
        for unit in sorter.get_ready():
            first = flat.members[unit][0] if isinstance(unit, str) else unit
            heapq.heappush(ready, (position[first], len(units)))
            units.append(unit)
        unit = units[heapq.heappop(ready)[1]]
        yield unit
        sorter.done(unit)


def _assign_regions(values: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """The region of each value: by module stack, or that of its producers or readers.

    A conversion that moves no data has the stack of one reader, but may serve several layers.
    """
    region: dict[fx.Node, str] = {}
    position = {node: i for i, node in enumerate(values)}
    for node in values:
        region[node] = _find_region(node, region, position)
    for node in reversed(values):
        readers = {region[user] for user in node.users if user in region}
        if len(readers) == 1 and _follows(node) and _serves_reader(node, region):
            region[node] = readers.pop()
    return region


def _find_region(
    node: fx.Node, region: Mapping[fx.Node, str], position: Mapping[fx.Node, int]
) -> str:
    if node.op in ("placeholder", "output"):
        return ROOT
    producers = [i for i in node.all_input_nodes if i in region]
    if producers and _follows(node):
        return region[max(producers, key=position.__getitem__)]
    matches = (_LAYER.match(path) for path in list_module_paths(node))
    return next((match[1] for match in matches if match), ROOT)


def _follows(node: fx.Node) -> bool:
    """Whether the nodes around `node` decide its region, not its module stack."""
    item = node.target is operator.getitem
    return item or not list_module_paths(node) or name_op(node.target) in _FREE


def _serves_reader(node: fx.Node, region: Mapping[fx.Node, str]) -> bool:
    """Whether `node` moves no data, or is computed from parameters alone."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    made_of_values = any(i in region for i in node.all_input_nodes)
    return not made_of_values or name_op(node.target) in _FREE


def _find_sizes(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Each node that computes an integer from sizes, with its expression if that has symbols."""
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.target is SYM_SIZE or (_is_arithmetic(node) and _all_in(node, sizes)):
            sizes[node] = _find_symbolic(node.meta.get("val"))
    return sizes


def _all_in(node: fx.Node, sizes: Mapping[fx.Node, Any]) -> bool:
    return bool(node.all_input_nodes) and all(i in sizes for i in node.all_input_nodes)


def _is_arithmetic(node: fx.Node) -> bool:
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return node.op == "call_function"
    return getattr(node.target, "__module__", "") in _ARITHMETIC


def _find_size_sources(values: Iterable[fx.Node]) -> dict[Any, Source]:
    """For each symbolic size, the first tensor that has it as a dim."""
    holders: dict[Any, Source] = {}
    for node in values:
        val = node.meta.get("val")
        for dim, size in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
            if (expression := _find_symbolic(size)) is not None:
                holders.setdefault(expression, (node, dim))
    return holders


def _find_symbolic(size: object) -> Any:
    """The sympy expression of a symbolic size; None for plain numbers."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return None if expression.is_number else expression
