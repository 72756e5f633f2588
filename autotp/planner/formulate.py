"""Formulate: the placement problem of an analysed program.

Variables
    one per parameter (its placement), one per parameter-dependent node (its strategy), and one
    *delivered* variable per value with several readers: the set of one or two placements that its
    conversions produce, priced as the cheapest tree from the producer. Each reader may convert
    further. So query, key and value share one gather and one gradient all-reduce.
Costs (solver.problem.LEVELS, integers compared lexicographically)
    `Weights.cost`      bytes not sharded along their home axis; bytes per rank; the gradient bucket
    `Prices.price_conversion`   time, number of collectives and of conversions of an edge
    `_rank_choices`            the index of a choice in its domain's fixed order
Constraints
    a parameter, or a value computed from parameters alone, is never gathered nor reduced.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autotp.algebra.partition import Partition
from autotp.algebra.placement import REPLICATED, SHARED, Placement
from autotp.algebra.split import Split
from autotp.capture.graph_facts import Value, find_source
from autotp.cost.collectives import estimate_time_ps
from autotp.cost.conversions import Cost, Delivered, Prices
from autotp.errors import PlanError
from autotp.planner.analysis import (
    Analysis,
    CacheOutput,
    Decision,
    Matching,
    Use,
    list_cache_outputs,
    list_model_outputs,
)
from autotp.planner.strategy import Facts, Strategy, derive_strategies
from autotp.planner.terms import Terms
from autotp.solver.problem import LEVELS, Edge, Problem, Solution, Variable

_FORBIDDEN, _HOME, _TIME, _COUNT, _BYTES, _CONVERSIONS, _INDEX = range(len(LEVELS))


@dataclass(slots=True)
class PlacementProblem:
    """The problem, and the meaning of its variables and choices."""

    problem: Problem
    parameters: dict[str, tuple[int, tuple[Placement, ...]]]
    uses: dict[Any, tuple[int, tuple[Strategy, ...]]]
    delivered: dict[Value, tuple[int, tuple[Delivered, ...]]]
    prices: dict[Value, Prices]
    caches: dict[str | int, tuple[int, tuple[Placement, ...]]]

    @property
    def ways(self) -> dict[fx.Node, tuple[Strategy, ...]]:
        """The strategies of each op."""
        return {node: domain for node, (_, domain) in self.uses.items()}


def formulate(analysis: Analysis, matching: Matching, terms: Terms) -> PlacementProblem:
    """The placement problem of `analysis` under `terms`."""
    return _Formulation(analysis, matching, terms).build()


def interpret_solution(formulated: PlacementProblem, solution: Solution) -> Decision:
    """The placements that a solution stands for."""
    return Decision(
        {n: domain[solution.choice[v]] for n, (v, domain) in formulated.parameters.items()},
        {n: domain[solution.choice[v]] for n, (v, domain) in formulated.uses.items()},
        {n: domain[solution.choice[v]] for n, (v, domain) in formulated.delivered.items()},
        formulated.prices,
        {k: domain[solution.choice[v]] for k, (v, domain) in formulated.caches.items()},
    )


class _Formulation:
    """Variables and edges while they are collected."""

    def __init__(self, analysis: Analysis, matching: Matching, terms: Terms) -> None:
        self.analysis, self.matching, self.terms = analysis, matching, terms
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.unary: dict[object, NDArray[np.int64]] = {}
        self.tables: dict[object, NDArray[np.int64]] = {}
        self.prices: dict[Value, Prices] = {}
        self.paddings: dict[Partition, Fraction] = {}
        self.weights = WeightCosts(analysis, matching, terms)
        self.cache_domains = CacheDomains(analysis, terms)
        self.order = {n.name: k for k, n in enumerate(analysis.program.graph.nodes)}
        self.readers: dict[Value, list[tuple[Use | None, int]]] = defaultdict(list)
        self.makers: dict[Value, tuple[int, tuple[Placement, ...]]] = {}
        self.parameters: dict[str, tuple[int, tuple[Placement, ...]]] = {}
        self.uses: dict[Any, tuple[int, tuple[Strategy, ...]]] = {}
        self.delivered: dict[Value, tuple[int, tuple[Delivered, ...]]] = {}
        self.caches: dict[str | int, tuple[int, tuple[Placement, ...]]] = {}

    def build(self) -> PlacementProblem:
        """The complete problem."""
        chosen = {node: self._derive_strategies(use) for node, use in self.analysis.uses.items()}
        self._find_readers()
        self._add_inputs(chosen)
        for name, node in self.analysis.parameters.items():
            self._add_parameter(name, (node, 0), chosen)
        for node, use in self.analysis.uses.items():
            self._add_use(use, chosen[node])
            for number in range(len(use.rule.results)):
                self._add_delivered((node, number), chosen)
        for use in self.analysis.uses.values():
            self._connect_operands(use)
        self._connect_outputs()
        problem = Problem(LEVELS, tuple(self.variables), tuple(self.edges))
        return PlacementProblem(
            problem, self.parameters, self.uses, self.delivered, self.prices, self.caches
        )

    def _find_readers(self) -> None:
        for value in self.analysis.dims:
            self.readers[value] += self.analysis.readers[value]
        for value in self._list_output_values():
            self.readers[value].append((None, 0))
        for kept in self.cache_domains.outputs:
            self.readers[kept.value].append((None, kept.number))

    def _list_output_values(self) -> list[Value]:
        found = list_model_outputs(self.analysis)
        every = [find_source(n) for n in self.analysis.program.graph.output_node().all_input_nodes]
        return [v for v in dict.fromkeys(every) if v in found and v in self.analysis.dims]

    def _derive_strategies(self, use: Use) -> tuple[Strategy, ...]:
        analysis = self.analysis
        stops = use.row.stops if use.row else frozenset[int]()
        facts = Facts(
            tuple(o.dims for o in use.operands),
            frozenset(
                k
                for k, o in enumerate(use.operands)
                if o.value in analysis.differentiable and o.argument not in stops
            ),
            frozenset(k for k, o in enumerate(use.operands) if o.value not in analysis.dims),
            all(
                analysis.metas[(use.node, r)].is_floating_point()
                for r in range(len(use.rule.results))
                if (use.node, r) in analysis.metas
            ),
            any((use.node, r) in analysis.differentiable for r in range(len(use.rule.results))),
        )
        tp, training = self.terms.tp, self.terms.training
        forest, offers = analysis.forest, self.terms.offers
        found = derive_strategies(use.rule, facts, forest, tp, training=training, offers=offers)
        return tuple(s for s in found if self._is_bounded(use.node, s))

    def _is_bounded(self, node: Any, strategy: Strategy) -> bool:
        """Whether rows are grouped by bounds that are known where the node stands."""
        groups = self.analysis.forest.find_row_groups(strategy.partition)
        return groups is None or self.order[groups.bounds] < self.order[node.name]

    # ── variables ────────────────────────────────────────────────────────────────────────────

    def _add_variable(self, name: str, labels: Sequence[str], costs: NDArray[np.int64]) -> int:
        self.variables.append(Variable(name, tuple(labels), costs))
        return len(self.variables) - 1

    def _rank_choices(self, size: int) -> NDArray[np.int64]:
        costs = np.zeros((len(LEVELS), size), np.int64)
        costs[_INDEX] = np.arange(size)
        return costs

    def _share_costs(self, key: object, make: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        found = self.unary.get(key)
        if found is None:
            found = self.unary[key] = make()
        return found

    def _add_inputs(self, chosen: Mapping[Any, tuple[Strategy, ...]]) -> None:
        """Inputs that require grad, which are replicated, and those of a cache."""
        for node in self.analysis.program.graph.find_nodes(op="placeholder"):
            value = (node, 0)
            if value in self.analysis.dims:
                domain = self.cache_domains.list_input_placements(
                    node, self._list_requested(value, chosen)
                )
                self.makers[value] = self._add_placement(node.name, domain)
                if node in self.cache_domains.paths:
                    self.caches[node.name] = self.makers[value]
                self._add_delivered(value, chosen)

    def _add_placement(
        self, name: str, domain: Sequence[Placement]
    ) -> tuple[int, tuple[Placement, ...]]:
        """A variable whose choices have no cost of their own."""
        costs = self._share_costs(len(domain), lambda: self._rank_choices(len(domain)))
        return self._add_variable(name, [str(p) for p in domain], costs), tuple(domain)

    def _add_parameter(
        self, name: str, value: Value, chosen: Mapping[Any, tuple[Strategy, ...]]
    ) -> None:
        wanted = self._list_requested(value, chosen)
        domain = [REPLICATED]
        if self.terms.training and value in self.analysis.differentiable:
            domain.append(SHARED)
        domain += sorted(p for p in wanted if p.kind in ("S", "S~"))
        allowed = self.terms.allowed.get(name)
        if allowed is not None:
            possible, domain = domain, [p for p in domain if allowed(p)]
            if not domain:
                raise PlanError(allowed.explain_refusal(possible))
        costs = self._cost_parameter(name, value, domain)
        variable = self._add_variable(name, [str(p) for p in domain], costs)
        self.parameters[name] = (variable, tuple(domain))
        self.makers[value] = (variable, tuple(domain))
        self._add_delivered(value, chosen)

    def _cost_parameter(
        self, name: str, value: Value, domain: Sequence[Placement]
    ) -> NDArray[np.int64]:
        costs = self._rank_choices(len(domain))
        for k, placement in enumerate(domain):
            price = self.weights.cost(name, value, placement)
            costs[_HOME, k], costs[_TIME, k], costs[_BYTES, k] = price.home, price.time, price.local
        return self._share_costs(costs.tobytes(), lambda: costs)

    def _list_requested(
        self, value: Value, chosen: Mapping[Any, tuple[Strategy, ...]]
    ) -> list[Placement]:
        """Every placement in which some reader may read `value`."""
        wanted: dict[Placement, None] = {}
        for use, k in self.readers[value]:
            found = (REPLICATED,) if use is None else (s.operands[k] for s in chosen[use.node])
            wanted.update(dict.fromkeys(found))
        return list(wanted)

    def _add_use(self, use: Use, domain: tuple[Strategy, ...]) -> None:
        costs = self._share_costs(
            ("use", self._count_slices(use, domain)), lambda: self._cost_use(use, domain)
        )
        variable = self._add_variable(use.node.name, [s.label for s in domain], costs)
        self.uses[use.node] = (variable, domain)
        for number in range(len(use.rule.results)):
            self.makers[(use.node, number)] = (variable, tuple(s.results[number] for s in domain))

    def _count_slices(self, use: Use, domain: tuple[Strategy, ...]) -> tuple[int, ...]:
        """For each strategy, how many constant operands it slices."""
        constant = [k for k, o in enumerate(use.operands) if o.value not in self.analysis.dims]
        cut = [[s.operands[k] for k in constant] for s in domain]
        return tuple(sum(p.is_split or p.kind == "P" for p in row) for row in cut)

    def _cost_use(self, use: Use, domain: tuple[Strategy, ...]) -> NDArray[np.int64]:
        costs = self._rank_choices(len(domain))
        costs[_CONVERSIONS] = self._count_slices(use, domain)
        return costs

    def _add_delivered(self, value: Value, chosen: Mapping[Any, tuple[Strategy, ...]]) -> None:
        """A delivered variable for a value with several readers."""
        if len(self.readers[value]) < 2 or value not in self.makers:
            return
        maker, made = self.makers[value]
        wanted = self._list_requested(value, chosen)
        singles = list(dict.fromkeys([*wanted, *made]))
        pairs = [(p, q) for i, p in enumerate(wanted) for q in wanted[i + 1 :]]
        domain: list[Delivered] = [(p,) for p in singles] + pairs
        labels = ["+".join(str(p) for p in d) for d in domain]
        name = f"{value[0].name}.{value[1]} delivered"
        variable = self._add_variable(
            name, labels, self._share_costs(len(domain), lambda: self._rank_choices(len(domain)))
        )
        self.delivered[value] = (variable, tuple(domain))
        prices = self._find_prices(value)
        self._add_edge(maker, variable, made, domain, prices, prices.price_tree, "tree")

    # ── edges ────────────────────────────────────────────────────────────────────────────────

    def _find_prices(self, value: Value) -> Prices:
        found = self.prices.get(value)
        if found is None:
            found = self.prices[value] = Prices(
                self.terms.priced(self.analysis.metas[value]),
                self.terms.summed(self.analysis.metas[value]),
                value in self.analysis.differentiable,
                value in self.analysis.weights,
                self.terms.training,
                self.terms.tp,
                self.terms.request.machine,
                self.terms.everything,
                lambda placement: self._find_padding(placement.partition),
            )
        return found

    def _find_padding(self, partition: Partition) -> Fraction:
        found = self.paddings.get(partition)
        if found is None:
            found = self.analysis.forest.compute_padding(partition, self.terms.tp)
            self.paddings[partition] = found
        return found

    def _connect_operands(self, use: Use) -> None:
        """Edges from each operand's value to the node."""
        variable, domain = self.uses[use.node]
        for k, operand in enumerate(use.operands):
            if operand.value in self.analysis.dims:
                keep = k in use.rule.bias
                self._connect_reader(operand.value, variable, [s.operands[k] for s in domain], keep)

    def _connect_reader(
        self, value: Value, reader: int, wanted: Sequence[Placement], keep: bool
    ) -> None:
        prices = self._find_prices(value)
        if value in self.delivered:
            source, sets = self.delivered[value]
            self._add_edge(
                source,
                reader,
                sets,
                wanted,
                prices,
                lambda s, t: prices.find_nearest(s, t, keep=keep)[0],
                f"near{keep}",
            )
        else:
            source, made = self.makers[value]
            self._add_edge(
                source,
                reader,
                made,
                wanted,
                prices,
                lambda s, t: prices.price_conversion(s, t, keep=keep),
                f"one{keep}",
            )

    def _add_edge(
        self,
        first: int,
        second: int,
        rows: Sequence[Any],
        columns: Sequence[Any],
        prices: Prices,
        cost: Callable[[Any, Any], Cost],
        kind: str,
    ) -> None:
        same = _canonicalise(rows, columns, self._find_padding)
        key = (kind, prices.size, prices.summed, prices.flows, prices.weight, same)
        table = self.tables.get(key)
        if table is None:
            table = self.tables[key] = _tabulate_costs(rows, columns, cost)
        self.edges.append(Edge(first, second, table))

    def _connect_outputs(self) -> None:
        """Outputs are replicated: each is read by a variable with one choice.

        Cache outputs may stay as they are computed, placed like the input that they replace.
        """
        for kept in self.cache_domains.outputs:
            variable, domain = self.caches[kept.number] = self._add_placement(
                f"output {kept.number}",
                self.cache_domains.list_output_placements(kept, self.makers[kept.value][1]),
            )
            self._connect_reader(kept.value, variable, domain, keep=False)
            if kept.replaces is not None:
                taken, before = self.makers[(kept.replaces, 0)]
                self.edges.append(
                    Edge(taken, variable, self.cache_domains.tabulate_ties(kept, before, domain))
                )
        for value in self._list_output_values():
            name = f"{value[0].name} output"
            sink = self._add_variable(
                name, ["R"], self._share_costs(1, lambda: self._rank_choices(1))
            )
            self._connect_reader(value, sink, [REPLICATED], keep=False)


