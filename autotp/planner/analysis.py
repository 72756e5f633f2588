"""The data that the planner's stages exchange: analysis, matching, decision.

`propagate` makes the Analysis, `match` the Matching, `formulate` turns both into a placement
problem, and `interpret_solution` turns its solution into a Decision.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias, cast

import torch
from torch import fx

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.algebra.placement import Placement
from autotp.algebra.split import Split
from autotp.capture.graph_facts import Value, find_source, list_results
from autotp.capture.program import Program
from autotp.cost.conversions import Delivered, Prices
from autotp.oprules.rule import Discovery, NodeRule, Operand, Row
from autotp.oprules.rulebook import Differing, Role
from autotp.planner.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Use:
    """One analysed node: its operands and rule. `row` is None when the op has no rule."""

    node: fx.Node
    operands: tuple[Operand, ...]
    rule: NodeRule
    row: Row | None


EncodedSplit: TypeAlias = tuple[int | None, tuple[int, ...]]
"""A dim, and the encoded form of its `algebra.split.Split`."""


@dataclass
class Analysis:
    """The facts of a program before any placement is chosen.

    - `uses`: every parameter-dependent op, in program order.
    - `dims`, `metas`: of every parameter-dependent value.
    - `parameters`: get_attr nodes of parameters. `weights`: values computed from parameters alone.
    - `differentiable`: values through which a gradient can flow, from an output to what is trained.
    - `unruled`: nodes without a rule. `discovered`: the result of running ops without a row.
    - `stops`: op name to the operands that get no gradient. `differing`: op name to how ranks may
      disagree on its results.
    """

    program: Program
    forest: Forest
    uses: dict[fx.Node, Use] = field(default_factory=dict[fx.Node, Use])
    dims: dict[Value, tuple[Dim, ...]] = field(default_factory=dict[Value, tuple[Dim, ...]])
    metas: dict[Value, torch.Tensor] = field(default_factory=dict[Value, torch.Tensor])
    parameters: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    weights: set[Value] = field(default_factory=set[Value])
    differentiable: set[Value] = field(default_factory=set[Value])
    unruled: list[fx.Node] = field(default_factory=list[fx.Node])
    discovered: dict[fx.Node, Discovery] = field(default_factory=dict[fx.Node, Discovery])
    stops: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    differing: Mapping[str, Sequence[Differing]] = field(
        default_factory=dict[str, Sequence[Differing]]
    )

    @cached_property
    def readers(self) -> Mapping[Value, list[tuple[Use, int]]]:
        """The ops that read each value, in program order, with the number of the operand.

        Constraints: read it only when `uses` is complete.
        """
        readers: dict[Value, list[tuple[Use, int]]] = defaultdict(list)
        for use in self.uses.values():
            for k, operand in enumerate(use.operands):
                readers[operand.value].append((use, k))
        return readers

    def list_parameter_readers(self, name: str) -> Iterator[tuple[Use, int]]:
        """The readers of a parameter, past values that are computed from parameters alone."""
        return self._list_readers((self.parameters[name], 0))

    def _list_readers(self, value: Value) -> Iterator[tuple[Use, int]]:
        for use, k in self.readers[value]:
            results = [(use.node, r) for r in range(len(use.rule.results))]
            inner = [r for r in results if r in self.weights]
            if not inner:
                yield use, k
            for result in inner:
                yield from self._list_readers(result)

    def split(self, value: Value, placement: Placement) -> Split | None:
        """How the dim of a value that `placement` names is split; None where it is not split."""
        if not placement.is_split:
            return None
        return self.forest.split(self.dims[value][placement.dim], placement.partition)

    def encode_split(self, value: Value, placement: Placement) -> EncodedSplit:
        """The dim and encoded split of a value; (None, ()) if it is replicated."""
        split = self.split(value, placement)
        return (placement.dim, split.encode()) if split else (None, ())


@dataclass(frozen=True, slots=True, eq=False)
class AxisPair:
    """Openers (column-parallel) and closers (row-parallel) with a family of axes between them.

    - `axes`: the factors of one head dim (kv heads and their group) are one family, major first.
    - `vocabulary`: the axis of an embedding, or one that reaches an output or a loss.
    """

    axes: tuple[Atom, ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    role: Role
    vocabulary: bool
    interior: frozenset[str]

    @property
    def names(self) -> dict[str, str]:
        """The printed name of each axis: `kv_heads` and `heads_per_kv` of a family."""
        base = self.role.axis
        names = [base] if len(self.axes) == 1 else [f"kv_{base}", f"{base}_per_kv"]
        names += [f"{base}_{k}" for k in range(2, len(self.axes))]
        return {axis.name: name for axis, name in zip(self.axes, names, strict=False)}


@dataclass(slots=True)
class Matching:
    """All pairs.

    - `home`: the axes of each parameter along one of which it should be sharded.
    - `experts`: the expert axis of each weight or bias that has one.
    """

    pairs: list[AxisPair] = field(default_factory=list[AxisPair])
    home: dict[str, tuple[Atom, ...]] = field(default_factory=dict[str, tuple[Atom, ...]])
    pair_of: dict[str, AxisPair] = field(default_factory=dict[str, AxisPair])
    experts: dict[str, Atom] = field(default_factory=dict[str, Atom])


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen placements, strategies and delivered sets, with the prices of conversions.

    - `caches`: the placement of each cache tensor: of an input by its placeholder, of an output by
      its number.
    """

    parameters: Mapping[str, Placement]
    strategies: Mapping[fx.Node, Strategy]
    delivered: Mapping[Value, Delivered]
    prices: Mapping[Value, Prices]
    caches: Mapping[str | int, Placement] = field(default_factory=dict[str | int, Placement])


