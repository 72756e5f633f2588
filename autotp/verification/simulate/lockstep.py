"""Interprets the graphs of all ranks at once.

The ranks' graphs have the same nodes, and only their tensors differ. An ordinary node runs once per
rank, on the values of that rank; a node that needs the group runs once, as a joint function over
the tensors of all ranks.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from autotp.capture.graph_facts import describe_node, name_op
from autotp.errors import AutotpError, VerifyError
from autotp.runtime.ops.library import bind_arguments
from autotp.verification.simulate.collectives import NAMESPACES, Tally, run_jointly

Observe: TypeAlias = Callable[[str, list[Tensor]], None]
"""Called for each tensor when it is computed: name of the flat node, value on each rank."""

Read: TypeAlias = Callable[[int, str, str, Tensor], Tensor]
"""Called for each value that a node reads: rank, flat names of value and reader, the value; the
node reads what it returns. The reader of the model's results is OUTPUT."""

OUTPUT = "output"

Result: TypeAlias = Any
"""The result of a node on one rank: a tensor, a number, or a tuple of them."""

Target: TypeAlias = Any
"""The target of a node: in fx a string or a function, here an op."""

Given: TypeAlias = tuple[tuple[Result, ...], dict[str, Result]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True, slots=True)
class RankGraph:
    """The graphs of one rank, and the modules on which they run.

    - `layers`: the graph of each `call_module` target, run on the module at that path.
    - `origin`: for each node, the name of the corresponding flat node.
    - `lifted`: constants outside all modules, by `get_attr` name.
    """

    module: nn.Module
    root: fx.Graph
    layers: Mapping[str, fx.Graph]
    origin: Mapping[fx.Node, str]
    lifted: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class RankTensors:
    """The parameters, buffers and inputs of one rank, in the dtype of the computation."""

    def __init__(self, graph: RankGraph, dtype: torch.dtype | None) -> None:
        """The tensors of `graph`; without a `dtype`, in their own dtypes."""
        self.graph, self.dtype = graph, dtype
        named = dict(graph.module.named_parameters())
        self.parameters = {name: self._make_leaf(p) for name, p in named.items()}
        self.known: dict[int, Tensor] = {id(p): self.parameters[n] for n, p in named.items()}

    def read_attribute(self, module: nn.Module, target: str) -> Result:
        """The value of a `get_attr` node of a graph on `module`."""
        if target in self.graph.lifted:
            return self._cast(self.graph.lifted[target])
        value: Result = module
        for name in target.split("."):
            value = getattr(value, name)
        return self._cast(value) if isinstance(value, Tensor) else value

    def copy_input(self, value: Tensor) -> Tensor:
        """A copy of an input for this rank."""
        copy = self._cast(value).detach().clone()
        return copy.requires_grad_(value.requires_grad)

    def _make_leaf(self, parameter: Tensor) -> Tensor:
        if self._fits(parameter):
            return parameter
        return parameter.detach().to(self.dtype).requires_grad_(parameter.requires_grad)

    def _cast(self, value: Tensor) -> Tensor:
        if id(value) in self.known:
            return self.known[id(value)]
        return value if self._fits(value) else value.to(_replace_dtype(value.dtype, self.dtype))

    def _fits(self, value: Tensor) -> bool:
        return _replace_dtype(value.dtype, self.dtype) == value.dtype


