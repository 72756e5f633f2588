"""The law of rules: the results of an op on shards, combined by placement, are those of the op.

One call of one op becomes a program of one node. `propagate` gives its rule, `derive_strategies`
every way to run it on shards, and the real rewriter implements each of them. The graph of every
rank then runs on operands that are placed by definition, without any conversion:

    R, R~   the full operand                 P   random summands of it     S, S~   this rank's shard
    G       this rank's rows, then NaN

The results must be placed as the strategy says, forward and backward. The gradients of the results
are provided, and those of the operands are read, by the dual:

    R, P    the full gradient on every rank  R~  random summands of it     S       this rank's shard
    S~      this rank's shard, with random summands of the elements that several ranks have

All axes may be sharded unevenly, and all pairs of axes of one or two dims by a factored group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, fx

from autotp.algebra.axis import Dim, Forest
from autotp.algebra.partition import Offers, Part, Partition
from autotp.algebra.placement import PARTIAL, Kind, Placement
from autotp.algebra.split import Split
from autotp.errors import AutotpError
from autotp.lower.rewrite import Target, rewrite
from autotp.planner.analysis import Decision
from autotp.planner.strategy import Facts, Strategy, derive_strategies
from autotp.runtime.ops import library as conjugates
from autotp.runtime.ops.blocks import keep_first_copy, slice_block, write_block
from autotp.runtime.ops.grouped_rows import move_rows_back, move_rows_first
from autotp.verification.rules.cases import OpCase
from autotp.verification.rules.rank import RankInterpreter

_ = conjugates  # imported because it registers torch.ops.autotp
TOLERANCE = 1e-10
UNDEFINED = {"aten.empty_like.default"}  # undefined values


def list_strategies(case: OpCase, tp: int, *, training: bool) -> tuple[Strategy, ...]:
    """Every strategy of the case's node."""
    analysis, use = case.analysis, case.use
    metas = [analysis.metas[(use.node, k)] for k in range(len(use.rule.results))]
    facts = Facts(
        tuple(o.dims for o in use.operands),
        frozenset(k for k, o in enumerate(use.operands) if o.value in analysis.differentiable),
        frozenset(k for k, o in enumerate(use.operands) if o.value not in analysis.dims),
        all(m.is_floating_point() for m in metas),
        any((use.node, k) in analysis.differentiable for k in range(len(metas))),
    )
    offers = offer_all_partitions(case, tp)
    return derive_strategies(use.rule, facts, analysis.forest, tp, training=training, offers=offers)


