"""The law of rules: an op run on shards, joined by placement, is the op run on the whole.

One call of one op becomes a program of one node; analyse gives its rule, `derive_strategies` every way to
run it on shards, and the real rewriter writes each of them. Then every rank's graph runs on
operands that are placed by definition, without any conversion:

    R, R~   the whole operand               P   random summands of it      S, S~   this rank's part
    G       this rank's rows, then NaN

and what comes out must be placed as the strategy says, forward and backward. The result's gradient
is given, and the operands' gradients are read, by the dual:

    R, P    the full gradient on every rank R~  random summands of it      S   this rank's part
    S~      this rank's part, of which what several ranks hold comes in random summands

All axes may be cut unevenly, and all pairs of axes of one dim, or of two, by a factored group.
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

_ = conjugates  # imported for what it registers: torch.ops.autotp
TOLERANCE = 1e-10
UNDEFINED = {"aten.empty_like.default"}  # values are anything


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
    """All that a group of `tp` could ever cut in the case's node."""
    forest, rule = case.analysis.forest, case.use.rule
    leaves = [a for f in rule.factors for a in forest.leaves(f.dim) if not (a.data or a.groups)]
    axes = list(dict.fromkeys(a for a in leaves if a.size.static))
    factored = [
        Partition((Part(a.name, n, tp // n), Part(b.name, tp // n)))
        for a, b in pairwise(axes)
        for n in range(2, tp)
        if tp % n == 0 and a.size.coefficient >= n and b.size.coefficient >= tp // n
    ]
    return Offers(frozenset(a.name for a in axes), tuple(factored))


def find_violations(case: OpCase, tp: int, *, only: Sequence[Strategy] | None = None) -> list[str]:
    """Every way in which some strategy breaks the law at group size `tp`; empty if none does.

    - `only`: strategies for training to look at; default all, and those without gradients that
      training does not have.
    """
    trained = _select_strategies(case, tp, training=True) if only is None else only
    seen = {_describe_forward(s) for s in trained}
    plain = _select_strategies(case, tp, training=False) if only is None else ()
    laws = [_StrategyCheck(case, s, tp, training=True) for s in trained]
    laws += [_StrategyCheck(case, s, tp, training=False) for s in plain if _describe_forward(s) not in seen]
    return [f"tp {tp}, {law.strategy.label}: {reason}" for law in laws for reason in law.reasons()]


def _select_strategies(case: OpCase, tp: int, *, training: bool) -> tuple[Strategy, ...]:
    """Those to look at: of sizes with a group in factors, what needs one (the rest is as at 2)."""
    every = list_strategies(case, tp, training=training)
    prime = all(tp % n for n in range(2, tp))
    return every if prime else tuple(s for s in every if any(p.parts for p in s.partition.parts))


def _describe_forward(strategy: Strategy) -> tuple[object, ...]:
    def kind(p: Placement) -> object:
        return "R" if p.kind in ("R", "R~") else p

    return tuple(kind(p) for p in (*strategy.operands, *strategy.results))


class _StrategyCheck:
    """One strategy of one case, run on every rank and compared."""

    def __init__(self, case: OpCase, strategy: Strategy, tp: int, training: bool) -> None:
        self.case, self.strategy, self.tp, self.training = case, strategy, tp, training
        self.forest, self.use = case.analysis.forest, case.use
        self.generator = torch.Generator().manual_seed(1)
        self.parameters = {n: case.tensors[n] for n in case.analysis.parameters}
        self.placements = self._placements()

    def _placements(self) -> dict[str, Placement]:
        """Each parameter's placement: that of the operand which reads it."""
        return {
            str(o.value[0].target): p
            for o, p in zip(self.use.operands, self.strategy.operands, strict=True)
            if o.value[0].op == "get_attr"
        }

    def reasons(self) -> list[str]:
        """Why the law is broken; empty if it holds."""
        try:
            return list(self._reasons())
        except (
            AutotpError,
            RuntimeError,
            ValueError,
            IndexError,
            AssertionError,
            TypeError,
        ) as error:
            return [f"{type(error).__name__}: {error}"]

    def _reasons(self) -> Iterator[str]:
        graphs = [self._rewritten(rank) for rank in range(self.tp)]
        dims = {
            n: self.case.analysis.dims[(node, 0)]
            for n, node in self.case.analysis.parameters.items()
        }
        parts = {
            name: self._leaves(self._placed(x, self.placements[name], dims[name]))
            for name, x in self.parameters.items()
        }
        whole = {name: self._leaf(x) for name, x in self.parameters.items()}
        expected = self._run(self.case.program.graph, whole, 0)
        local = [
            self._run(graph, {n: p[rank] for n, p in parts.items()}, rank)
            for rank, graph in enumerate(graphs)
        ]
        for graph, found in zip(graphs, local, strict=True):
            yield from self._shapes(graph, found)
        if str(self.use.node.target) not in UNDEFINED:
            yield from self._results(expected, local)
        if self.training:
            yield from self._gradients(expected, whole, local, parts, dims)

    def _rewritten(self, rank: int) -> fx.Graph:
        """A rank's graph, whose results are placed as the strategy makes them."""
        kept = dict[str | int, Placement](enumerate(self.strategy.results))
        decision = Decision(self.placements, {self.use.node: self.strategy}, {}, {}, kept)
        target = Target(self.tp, "tp", self.training, rank=rank)
        return rewrite(self.case.analysis, decision, target).graph

    def _placed(self, x: Tensor, placement: Placement, dims: Sequence[Dim]) -> list[Tensor]:
        """Each rank's tensor, by the definition of the placement."""
        if placement.is_grouped:
            return [self._own_rows(x, placement, rank) for rank in range(self.tp)]
        if placement.is_split:
            return [self._part(x, placement, dims, rank) for rank in range(self.tp)]
        return self._summands(x) if placement.kind == "P" else [x] * self.tp

    def _bounds(self, placement: Placement) -> Tensor:
        groups = self.forest.row_groups(placement.partition)
        assert groups is not None
        return self.case.tensors[groups.bounds]

    def _own_rows(self, x: Tensor, placement: Placement, rank: int) -> Tensor:
        """The rows of a rank; what follows them means nothing: NaN."""
        bounds, dim = self._bounds(placement), placement.dim
        own = move_rows_first(torch.ones_like(x), bounds, dim, rank, self.tp) == 1
        return move_rows_first(x, bounds, dim, rank, self.tp).masked_fill(~own, torch.nan)

    def _part(self, x: Tensor, placement: Placement, dims: Sequence[Dim], rank: int) -> Tensor:
        for dim, split in list_splits(self.forest, dims, placement):
            x = slice_block(x, dim, split, rank, self.tp)
        return x

    def _given(self, g: Tensor, placement: Placement, dims: Sequence[Dim]) -> list[Tensor]:
        """Each rank's gradient of a result so placed."""
        if placement.kind != "S~":
            return self._placed(g, _find_dual(placement), dims)
        ((dim, split),) = list_splits(self.forest, dims, placement)
        noise = [self._part(self._random(g), placement, dims, r) for r in range(self.tp)]
        own = [n - keep_first_copy(n, dim, split, r, self.tp) for r, n in enumerate(noise)]
        rest = g - sum(write_block(n, dim, split, r, self.tp) for r, n in enumerate(own))
        parts = self._placed(rest, placement, dims)
        firsts = [keep_first_copy(p, dim, split, r, self.tp) for r, p in enumerate(parts)]
        return [first + n for first, n in zip(firsts, own, strict=True)]

    def _summands(self, x: Tensor) -> list[Tensor]:
        """Random tensors that add up to `x`; of flags, all but one are false."""
        others = []
        for _ in range(self.tp - 1):
            noise = self._random(x) * 2
            others.append(torch.zeros_like(x) if x.dtype == torch.bool else noise.to(x.dtype))
        return [*others, x if x.dtype == torch.bool else x - sum(others)]

    def _leaf(self, x: Tensor) -> Tensor:
        return x.clone().requires_grad_(self.training and (x.is_floating_point() or x.is_complex()))

    def _leaves(self, xs: list[Tensor]) -> list[Tensor]:
        return [self._leaf(x) for x in xs]

    def _run(self, graph: fx.Graph, parameters: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        torch.default_generator.manual_seed(0)  # the same dropout on every rank
        tensors = {**self.case.tensors, **parameters}
        outputs = RankInterpreter(graph, tensors, rank, self.tp).run(
            *(self.case.tensors[name] for name in self.case.program.inputs)
        )
        return list(outputs)

    # ── comparing ────────────────────────────────────────────────────────────────────────────

    def _shapes(self, graph: fx.Graph, local: list[Tensor]) -> Iterator[str]:
        made = cast("tuple[fx.Node, ...]", graph.output_node().args[0])
        for k, node in enumerate(made):
            shape = tuple(node.meta["val"].shape)
            if shape != tuple(local[k].shape):
                yield f"result {k} was to be {shape}, is {tuple(local[k].shape)}"

    def _results(self, expected: list[Tensor], local: list[list[Tensor]]) -> Iterator[str]:
        for k, whole in enumerate(expected):
            parts = [outputs[k] for outputs in local]
            placement = self.strategy.results[k]
            yield from self._compare(
                f"result {k}", whole, parts, placement, self.use.rule.results[k]
            )

    def _compare(
        self,
        what: str,
        whole: Tensor,
        parts: list[Tensor],
        placement: Placement,
        dims: Sequence[Dim],
    ) -> Iterator[str]:
        wanted = [whole] * self.tp
        if placement.is_split:
            wanted = self._placed(whole, placement, dims)
        elif placement.is_grouped:
            bounds, dim = self._bounds(placement), placement.dim
            places = [move_rows_back(p, bounds, dim, r, self.tp) for r, p in enumerate(parts)]
            wanted, parts = [whole], [sum(places[1:], places[0])]
        elif placement.kind == "P":
            wanted, parts = [whole], [sum(parts[1:], parts[0])]
        for rank, (expected, part) in enumerate(zip(wanted, parts, strict=True)):
            if reason := _describe_difference(expected.detach(), part.detach()):
                yield f"{what} as {placement} on rank {rank}: {reason}"

    def _gradients(
        self,
        expected: list[Tensor],
        whole: Mapping[str, Tensor],
        local: list[list[Tensor]],
        parts: Mapping[str, list[Tensor]],
        dims: Mapping[str, tuple[Dim, ...]],
    ) -> Iterator[str]:
        flowing = [k for k, x in enumerate(expected) if x.requires_grad]
        leaves = {n: x for n, x in whole.items() if x.requires_grad}
        if not flowing or not leaves:
            return
        given = [self._random(expected[k]) for k in flowing]
        total = _compute_gradients([expected[k] for k in flowing], list(leaves.values()), given)
        placed = [
            self._given(g, self.strategy.results[k], self.use.rule.results[k])
            for k, g in zip(flowing, given, strict=True)
        ]
        ranks = [
            _compute_gradients(
                [local[rank][k] for k in flowing],
                [parts[n][rank] for n in leaves],
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

    def _random(self, x: Tensor) -> Tensor:
        """Values from -1 to 1, whole numbers where the dtype is not of double precision."""
        noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        if x.is_complex():
            return noise.to(x.dtype)
        return noise if x.dtype == torch.float64 else noise.round().to(x.dtype)


def list_splits(
    forest: Forest, dims: Sequence[Dim], placement: Placement
) -> list[tuple[int, Split]]:
    """The dims of a value that `placement` cuts, and how."""
    partition = placement.partition
    cut = [placement.dim]
    if placement.kind == "SS":
        cut = [d for d, dim in enumerate(dims) if forest.present((dim,), partition).parts]
    splits = [(d, forest.split(dims[d], partition)) for d in cut]
    return [(d, split) for d, split in splits if split is not None]


def _find_dual(placement: Placement) -> Placement:
    """How the gradient of a value so placed lies."""
    kinds: dict[str, Kind] = {"P": "R", "R~": "P"}
    return replace(placement, kind=kinds.get(placement.kind, placement.kind))


def _compute_gradients(outputs: list[Tensor], inputs: list[Tensor], given: list[Tensor]) -> list[Tensor]:
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


def _describe_difference(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)}, whole {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    scale = max(1.0, float(expected.abs().max())) if expected.dtype != torch.bool else 1.0
    gap = float((expected.double() - found.double()).abs().max())
    return "" if gap <= TOLERANCE * scale else f"differs by {gap:.3g}"
