"""Replace repeated key-value heads by grouped-query attention, which makes no copies.

A captured graph repeats keys and values once per query head, which in a decode step with a long
cache costs more than the attention itself. Torch's attention takes the unrepeated heads
(`enable_gqa`) and returns the same result, bit by bit.
"""

from typing import Any

import torch
from torch import fx

from autotp.capture.graph_facts import spell_sizes

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
HEADS = 1  # the dim, of (batch, heads, length, size)
_SHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_WIDEST = 256  # the largest head that the kernels without a mask take


def share_heads(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """A copy of `graph` whose attentions share heads where possible; else `graph` itself.

    Constraints:
    - `graph` has no gradients.
    - On a GPU, attention with a mask and shared heads has only a slow kernel: attentions with a
      mask are left unchanged.
    """
    found = [
        n for n in graph.find_nodes(op="call_function", target=ATTENTION) if _can_share(n, device)
    ]
    if not found:
        return graph
    copy, new = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, new))
    for node in found:
        _share(new[node])
    copy.lint()
    return copy


def _can_share(node: fx.Node, device: torch.device) -> bool:
    """Whether the keys and values of this attention are repeated, once per query head."""
    nodes = node.all_input_nodes[:3]
    if tuple(nodes) != node.args[:3] or node.kwargs.get("enable_gqa"):
        return False
    _, key, value = nodes
    sources = _find_repeated_source(key), _find_repeated_source(value)
    if None in sources or len({spell_sizes(s)[HEADS] for s in sources if s is not None}) != 1:
        return False
    masked = (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is not None
    sizes = [n.meta["val"].shape[-1] for n in (key, value)]
    fits = sizes[0] == sizes[1] and sizes[0] <= _WIDEST
    return device.type in ("cpu", "meta") or (not masked and fits)


def _find_repeated_source(node: fx.Node) -> fx.Node | None:
    """The tensor (batch, heads, length, size) whose heads `node` repeats consecutively, or None."""
    if node.target is aten.repeat_interleave.self_int and node.args[2:] == (HEADS,):
        return _find_4d(node.args[0])
    wide = node.args[0] if node.target in _SHAPED else None
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    tall: Any = wide.args[0]
    if tall.target is not aten.unsqueeze.default or tall.args[1] not in (HEADS + 1, HEADS - 4):
        return None
    source = _find_4d(tall.args[0])
    if source is None or _is_other(source, wide, node):
        return None
    return source


def _is_other(source: fx.Node, wide: fx.Node, node: fx.Node) -> bool:
    """Whether the sizes are not those of repeated heads: batch, heads, copies, length, size."""
    batch, heads, length, size = spell_sizes(source)
    b, h, _, n, e = spell_sizes(wide)
    shape = node.meta["val"].shape
    copies = wide.meta["val"].shape[HEADS + 1]
    known = type(shape[HEADS]) is int and type(copies) is int and heads.isdigit()
    kept = (b, h, n, e) == (batch, heads, length, size) == (*spell_sizes(node)[:1], heads, n, e)
    same = len(shape) == 4 and spell_sizes(node)[2:] == [length, size]
    return not (known and kept and same and int(heads) * copies == shape[HEADS])


def _find_4d(source: Any) -> fx.Node | None:
    return source if isinstance(source, fx.Node) and source.meta["val"].dim() == 4 else None


def _share(node: fx.Node) -> None:
    """Pass the unrepeated heads to the attention, and erase the nodes that repeated them."""
    query, *idle = node.all_input_nodes[:3]
    node.args = (query, *map(_find_repeated_source, idle), *node.args[3:])
    node.kwargs = {**node.kwargs, "enable_gqa": True}
    while idle:
        repeated = idle.pop()
        if not repeated.users and repeated.op == "call_function":
            idle += repeated.all_input_nodes
            repeated.graph.erase_node(repeated)