class Walker:
    """Interprets the graphs of all ranks at once."""

    def __init__(
        self,
        graphs: Sequence[RankGraph],
        tensors: Sequence[RankTensors],
        observe: Observe | None,
        read: Read | None,
        dtype: torch.dtype | None,
    ) -> None:
        """An interpreter of `graphs` on `tensors`, both in the order of the ranks."""
        self.graphs, self.tensors, self.dtype = graphs, tensors, dtype
        self.observe, self.read = observe, read
        self.tally: Tally = Counter()
        self.seen: set[str] = set()
        self.origin = {node: name for g in graphs for node, name in g.origin.items()}
        self.random = [torch.get_rng_state() for _ in graphs]

    def run(
        self, path: str, graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Result]]
    ) -> list[Result]:
        """The results of each rank's graph, of the module at `path`, for that rank's `inputs`."""
        feeds = [iter(given) for given in inputs]
        values: list[dict[fx.Node, Result]] = [{} for _ in graphs]
        last = [_find_last_uses(graph) for graph in graphs]
        results: list[Result] = []
        for nodes in _zip_nodes(path, graphs):
            results = self._compute(path, nodes, values, feeds)
            self._show(path, nodes[0], results)
            for node, known, result, uses in zip(nodes, values, results, last, strict=True):
                known[node] = result
                for done in uses.get(node, ()):
                    del known[done]
        return results

    def _compute(
        self,
        path: str,
        nodes: Sequence[fx.Node],
        values: Sequence[Mapping[fx.Node, Result]],
        feeds: Sequence[Iterator[Result]],
    ) -> list[Result]:
        """The value of one node on each rank."""
        node, ranks = nodes[0], range(len(nodes))
        if node.op == "placeholder":
            return [next(feed) for feed in feeds]
        if node.op == "get_attr":
            modules = [graph.module.get_submodule(path) for graph in self.graphs]
            with _blame_node(node):
                return [
                    own.read_attribute(module, str(node.target))
                    for own, module in zip(self.tensors, modules, strict=True)
                ]
        args = [self._read_operands(path, rank, nodes[rank], values[rank]) for rank in ranks]
        if node.op == "output":
            return [positional[0] for positional, _ in args]
        if node.op == "call_module" and str(node.target) in self.graphs[0].layers:
            target = str(node.target)
            layers = [graph.layers[target] for graph in self.graphs]
            return self.run(target, layers, [positional for positional, _ in args])
        with _blame_node(node):
            return self._call(node, args)

    def _call(self, node: fx.Node, args: Sequence[Given]) -> list[Result]:
        target: Target = node.target
        name = name_op(target)
        if name.partition("::")[0] in NAMESPACES or node.op != "call_function":
            return run_jointly(name, [bind_arguments(target, *given) for given in args], self.tally)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            return [self._run_random(rank, target, given) for rank, given in enumerate(args)]
        return [target(*positional, **keywords) for positional, keywords in args]

    def _run_random(self, rank: int, target: Target, given: Given) -> Result:
        """The result of a random op on `rank`, with that rank's random state."""
        torch.set_rng_state(self.random[rank])
        result = target(*given[0], **given[1])
        self.random[rank] = torch.get_rng_state()
        return result

    def _read_operands(
        self, path: str, rank: int, node: fx.Node, known: Mapping[fx.Node, Result]
    ) -> Given:
        def value(item: Result) -> Result:
            if isinstance(item, fx.Node):
                return self._read(path, rank, node, item, known[item])
            return _replace_dtype(item, self.dtype) if isinstance(item, torch.dtype) else item

        positional: Result = map_aggregate(node.args, value)
        keywords: Result = map_aggregate(node.kwargs, value)
        return tuple(positional), dict(keywords)

    def _read(self, path: str, rank: int, node: fx.Node, item: fx.Node, found: Result) -> Result:
        passed_on = node.op == "call_module" or (node.op == "output" and path)
        if self.read is None or passed_on or not isinstance(found, Tensor):
            return found
        return self.read(rank, self._name(path, item), self._name(path, node), found)

    def _name(self, path: str, node: fx.Node) -> str:
        return find_flat_name(self.origin, path, node)

    def _show(self, path: str, node: fx.Node, results: list[Result]) -> None:
        """Call the observer, once for each flat value."""
        passed_on = node.op in ("call_module", "output") or (node.op == "placeholder" and path)
        if self.observe is None or passed_on or not isinstance(results[0], Tensor):
            return
        name = self._name(path, node)
        if name not in self.seen:
            self.seen.add(name)
            self.observe(name, results)


def find_flat_name(origin: Mapping[fx.Node, str], path: str, node: fx.Node) -> str:
    """The name of the flat node that `node`, of the module at `path`, stands for.

    It is OUTPUT for the results of the graph; a node without a flat one is named by its path.
    """
    return OUTPUT if node.op == "output" else origin.get(node) or f"{path}/{node.name}"


def _zip_nodes(path: str, graphs: Sequence[fx.Graph]) -> Iterator[tuple[fx.Node, ...]]:
    """The nodes of all ranks' graphs, position by position."""
    columns = [list(graph.nodes) for graph in graphs]
    for nodes in zip(*columns, strict=False):
        if any((n.op, n.target) != (nodes[0].op, nodes[0].target) for n in nodes):
            found = "; ".join(f"rank {rank} {n.name}" for rank, n in enumerate(nodes))
            raise VerifyError(
                f"{describe_node(nodes[0])}: {len(nodes)} ranks run different ops here: {found}. "
                "Give every rank the same graph"
            )
        yield nodes
    if len({len(column) for column in columns}) > 1:
        raise VerifyError(
            f"{path or 'root'}: the ranks' graphs have {[len(c) for c in columns]} nodes. "
            "Give every rank the same graph"
        )


def _find_last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs."""
    last: dict[fx.Node, list[fx.Node]] = {}
    done: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in (*node.all_input_nodes, node):
            if operand not in done:
                done.add(operand)
                last.setdefault(node, []).append(operand)
    return last


def _replace_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor of dtype `own` when floating-point values are computed in `dtype`."""
    if dtype is None or not (own.is_floating_point or own.is_complex):
        return own
    return dtype.to_complex() if own.is_complex else dtype


@contextmanager
def _blame_node(node: fx.Node) -> Generator[None]:
    """Raise errors of the enclosed code as VerifyError that names `node`."""
    try:
        yield
    except (AutotpError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise VerifyError(
            f"{describe_node(node)}: cannot run on its operands: {error}. Look for the first wrong "
            "value at or before this node"
        ) from error
