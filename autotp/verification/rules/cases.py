"""Builds programs of one node from calls of one op: random tensors, samples, cases."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autotp.capture.program import Program
from autotp.oprules.rulebook import Rulebook
from autotp.planner.analysis import Analysis, Use
from autotp.planner.propagate import propagate


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A random tensor: numbers in [low, high), or booleans; if `fixed`, never a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float
    fixed: bool = False

    def make(self, generator: torch.Generator) -> Tensor:
        """The tensor."""
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if self.dtype == torch.float64:
            unit = torch.rand(self.shape, generator=generator, dtype=self.dtype)
            return self.low + unit * (self.high - self.low)
        low, high = int(self.low), int(self.high)
        return torch.randint(low, high, self.shape, generator=generator).to(self.dtype)


def real(*shape: int, low: float = -2, high: float = 2) -> RandomTensor:
    """Floats of double precision."""
    return RandomTensor(shape, torch.float64, low, high)


def short(*shape: int) -> RandomTensor:
    """Integers from -2 to 2 in bfloat16: their sums of products stay exact up to 256."""
    return RandomTensor(shape, torch.bfloat16, -2, 3)


def positive(*shape: int) -> RandomTensor:
    """Floats from 0.5 to 2."""
    return real(*shape, low=0.5)


def complexes(*shape: int) -> RandomTensor:
    """Complex numbers of double precision."""
    return RandomTensor(shape, torch.complex128, 0, 0)


def fixed(*shape: int) -> RandomTensor:
    """Floats from 0.5 to 2 without a gradient, because the op has none for them."""
    return RandomTensor(shape, torch.float64, 0.5, 2, fixed=True)


def integers(*shape: int, below: int, low: int = 0) -> RandomTensor:
    """Integers from `low` to `below` - 1."""
    return RandomTensor(shape, torch.int64, low, below)


def flags(*shape: int) -> RandomTensor:
    """True or false."""
    return RandomTensor(shape, torch.bool, 0, 2)


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one call, with `RandomTensor` (or real tensors) for its tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def call(*args: Any, **kwargs: Any) -> Sample:
    """A sample with these arguments."""
    return Sample(args, kwargs)


@dataclass(frozen=True, slots=True)
class OpCase:
    """One call as a program, with its tensors by name and its analysis."""

    program: Program
    tensors: Mapping[str, Tensor]
    analysis: Analysis

    @property
    def use(self) -> Use:
        """The one node that depends on a parameter."""
        return next(reversed(self.analysis.uses.values()))


def build_cases(op: str, sample: Sample, rules: Rulebook) -> Iterator[OpCase]:
    """The case with every tensor a parameter, then with each smaller non-empty set."""
    generator = torch.Generator().manual_seed(0)
    flat, spec = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
    tensors = [x.make(generator) if isinstance(x, RandomTensor) else x for x in flat]
    never = frozenset(k for k, x in enumerate(flat) if isinstance(x, RandomTensor) and x.fixed)
    places = [k for k, x in enumerate(tensors) if isinstance(x, Tensor) and k not in never]
    for count in range(len(places)):
        for constant in combinations(places, count):
            yield _build_case(op, tensors, spec, frozenset(constant) | never, rules)


def _build_case(
    op: str, flat: list[Any], spec: pytree.TreeSpec, constant: frozenset[int], rules: Rulebook
) -> OpCase:
    graph, tensors, arguments = fx.Graph(), dict[str, Tensor](), list(flat)
    for k, x in sorted(enumerate(flat), key=lambda item: item[0] not in constant):
        if isinstance(x, Tensor):
            make = graph.placeholder if k in constant else graph.get_attr
            arguments[k] = _describe_sample(make(f"t{k}"), x)
            tensors[f"t{k}"] = x
    args, kwargs = pytree.tree_unflatten(arguments, spec)
    node = graph.call_function(find_overload(op), args, kwargs)
    results = run_unsharded(op, flat, spec)
    node.meta["val"] = pytree.tree_map(_make_meta, results)
    graph.output(tuple(_list_items(graph, node)))
    program = Program(
        graph=graph,
        inputs=tuple(f"t{k}" for k in sorted(constant)),
        constants={},
        out_spec=pytree.tree_structure(()),
        lifted={},
        tied={},
        data_dims={},
        guards=(),
        dynamic=False,
        reason="",
        training=True,
    )
    parameters = [name for name in tensors if name not in program.inputs]
    return OpCase(program, tensors, propagate(program, parameters, rules))


def find_overload(op: str) -> Any:
    """The op of that name, `aten.linear.default`."""
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part)
    return found


def run_unsharded(op: str, flat: list[Any], spec: pytree.TreeSpec) -> Any:
    """The results of the op on unsharded tensors."""
    args, kwargs = pytree.tree_unflatten(flat, spec)
    return find_overload(op)(*args, **kwargs)


def _make_meta(x: Any) -> Any:
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _describe_sample(node: fx.Node, x: Tensor) -> fx.Node:
    node.meta["val"] = _make_meta(x)
    return node


def _list_items(graph: fx.Graph, node: fx.Node) -> Iterator[fx.Node]:
    val = node.meta["val"]
    if isinstance(val, Tensor):
        yield node
        return
    for k, meta in enumerate(val):
        item = graph.call_function(operator.getitem, (node, k))
        item.meta["val"] = meta
        yield item