def offer_all_partitions(case: OpCase, tp: int) -> Offers:
    """Every partition by which a group of `tp` could shard the node of the case."""
    forest, rule = case.analysis.forest, case.use.rule
    leaves = [
        a for f in rule.factors for a in forest.list_leaves(f.dim) if not (a.data or a.groups)
    ]
    axes = list(dict.fromkeys(a for a in leaves if a.size.static))
    factored = [
        Partition((Part(a.name, n, tp // n), Part(b.name, tp // n)))
        for a, b in pairwise(axes)
        for n in range(2, tp)
        if tp % n == 0 and a.size.coefficient >= n and b.size.coefficient >= tp // n
    ]
    return Offers(frozenset(a.name for a in axes), tuple(factored))


def find_violations(case: OpCase, tp: int, *, only: Sequence[Strategy] | None = None) -> list[str]:
    """Every violation of the law by a strategy at group size `tp`.

    - `only`: strategies for training to check; by default all, and those without gradients that
      training does not have.
    """
    trained = _select_strategies(case, tp, training=True) if only is None else only
    seen = {_describe_forward(s) for s in trained}
    inference = _select_strategies(case, tp, training=False) if only is None else ()
    laws = [_StrategyCheck(case, s, tp, training=True) for s in trained]
    laws += [
        _StrategyCheck(case, s, tp, training=False)
        for s in inference
        if _describe_forward(s) not in seen
    ]
    return [f"tp {tp}, {law.strategy.label}: {reason}" for law in laws for reason in law.check()]


def _select_strategies(case: OpCase, tp: int, *, training: bool) -> tuple[Strategy, ...]:
    """The strategies to check: for a composite `tp`, those of factored groups only, because the
    others are like those at 2.
    """
    every = list_strategies(case, tp, training=training)
    prime = all(tp % n for n in range(2, tp))
    return every if prime else tuple(s for s in every if any(p.parts for p in s.partition.parts))


def _describe_forward(strategy: Strategy) -> tuple[object, ...]:
    def kind(p: Placement) -> object:
        return "R" if p.kind in ("R", "R~") else p

    return tuple(kind(p) for p in (*strategy.operands, *strategy.results))


class _StrategyCheck:
    """Runs one strategy of one case on every rank, and compares."""

    def __init__(self, case: OpCase, strategy: Strategy, tp: int, training: bool) -> None:
        self.case, self.strategy, self.tp, self.training = case, strategy, tp, training
        self.forest, self.use = case.analysis.forest, case.use
        self.generator = torch.Generator().manual_seed(1)
        self.parameters = {n: case.tensors[n] for n in case.analysis.parameters}
        self.placements = self._find_placements()

    def _find_placements(self) -> dict[str, Placement]:
        """The placement of each parameter: that of the operand that reads it."""
        return {
            str(o.value[0].target): p
            for o, p in zip(self.use.operands, self.strategy.operands, strict=True)
            if o.value[0].op == "get_attr"
        }

    def check(self) -> list[str]:
        """How the law is violated; empty if it is not."""
        try:
            return list(self._find_violations())
        except (
            AutotpError,
            RuntimeError,
            ValueError,
            IndexError,
            AssertionError,
            TypeError,
        ) as error:
            return [f"{type(error).__name__}: {error}"]

    def _find_violations(self) -> Iterator[str]:
        graphs = [self._rewrite(rank) for rank in range(self.tp)]
        dims = {
            n: self.case.analysis.dims[(node, 0)]
            for n, node in self.case.analysis.parameters.items()
        }
        shards = {
            name: [self._make_leaf(p) for p in self._place(x, self.placements[name], dims[name])]
            for name, x in self.parameters.items()
        }
        full = {name: self._make_leaf(x) for name, x in self.parameters.items()}
        expected = self._run(self.case.program.graph, full, 0)
        local = [
            self._run(graph, {n: p[rank] for n, p in shards.items()}, rank)
            for rank, graph in enumerate(graphs)
        ]
        for graph, results in zip(graphs, local, strict=True):
            yield from self._check_shapes(graph, results)
        if str(self.use.node.target) not in UNDEFINED:
            yield from self._check_results(expected, local)
        if self.training:
            yield from self._check_gradients(expected, full, local, shards, dims)

    def _rewrite(self, rank: int) -> fx.Graph:
        """The graph of a rank, whose results are placed as by the strategy."""
        kept = dict[str | int, Placement](enumerate(self.strategy.results))
        decision = Decision(self.placements, {self.use.node: self.strategy}, {}, {}, kept)
        target = Target(self.tp, "tp", self.training, rank=rank)
        return rewrite(self.case.analysis, decision, target).graph

    def _place(self, x: Tensor, placement: Placement, dims: Sequence[Dim]) -> list[Tensor]:
        """The tensor of each rank, by the definition of the placement."""
        if placement.is_grouped:
            return [self._slice_rows(x, placement, rank) for rank in range(self.tp)]
        if placement.is_split:
            return [self._slice(x, placement, dims, rank) for rank in range(self.tp)]
        return self._make_summands(x) if placement.kind == "P" else [x] * self.tp

    def _find_bounds(self, placement: Placement) -> Tensor:
        groups = self.forest.find_row_groups(placement.partition)
        assert groups is not None
        return self.case.tensors[groups.bounds]

    def _slice_rows(self, x: Tensor, placement: Placement, rank: int) -> Tensor:
        """The rows of a rank, followed by NaN for the rows of the others."""
        bounds, dim = self._find_bounds(placement), placement.dim
        own = move_rows_first(torch.ones_like(x), bounds, dim, rank, self.tp) == 1
        return move_rows_first(x, bounds, dim, rank, self.tp).masked_fill(~own, torch.nan)

    def _slice(self, x: Tensor, placement: Placement, dims: Sequence[Dim], rank: int) -> Tensor:
        for dim, split in list_splits(self.forest, dims, placement):
            x = slice_block(x, dim, split, rank, self.tp)
        return x

    def _place_gradient(self, g: Tensor, placement: Placement, dims: Sequence[Dim]) -> list[Tensor]:
        """The gradient of a result with this placement on each rank."""
        if placement.kind != "S~":
            return self._place(g, _find_dual(placement), dims)
        ((dim, split),) = list_splits(self.forest, dims, placement)
        noise = [self._slice(self._sample(g), placement, dims, r) for r in range(self.tp)]
        own = [n - keep_first_copy(n, dim, split, r, self.tp) for r, n in enumerate(noise)]
        rest = g - sum(write_block(n, dim, split, r, self.tp) for r, n in enumerate(own))
        shards = self._place(rest, placement, dims)
        firsts = [keep_first_copy(p, dim, split, r, self.tp) for r, p in enumerate(shards)]
        return [first + n for first, n in zip(firsts, own, strict=True)]

    def _make_summands(self, x: Tensor) -> list[Tensor]:
        """Random tensors that add up to `x`; of flags, all but one are false."""
        others = []
        for _ in range(self.tp - 1):
            noise = self._sample(x) * 2
            others.append(torch.zeros_like(x) if x.dtype == torch.bool else noise.to(x.dtype))
        return [*others, x if x.dtype == torch.bool else x - sum(others)]

    def _make_leaf(self, x: Tensor) -> Tensor:
        return x.clone().requires_grad_(self.training and (x.is_floating_point() or x.is_complex()))

    def _run(self, graph: fx.Graph, parameters: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        torch.default_generator.manual_seed(0)  # the same dropout on every rank
        tensors = {**self.case.tensors, **parameters}
        outputs = RankInterpreter(graph, tensors, rank, self.tp).run(
            *(self.case.tensors[name] for name in self.case.program.inputs)
        )
        return list(outputs)

    # ── comparing ────────────────────────────────────────────────────────────────────────────

    def _check_shapes(self, graph: fx.Graph, local: list[Tensor]) -> Iterator[str]:
        outputs = cast("tuple[fx.Node, ...]", graph.output_node().args[0])
        for k, node in enumerate(outputs):
            shape = tuple(node.meta["val"].shape)
            if shape != tuple(local[k].shape):
                yield f"result {k} should have shape {shape}, but has {tuple(local[k].shape)}"

    def _check_results(self, expected: list[Tensor], local: list[list[Tensor]]) -> Iterator[str]:
        for k, full in enumerate(expected):
            shards = [outputs[k] for outputs in local]
            placement = self.strategy.results[k]
            yield from self._compare(
                f"result {k}", full, shards, placement, self.use.rule.results[k]
            )

    def _compare(
        self,
        what: str,
        full: Tensor,
        shards: list[Tensor],
        placement: Placement,
        dims: Sequence[Dim],
    ) -> Iterator[str]:
        wanted = [full] * self.tp
        if placement.is_split:
            wanted = self._place(full, placement, dims)
        elif placement.is_grouped:
            bounds, dim = self._find_bounds(placement), placement.dim
            places = [move_rows_back(p, bounds, dim, r, self.tp) for r, p in enumerate(shards)]
            wanted, shards = [full], [sum(places[1:], places[0])]
        elif placement.kind == "P":
            wanted, shards = [full], [sum(shards[1:], shards[0])]
        for rank, (expected, shard) in enumerate(zip(wanted, shards, strict=True)):
            if reason := _describe_difference(expected.detach(), shard.detach()):
                yield f"{what} as {placement} on rank {rank}: {reason}"

    def _check_gradients(
        self,
        expected: list[Tensor],
        full: Mapping[str, Tensor],
        local: list[list[Tensor]],
        shards: Mapping[str, list[Tensor]],
        dims: Mapping[str, tuple[Dim, ...]],
    ) -> Iterator[str]:
        flowing = [k for k, x in enumerate(expected) if x.requires_grad]
        leaves = {n: x for n, x in full.items() if x.requires_grad}
        if not flowing or not leaves:
            return
        given = [self._sample(expected[k]) for k in flowing]
        total = _compute_gradients([expected[k] for k in flowing], list(leaves.values()), given)
        placed = [
            self._place_gradient(g, self.strategy.results[k], self.use.rule.results[k])
            for k, g in zip(flowing, given, strict=True)
        ]
        ranks = [
            _compute_gradients(
                [local[rank][k] for k in flowing],
                [shards[n][rank] for n in leaves],
                [p[rank] for p in placed],
            )
            for rank in range(self.tp)
        ]
        for at, name in enumerate(leaves):
            kind = _find_dual(self.placements[name])
            found = [gradients[at] for gradients in ranks]
            if kind.kind == "S~":
                ((dim, split),) = list_splits(self.forest, dims[name], kind)
                found = [write_block(g, dim, split, r, self.tp) for r, g in enumerate(found)]
                kind = PARTIAL
            yield from self._compare(f"gradient of {name}", total[at], found, kind, dims[name])

    def _sample(self, x: Tensor) -> Tensor:
        """Values from -1 to 1; integers unless the dtype has double precision."""
        noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        if x.is_complex():
            return noise.to(x.dtype)
        return noise if x.dtype == torch.float64 else noise.round().to(x.dtype)


def list_splits(
    forest: Forest, dims: Sequence[Dim], placement: Placement
) -> list[tuple[int, Split]]:
    """The dims of a value that `placement` shards, and how."""
    partition = placement.partition
    sharded = [placement.dim]
    if placement.kind == "SS":
        sharded = [d for d, dim in enumerate(dims) if forest.restrict((dim,), partition).parts]
    splits = [(d, forest.split(dims[d], partition)) for d in sharded]
    return [(d, split) for d, split in splits if split is not None]


def _find_dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value with this placement."""
    kinds: dict[str, Kind] = {"P": "R", "R~": "P"}
    return replace(placement, kind=kinds.get(placement.kind, placement.kind))


def _compute_gradients(
    outputs: list[Tensor], inputs: list[Tensor], given: list[Tensor]
) -> list[Tensor]:
    if not any(x.requires_grad for x in outputs):
        return [torch.zeros_like(x) for x in inputs]
    pairs = [(x, g) for x, g in zip(outputs, given, strict=True) if x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        inputs,
        [g for _, g in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def _describe_difference(expected: Tensor, actual: Tensor) -> str:
    if expected.shape != actual.shape:
        return f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    if expected.is_complex():
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    scale = max(1.0, float(expected.abs().max())) if expected.dtype != torch.bool else 1.0
    gap = float((expected.double() - actual.double()).abs().max())
    return "" if gap <= TOLERANCE * scale else f"differs by {gap:.3g}"
