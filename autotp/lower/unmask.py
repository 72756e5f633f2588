"""Unmask: replace a causal mask by `is_causal`, and drop a mask that hides nothing.

A captured graph builds every mask, since tracing cannot branch on values. That rules out kernels
without a mask (flash attention), and the mask takes memory quadratic in the length.
`mask_evaluation` classifies a mask by running it. If the class depends on an input's values or on a
length, the graph without the mask is valid under conditions, and the graph with it is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.capture.conditions import PATTERNS, AtMost, Condition, Pattern, Plain, make_plain_values
from autotp.capture.graph_facts import read_argument
from autotp.lower.mask_evaluation import MaskGraph, MaskKind, classify_mask, extract_mask_graph

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MASK, CAUSAL = 3, 5  # arguments of the op


@dataclass(frozen=True, slots=True)
class Unmasked:
    """A graph, and the conditions on a call under which it is valid."""

    graph: fx.Graph
    conditions: frozenset[Condition]


@dataclass(frozen=True, slots=True)
class _MaskFinding:
    """The kind of one attention's mask, and the conditions under which it is of that kind."""

    node: fx.Node
    says: MaskKind
    conditions: frozenset[Condition]


def remove_masks(
    graph: fx.Graph, inputs: Sequence[str], constants: Mapping[str, torch.Tensor]
) -> list[Unmasked]:
    """The graph with as few masks as possible: first without conditions (`graph` itself if no mask
    can go), then under more and more conditions.

    Constraints:
    - `inputs`: the leaf names of the placeholders, in order; `constants`: by `get_attr` target.
    - `graph` itself is not changed. Its results and the order of its nodes stay.
    """
    names = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    found = _find_masks(graph, names, constants)
    kinds = {frozenset[Condition](), *(f.conditions for f in found)}
    return [
        Unmasked(_remove_masks(graph, [f for f in found if f.conditions <= kind]), kind)
        for kind in sorted(kinds, key=lambda kind: (len(kind), sorted(map(str, kind))))
    ]


def _find_masks(
    graph: fx.Graph, names: Mapping[fx.Node, str], constants: Mapping[str, torch.Tensor]
) -> list[_MaskFinding]:
    known: dict[Any, tuple[MaskKind, frozenset[Condition]] | None] = {}
    found: list[_MaskFinding] = []
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        mask = read_argument(node, "attn_mask")
        if not isinstance(mask, fx.Node) or read_argument(node, "is_causal"):
            continue
        query, key = node.all_input_nodes[:2]
        shapes = str(query.meta["val"].shape[-2]), str(key.meta["val"].shape[-2])
        if (mask, shapes) not in known:
            part = extract_mask_graph(mask, query, key, constants)
            known[mask, shapes] = None if part is None else _judge_mask(part, names)
        said = known[mask, shapes]
        if said is not None:
            found.append(_MaskFinding(node, *said))
    return found


def _judge_mask(
    part: MaskGraph, names: Mapping[fx.Node, str]
) -> tuple[MaskKind, frozenset[Condition]] | None:
    """The kind of a mask, and under which conditions; None if it is of neither kind."""
    for patterns in _list_patterns(part):
        part.inputs = patterns
        judged = classify_mask(part)
        if judged is None:
            continue
        plain = {Plain(names[node], pattern) for node, pattern in patterns.items()}
        bounds = _bound_lengths(part, judged.most, names)
        if bounds is not None:
            return judged.says, frozenset({*plain, *bounds})
    return None


def _list_patterns(part: MaskGraph) -> list[dict[fx.Node, Pattern]]:
    """The values to assume for its inputs: a mask of ones, or positions in order."""
    found: list[dict[fx.Node, Pattern]] = [{}]
    for node in part.inputs:
        val = node.meta["val"]
        shape = (1,) * val.dim()
        patterns: list[Pattern] = [
            p for p in PATTERNS if make_plain_values(p, shape, val.dtype) is not None
        ]
        found = [{**known, node: pattern} for known in found for pattern in patterns]
    return found if len(part.inputs) <= 2 else []


def _bound_lengths(
    part: MaskGraph, most: int | None, names: Mapping[fx.Node, str]
) -> set[Condition] | None:
    """Conditions that no length exceeds `most`; None for a length that no input has."""
    bounds: set[Condition] = set()
    if most is None:
        return bounds
    for symbol in part.lengths:
        where = [
            AtMost(name, dim, most)
            for node, name in names.items()
            for dim, size in enumerate(node.meta["val"].shape)
            if isinstance(size, torch.SymInt) and size.node.expr == symbol
        ]
        if not where:
            return None
        bounds.add(where[0])
    return bounds


def _remove_masks(graph: fx.Graph, found: Sequence[_MaskFinding]) -> fx.Graph:
    """A copy of the graph without these masks; the graph itself if there are none."""
    if not found:
        return graph
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, new))
    masks = {new[f.node]: read_argument(new[f.node], "attn_mask") for f in found}
    for each in found:
        _rewrite_attention(new[each.node], causal=each.says == "causal")
    idle = _find_ancestors(masks.values())
    for node in reversed(list(copy.nodes)):
        if node in idle and not node.users and node.op != "placeholder":
            copy.erase_node(node)
    copy.lint()
    return copy


def _rewrite_attention(node: fx.Node, *, causal: bool) -> None:
    """Remove the mask from an attention."""
    args, kwargs = list(node.args), dict(node.kwargs)
    kwargs.pop("attn_mask", None)
    if len(args) > MASK:
        args[MASK] = None
    if causal and len(args) > CAUSAL:
        args[CAUSAL] = True
    elif causal:
        kwargs["is_causal"] = True
    node.args, node.kwargs = tuple(args), kwargs


def _find_ancestors(masks: Any) -> set[fx.Node]:
    """The nodes that the masks are computed from."""
    found: set[fx.Node] = set()
    waiting: list[fx.Node] = list(masks)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