@dataclass(frozen=True, slots=True)
class CacheOutput:
    """A cache tensor that the program returns, which may stay sharded.

    - `number`: of the output; `path`: in the cache; `replaces`: the placeholder that
      it becomes in the next call, or None.
    """

    number: int
    path: str
    value: Value
    replaces: fx.Node | None


@dataclass(frozen=True, slots=True)
class EmittedCollective:
    """One collective of the rewritten graph: kind, phase, place, and the unsharded values it moves.

    - `shares`: for each value, the fraction of its bytes that moves; above 1 with padding.
    - `axes`: the sharded axes that make it necessary.
    - `ranks`, `stride`: of the sub-groups it runs in: every `stride`-th of `ranks * stride`
      consecutive ranks; 0 is the full group.
    """

    kind: str
    phase: str
    where: str
    metas: tuple[torch.Tensor, ...]
    shares: tuple[Fraction, ...] = ()
    ranks: int = 0
    stride: int = 1
    axes: tuple[str, ...] = ()


def list_cache_outputs(analysis: Analysis) -> list[CacheOutput]:
    """The tensors of caches among the outputs, those that depend on parameters or on a cache."""
    program = analysis.program
    inputs = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    outputs = cast("Sequence[object]", program.graph.output_node().args[0])
    found: list[CacheOutput] = []
    for number, carried in program.carried.items():
        node = outputs[number]
        if isinstance(node, fx.Node) and find_source(node) in analysis.dims:
            taken = inputs.get(carried.taken.replace(".", "_"))
            known = taken is not None and (taken, 0) in analysis.dims
            value = find_source(node)
            found.append(CacheOutput(number, carried.path, value, taken if known else None))
    return found


def list_model_outputs(analysis: Analysis) -> set[Value]:
    """The outputs of the model, which are replicated on every rank."""
    outputs = cast("Sequence[object]", analysis.program.graph.output_node().args[0])
    carried = analysis.program.carried
    nodes = [n for k, n in enumerate(outputs) if k not in carried and isinstance(n, fx.Node)]
    return {find_source(n) for n in nodes}


def find_differentiated_nodes(graph: fx.Graph, analysis: Analysis) -> set[fx.Node]:
    """The nodes of `graph`, the program's or what became of it, that a backward pass goes through.

    A node needs a gradient if a trained tensor (a parameter or input that requires grad) reaches it
    through floating-point values and it reaches an output. A frozen parameter needs none.
    """
    trained = {(n.op, n.target) for n in analysis.program.graph.nodes if _requires_grad(n)}
    asking: set[fx.Node] = set()
    for node in graph.nodes:
        asks = any(n in asking for n in _passing(node, analysis))
        if ((node.op, node.target) in trained or asks) and _takes_gradient(node):
            asking.add(node)
    return asking & find_gradient_targets(graph, analysis)


def find_gradient_targets(graph: fx.Graph, analysis: Analysis) -> set[fx.Node]:
    """The nodes of `graph` that a gradient from the outputs would reach, needed or not.

    None reaches values that are only used where gradients stop: under no_grad, or detached.
    """
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in reached or node.op == "output":
            reached.update(n for n in _passing(node, analysis) if _takes_gradient(n))
    return reached


def _passing(node: fx.Node, analysis: Analysis) -> list[fx.Node]:
    """The operands of `node` to which it passes a gradient."""
    stops = analysis.stops.get(str(node.target))
    if not stops:
        return node.all_input_nodes
    return [n for k, n in enumerate(node.args) if k not in stops and isinstance(n, fx.Node)]


def _requires_grad(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return node.op != "call_function" and isinstance(val, torch.Tensor) and val.requires_grad


def _takes_gradient(node: fx.Node) -> bool:
    return "val" not in node.meta or any(
        t.is_floating_point() or t.is_complex() for t in list_results(node).values()
    )
