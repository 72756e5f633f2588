"""Classify an attention's mask by running the subgraph that computes it.

The subgraph depends on sizes, which are chosen here, and on the values of a few inputs, which are
assumed to be plain (a mask of ones, positions in order). It is run at many sizes: small ones, those
around each number in it (a window's length), and, if memory allows, at more than twice the sum of
all its numbers. A mask of one kind at all of them is of that kind at all sizes; otherwise its kind
is known up to the largest size that was run.

    causal: row q attends to the columns k <= q, and there are as many rows as columns
    full: every row attends to every column
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from autotp.capture.conditions import Pattern, make_plain_values
from autotp.capture.graph_facts import find_expression

MaskKind: TypeAlias = Literal["causal", "full"]
# Any: sympy has no types.
Sizes: TypeAlias = Mapping[Any, int]

SMALL = (1, 2, 3, 5, 8, 17)
POWERS = (64, 128, 256, 512, 1024, 2048, 4096)
BUDGET = 2**28  # bytes of all tensors of one run
MOST_NODES = 300
SENTINEL = 2**31  # numbers beyond stand for "to the end", or for minus infinity
SCALING = ("mul", "div", "pow", "shift", "remainder", "fmod", "floor_divide")
NARROW = (torch.int8, torch.uint8, torch.int16)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kind of a mask; `most`: the largest length for which it is known, None for any."""

    says: MaskKind
    most: int | None


@dataclass(slots=True)
class MaskGraph:
    """The subgraph that computes a mask.

    - `nodes`: in order, the mask last; `inputs`: those whose values it reads, with their patterns.
    - `constants`: the values of its `get_attr` nodes.
    - `rows`, `columns`: the sizes of the attention; `batch`: its batch's symbol, if it is one.
    """

    nodes: list[fx.Node]
    inputs: dict[fx.Node, Pattern]
    constants: dict[fx.Node, torch.Tensor]
    rows: Any
    columns: Any
    batch: Any
    symbols: list[Any] = field(default_factory=list[Any])
    inexact: bool = False

    @property
    def lengths(self) -> list[Any]:
        """The symbols that are not the batch's."""
        return [s for s in self.symbols if s != self.batch]


def extract_mask_graph(
    mask: fx.Node, query: fx.Node, key: fx.Node, constants: Mapping[str, torch.Tensor]
) -> MaskGraph | None:
    """The subgraph of `mask`; None if it reads unknown values or cannot be run again."""
    found: set[fx.Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in found or _is_size(node):
            continue
        found.add(node)
        waiting += node.all_input_nodes
    nodes = [n for n in mask.graph.nodes if n in found]
    if len(nodes) > MOST_NODES or not all(_is_repeatable(n, constants) for n in nodes):
        return None
    values = {n: constants[str(n.target)] for n in nodes if n.op == "get_attr"}
    read: dict[fx.Node, Pattern] = {n: "ones" for n in nodes if n.op == "placeholder"}
    queries, keys = query.meta["val"].shape, key.meta["val"].shape
    part = MaskGraph(nodes, read, values, queries[-2], keys[-2], find_expression(queries[0]))
    part.symbols = _list_symbols(part)
    return part if all(s.is_Symbol for s in part.symbols) else None


def classify_mask(part: MaskGraph) -> Verdict | None:
    """The kind of the mask, at all sizes or up to one; None if it is of neither kind."""
    says = {"causal", "full"}
    if find_expression(part.rows) != find_expression(part.columns):
        says.discard("causal")
    runs = 0
    for sizes in _list_small_sizes(part):
        seen = _classify_at(part, sizes)
        if seen is not None:
            runs, says = runs + 1, says & seen
        if not says:
            return None
    if runs < 4:
        return None
    most = _find_reach(part, says)
    said: MaskKind = "full" if "full" in says else "causal"
    return Verdict(said, most) if most is None or most > max(SMALL) else None


def _find_reach(part: MaskGraph, says: set[str]) -> int | None:
    """The largest length up to which the mask is of that kind; None for any."""
    numbers = _list_numbers(part)
    last = max(SMALL)
    far = 2 * _bound_reach(part, numbers) + 3
    around = {n + d for n in numbers for d in (-1, 0, 1)}
    for length in sorted(n for n in {*around, *POWERS, far} if max(SMALL) < n <= far):
        tested = list(_list_long_sizes(part, length))
        if any(_count_bytes(part, sizes) > BUDGET for sizes in tested):
            return last
        for sizes in tested:
            seen = _classify_at(part, sizes)
            if seen is not None and not says & seen:
                return last
        last = length
    return last if part.inexact else None


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def _list_small_sizes(part: MaskGraph) -> Iterator[Sizes]:
    """All combinations of small lengths, with batches of one and more."""
    chosen = SMALL if len(part.lengths) < 3 else SMALL[1:4]
    for k, lengths in enumerate(itertools.product(chosen, repeat=len(part.lengths))):
        for batch in (1, 2, 3) if not part.lengths else (1 + k % 3,):
            yield dict(zip(part.lengths, lengths, strict=True)) | {part.batch: batch}


def _list_long_sizes(part: MaskGraph, length: int) -> Iterator[Sizes]:
    """All lengths long, then each one long with the others short."""
    once = {part.batch: 1}
    yield dict.fromkeys(part.lengths, length) | once
    if len(part.lengths) > 1:
        for symbol in part.lengths:
            yield {s: length if s == symbol else 2 for s in part.lengths} | once


def _list_symbols(part: MaskGraph) -> list[Any]:
    """The symbols of all sizes in the subgraph."""
    found: dict[Any, None] = {}
    expressions = [find_expression(part.rows), find_expression(part.columns)]
    for node in part.nodes:
        expressions += [find_expression(s) for s in node.meta["val"].shape]
        expressions += [find_expression(n.meta["val"]) for n in node.all_input_nodes if _is_size(n)]
    for expression in expressions:
        if not isinstance(expression, (bool, int, float)):
            found |= dict.fromkeys(sorted(expression.free_symbols, key=str))
    return list(found)


def _evaluate_size(size: Any, sizes: Sizes) -> Any:
    """The value of a size, or of a number computed from sizes, at chosen sizes."""
    if not isinstance(size, SYMBOLIC):
        return size
    known = find_expression(size).subs(sizes)
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(size)]
    return kind(known)


