"""The interpreter of all ranks' graphs at once.

One idea: the ranks' graphs are one graph, run node by node; what differs is the tensors. An
ordinary node runs once a rank, on that rank's values alone; a node that asks for the group runs
once, as a joint function over all ranks' tensors.
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

__all__ = ["OUTPUT", "Observe", "RankGraph", "RankTensors", "Read", "Walker", "find_flat_name"]

Observe: TypeAlias = Callable[[str, list[Tensor]], None]
"""Told of each tensor as it is made: the flat node's name, and its value on each rank."""

Read: TypeAlias = Callable[[int, str, str, Tensor], Tensor]
"""Stands between a value and its reader: rank, the flat names of value and reader, the value; what
it returns is read. What the model returns is read by OUTPUT."""

OUTPUT = "output"

Result: TypeAlias = Any
"""What a node gives on one rank: a tensor, a number, a tuple of them."""

Target: TypeAlias = Any
"""What a node calls: fx types it as a string or a function, here it is an op."""

Given: TypeAlias = tuple[tuple[Result, ...], dict[str, Result]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True, slots=True)
class RankGraph:
    """What one rank runs: graphs on a tree of modules.

    - `layers`: the graph of each `call_module` target, run on the module at that path.
    - `origin`: node to the name of the flat node whose value it is.
    - `lifted`: constants that are in no module, by `get_attr` name.
    """

    module: nn.Module
    root: fx.Graph
    layers: Mapping[str, fx.Graph]
    origin: Mapping[fx.Node, str]
    lifted: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class RankTensors:
    """One rank's parameters, buffers and inputs, in the dtype that is computed in."""

    def __init__(self, part: RankGraph, dtype: torch.dtype | None) -> None:
        """Those of `part`; without a `dtype`, as they are."""
        self.part, self.dtype = part, dtype
        named = dict(part.module.named_parameters())
        self.parameters = {name: self._leaf(p) for name, p in named.items()}
        self.known: dict[int, Tensor] = {id(p): self.parameters[n] for n, p in named.items()}

    def attribute(self, module: nn.Module, target: str) -> Result:
        """What a `get_attr` node of a graph on `module` reads."""
        if target in self.part.lifted:
            return self._cast(self.part.lifted[target])
        value: Result = module
        for name in target.split("."):
            value = getattr(value, name)
        return self._cast(value) if isinstance(value, Tensor) else value

    def input(self, value: Tensor) -> Tensor:
        """A copy of an input, the rank's own."""
        copy = self._cast(value).detach().clone()
        return copy.requires_grad_(value.requires_grad)

    def _leaf(self, parameter: Tensor) -> Tensor:
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
    """The interpreter of all ranks' graphs at once."""

    def __init__(
        self,
        parts: Sequence[RankGraph],
        tensors: Sequence[RankTensors],
        observe: Observe | None,
        read: Read | None,
        dtype: torch.dtype | None,
    ) -> None:
        """One that runs `parts` on `tensors`, in the same order."""
        self.parts, self.tensors, self.dtype = parts, tensors, dtype
        self.observe, self.read = observe, read
        self.tally: Tally = Counter()
        self.seen: set[str] = set()
        self.origin = {node: name for part in parts for node, name in part.origin.items()}
        self.random = [torch.get_rng_state() for _ in parts]

    def run(
        self, path: str, graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Result]]
    ) -> list[Result]:
        """Each rank's results of its graph, of the module at `path`, for its `inputs`."""
        feeds = [iter(given) for given in inputs]
        values: list[dict[fx.Node, Result]] = [{} for _ in graphs]
        last = [_find_last_uses(graph) for graph in graphs]
        results: list[Result] = []
        for nodes in _zip_nodes(path, graphs):
            results = self._results(path, nodes, values, feeds)
            self._show(path, nodes[0], results)
            for node, known, result, uses in zip(nodes, values, results, last, strict=True):
                known[node] = result
                for done in uses.get(node, ()):
                    del known[done]
        return results

    def _results(
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
            modules = [part.module.get_submodule(path) for part in self.parts]
            with _blame_node(node):
                return [
                    own.attribute(module, str(node.target))
                    for own, module in zip(self.tensors, modules, strict=True)
                ]
        args = [self._operands(path, rank, nodes[rank], values[rank]) for rank in ranks]
        if node.op == "output":
            return [positional[0] for positional, _ in args]
        if node.op == "call_module" and str(node.target) in self.parts[0].layers:
            target = str(node.target)
            layers = [part.layers[target] for part in self.parts]
            return self.run(target, layers, [positional for positional, _ in args])
        with _blame_node(node):
            return self._called(node, args)

    def _called(self, node: fx.Node, args: Sequence[Given]) -> list[Result]:
        target: Target = node.target
        name = name_op(target)
        if name.partition("::")[0] in NAMESPACES or node.op != "call_function":
            return run_jointly(name, [bind_arguments(target, *given) for given in args], self.tally)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            return [self._drawn(rank, target, given) for rank, given in enumerate(args)]
        return [target(*positional, **keywords) for positional, keywords in args]

    def _drawn(self, rank: int, target: Target, given: Given) -> Result:
        """What a random op gives on `rank`, whose generator goes on where it stood."""
        torch.set_rng_state(self.random[rank])
        result = target(*given[0], **given[1])
        self.random[rank] = torch.get_rng_state()
        return result

    def _operands(
        self, path: str, rank: int, node: fx.Node, known: Mapping[fx.Node, Result]
    ) -> Given:
        def value(item: Result) -> Result:
            if isinstance(item, fx.Node):
                return self._operand(path, rank, node, item, known[item])
            return _replace_dtype(item, self.dtype) if isinstance(item, torch.dtype) else item

        positional: Result = map_aggregate(node.args, value)
        keywords: Result = map_aggregate(node.kwargs, value)
        return tuple(positional), dict(keywords)

    def _operand(self, path: str, rank: int, node: fx.Node, item: fx.Node, found: Result) -> Result:
        passed_on = node.op == "call_module" or (node.op == "output" and path)
        if self.read is None or passed_on or not isinstance(found, Tensor):
            return found
        return self.read(rank, self._name(path, item), self._name(path, node), found)

    def _name(self, path: str, node: fx.Node) -> str:
        return find_flat_name(self.origin, path, node)

    def _show(self, path: str, node: fx.Node, results: list[Result]) -> None:
        """Tells the observer, once for each flat value, where it is made."""
        passed_on = node.op in ("call_module", "output") or (node.op == "placeholder" and path)
        if self.observe is None or passed_on or not isinstance(results[0], Tensor):
            return
        name = self._name(path, node)
        if name not in self.seen:
            self.seen.add(name)
            self.observe(name, results)


def find_flat_name(origin: Mapping[fx.Node, str], path: str, node: fx.Node) -> str:
    """The name of the flat node that `node`, of the module at `path`, stands for.

    Constraints: it is OUTPUT for what the graph returns; a node without a flat one is called by its
    place in the tree.
    """
    return OUTPUT if node.op == "output" else origin.get(node) or f"{path}/{node.name}"


def _zip_nodes(path: str, graphs: Sequence[fx.Graph]) -> Iterator[tuple[fx.Node, ...]]:
    """The nodes of all ranks' graphs, position by position."""
    columns = [list(graph.nodes) for graph in graphs]
    for nodes in zip(*columns, strict=False):
        if any((n.op, n.target) != (nodes[0].op, nodes[0].target) for n in nodes):
            found = "; ".join(f"rank {rank} {n.name}" for rank, n in enumerate(nodes))
            raise VerifyError(
                f"{describe_node(nodes[0])}: the {len(nodes)} ranks run different ops here: {found}. "
                "Give every rank the same graph"
            )
        yield nodes
    if len({len(column) for column in columns}) > 1:
        raise VerifyError(
            f"{path or 'root'}: the ranks' graphs have {[len(c) for c in columns]} nodes. "
            "Give every rank the same graph"
        )


def _find_last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody needs after it."""
    last: dict[fx.Node, list[fx.Node]] = {}
    done: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in (*node.all_input_nodes, node):
            if operand not in done:
                done.add(operand)
                last.setdefault(node, []).append(operand)
    return last


def _replace_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """`own`, or what stands for it when floating values are computed in `dtype`."""
    if dtype is None or not (own.is_floating_point or own.is_complex):
        return own
    return dtype.to_complex() if own.is_complex else dtype


@contextmanager
def _blame_node(node: fx.Node) -> Generator[None]:
    """Errors of the code inside name `node`."""
    try:
        yield
    except (AutotpError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise VerifyError(
            f"{describe_node(node)}: cannot run on its operands: {error}. Look for the first wrong "
            "value at or before this node"
        ) from error