def _tabulate_costs(
    rows: Sequence[Any], columns: Sequence[Any], cost: Callable[[Any, Any], Cost]
) -> NDArray[np.int64]:
    table = np.zeros((len(LEVELS), len(rows), len(columns)), np.int64)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            found = cost(row, column)
            table[_FORBIDDEN, i, j], table[_TIME, i, j] = found[0], found[1]
            table[_COUNT, i, j], table[_CONVERSIONS, i, j] = found[2], found[3]
    return table


def _canonicalise(
    rows: Iterable[Any], columns: Iterable[Any], padding: Callable[[Partition], Fraction]
) -> object:
    """Placements with axes numbered by first appearance: equal for equal layers."""
    numbers: dict[Partition, int] = {}

    def plain(item: Placement | Iterable[Any]) -> object:
        if isinstance(item, Placement):
            number = numbers.setdefault(item.partition, len(numbers))
            return item.kind, item.dim, padding(item.partition), number
        return tuple(plain(p) for p in item)

    return tuple(plain(r) for r in rows), tuple(plain(c) for c in columns)


class WeightCost(NamedTuple):
    """Levels of one placement: `home` and `local` in bytes, `time` in picoseconds."""

    home: int
    time: int
    local: int


class WeightCosts:
    """The parameters of one program under one set of terms."""

    def __init__(self, analysis: Analysis, matching: Matching, terms: Terms) -> None:
        self.analysis, self.matching, self.terms = analysis, matching, terms
        self.largest = max(
            (self._count_bytes((n, 0)) for n in analysis.parameters.values()), default=0
        )

    def cost(self, name: str, value: Value, placement: Placement) -> WeightCost:
        """What parameter `name` costs in `placement`."""
        size, split = self._count_bytes(value), self.analysis.split(value, placement)
        home, off = self._list_home_axes(name, size), 0
        if home and home.isdisjoint(placement.partition.axes):
            off = size
        elif home and split is not None:  # segments without the axis are replicated
            off = size * split.count_replicated() // split.length()
        summed = self.terms.summed(self.analysis.metas[value])
        return WeightCost(
            off,
            self._estimate_bucket_time(placement, split, summed),
            self._count_local_bytes(split, size),
        )

    def _count_bytes(self, value: Value) -> int:
        return self.analysis.metas[value].nbytes

    def _count_local_bytes(self, split: Split | None, size: int) -> int:
        """The bytes on the fullest rank."""
        if split is None:
            return size
        return size * split.local_length(0, self.terms.tp) // split.length()

    def _list_home_axes(self, name: str, size: int) -> frozenset[str]:
        """The axes along one of which the parameter should be sharded; empty if it is free."""
        if size < self.terms.request.shard_threshold * self.largest:
            return frozenset()
        offers, tp = self.terms.offers, self.terms.tp
        open_axes = offers.uneven.union(*(p.axes for p in offers.joint))
        axes = self.matching.home.get(name, ())
        return frozenset(a.name for a in axes if a.units % tp == 0 or a.name in open_axes)

    def _estimate_bucket_time(self, placement: Placement, split: Split | None, size: int) -> int:
        """The time of a partial gradient's share of the bucket: its bytes, no latency."""
        if placement.kind == "R~":
            return self._estimate_transfer_time(size, self.terms.tp)
        if placement.kind != "S~" or split is None:
            return 0
        shared = split.count_shared(self.terms.tp).items()
        return sum(
            self._estimate_transfer_time(size * n // split.length(), p.count) for p, n in shared
        )

    def _estimate_transfer_time(self, size: int, ranks: int) -> int:
        machine = self.terms.request.machine
        nothing = estimate_time_ps("all_reduce", 0, ranks, machine)
        return estimate_time_ps("all_reduce", size, ranks, machine) - nothing


Cut = tuple[int | None, tuple[int, ...]]
"""What of a value each rank has, apart from how axes are called: a dim and its encoded split."""


class CacheDomains:
    """The cache tensors of a program.

    - `outputs`: those it returns; `paths`: the paths of those it reads, by placeholder.
    """

    def __init__(self, analysis: Analysis, terms: Terms) -> None:
        self.analysis, self.terms = analysis, terms
        self.outputs = list_cache_outputs(analysis)
        self.paths = {kept.replaces: kept.path for kept in self.outputs if kept.replaces}

    def list_input_placements(self, node: fx.Node, wanted: Sequence[Placement]) -> list[Placement]:
        """The placements of an input: replicated, or for a cache tensor what readers request."""
        path = self.paths.get(node)
        if path is None:
            return [REPLICATED]
        cuts = sorted(p for p in wanted if p.kind == "S")
        return self._filter_by_record(path, (node, 0), [REPLICATED, *cuts])

    def list_output_placements(
        self, kept: CacheOutput, made: Sequence[Placement]
    ) -> list[Placement]:
        """The placements of a cache output: as it is computed, or replicated."""
        cuts = [p for p in dict.fromkeys(made) if p.kind == "S"]
        return self._filter_by_record(kept.path, kept.value, [REPLICATED, *cuts])

    def tabulate_ties(
        self, kept: CacheOutput, before: Sequence[Placement], after: Sequence[Placement]
    ) -> NDArray[np.int64]:
        """The costs of the edge that places an output like the input that it replaces."""
        assert kept.replaces is not None
        ins = [self.analysis.encode_split((kept.replaces, 0), p) for p in before]
        outs = [self.analysis.encode_split(kept.value, p) for p in after]
        table = np.zeros((len(LEVELS), len(ins), len(outs)), np.int64)
        table[LEVELS.index("forbidden")] = [[came != goes for goes in outs] for came in ins]
        return table

    def _filter_by_record(
        self, path: str, value: Value, domain: Sequence[Placement]
    ) -> list[Placement]:
        """Restrict `domain` to the placement that earlier calls gave the tensor, if any."""
        record = self.terms.caches.get(path)
        # another class of cache may keep another tensor at that path
        rank = len(self.analysis.dims[value])
        if record is None or (record.dim is not None and record.dim >= rank):
            return list(domain)
        left = [
            p for p in domain if self.analysis.encode_split(value, p) == (record.dim, record.split)
        ]
        if not left:
            stored = f"sharded along {record.axis} ({record.size})" if record.size else "replicated"
            raise PlanError(
                f"the cache's {path}: earlier calls left it {stored}, which is none of its "
                f"{len(domain)} possible placements in this graph. Start from an empty cache."
            )
        return left