# ── how far numbers reach ────────────────────────────────────────────────────────────────────────


def _list_numbers(part: MaskGraph) -> set[int]:
    """The numbers in the subgraph, without those that mean "to the end" or infinity."""
    return {n for n, _ in _list_written_numbers(part)}


def _bound_reach(part: MaskGraph, numbers: set[int]) -> int:
    """A bound on how far from an edge or a diagonal the mask's form can change."""
    scale = math.prod(n for n, scales in set(_list_written_numbers(part)) if scales and n > 1)
    return sum(numbers) * scale


def _list_written_numbers(part: MaskGraph) -> Iterator[tuple[int, bool]]:
    """Each number, rounded up, and whether something is scaled by it."""
    for node in part.nodes:
        scales = any(word in str(node.target) for word in SCALING)
        listed: list[Any] = []
        map_aggregate((node.args, node.kwargs), listed.append)
        for size in (n.meta["val"] for n in node.all_input_nodes if _is_size(n)):
            expression = find_expression(size)
            if not isinstance(expression, (bool, int, float)):
                yield from ((abs(int(n)), True) for n in expression.atoms() if n.is_Integer)
            else:
                listed.append(expression)
        for value in listed:
            if type(value) in (int, float) and abs(value) < SENTINEL:
                yield math.ceil(abs(value)), scales
    for tensor in part.constants.values():
        for value in tensor.flatten().tolist():
            if abs(value) < SENTINEL:
                yield math.ceil(abs(value)), True


# ── running ──────────────────────────────────────────────────────────────────────────────────────


def _classify_at(part: MaskGraph, sizes: Sizes) -> set[str] | None:
    """The kinds that fit the mask at these sizes; None if the model cannot run at them either."""
    rows, columns = _evaluate_size(part.rows, sizes), _evaluate_size(part.columns, sizes)
    try:
        mask = _run_mask(part, sizes)
        seen = mask.broadcast_to(*mask.shape[:-2], rows, columns)
    except (RuntimeError, IndexError):  # sizes that do not fit together
        return None
    if not _only_hides(mask):
        return set()
    seen = seen if seen.dtype is torch.bool else seen == 0
    said = {"full"} if bool(seen.all()) else set[str]()
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return said | {"causal"} if bool((seen == causal).all()) else said


def _only_hides(mask: torch.Tensor) -> bool:
    """Whether a mask only hides elements or leaves them unchanged."""
    if mask.dtype is torch.bool:
        return True
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all())


def _run_mask(part: MaskGraph, sizes: Sizes) -> torch.Tensor:
    """The mask at these sizes."""
    values: dict[fx.Node, Any] = {}
    last = _find_last_uses(part.nodes)
    for node in part.nodes:
        values[node] = _run_node(part, node, sizes, values)
        if node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype in NARROW:
            part.inexact = part.inexact or _has_counts(values[node])
        for done in last.get(node, ()):
            del values[done]
    return values[part.nodes[-1]]


def _run_node(
    part: MaskGraph, node: fx.Node, sizes: Sizes, values: Mapping[fx.Node, Any]
) -> torch.Tensor:
    if node in part.constants:
        return part.constants[node]
    if node in part.inputs:
        val = node.meta["val"]
        shape = tuple(_evaluate_size(s, sizes) for s in val.shape)
        made = make_plain_values(part.inputs[node], shape, val.dtype)
        assert made is not None, f"{node.name} has no {part.inputs[node]}"
        return made

    def evaluate(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        if not isinstance(argument, fx.Node):
            return argument
        return (
            values[argument] if argument in values else _evaluate_size(argument.meta["val"], sizes)
        )

    args = _map_argument(node.args, evaluate)
    kwargs = {k: _map_argument(v, evaluate) for k, v in node.kwargs.items() if k != "pin_memory"}
    return cast("OpOverload", node.target)(*args, **kwargs)


def _map_argument(argument: Any, function: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_map_argument(a, function) for a in cast("Sequence[Any]", argument))
    return function(argument)


def _has_counts(value: torch.Tensor) -> bool:
    """Whether it has numbers other than 0, 1 and infinity: later ops may round them."""
    marks = (value == 0) | (value.abs() == 1)
    if value.dtype.is_floating_point:
        marks |= value.abs() >= torch.finfo(value.dtype).max
    return not bool(marks.all())


def _find_last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs."""
    last = {source: node for node in nodes for source in node.all_input_nodes if source in nodes}
    return {node: [s for s, at in last.items() if at is node] for node in last.values()}


def _count_bytes(part: MaskGraph, sizes: Sizes) -> int:
    """The bytes of all values of a run, views counted as copies."""
    total = 0
    for node in part.nodes:
        val = node.meta["val"]
        total += math.prod(_evaluate_size(s, sizes) for s in val.shape) * val.element_size()
    return total


# ── what can be run ──────────────────────────────────────────────────────────────────────────────


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (*SYMBOLIC, int, float))


def _is_repeatable(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> bool:
    """Whether a run of `node` on the CPU returns what the model computes."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.op == "get_attr":
        value = constants.get(str(node.target))
        return value is not None and value.device.type == "cpu" and value.numel() <= 1024
    if node.op == "placeholder":
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not random and not node.target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
