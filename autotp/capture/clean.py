"""Removes ops without effect from a captured graph, and moves a graph to another device.

Constraints: sizes are never ordered. They may be symbols, and a comparison would specialise them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from autotp.capture.graph_facts import read_argument, spell_sizes

END = 2**63 - 1  # how a slice says "to the end"
aten = torch.ops.aten
DROPOUTS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)

DEFINED: Mapping[object, Any] = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
}
"""Ops with undefined values, and their replacements: otherwise no two runs could be compared."""

FACTORIES: Mapping[object, Any] = {
    aten.new_empty.default: aten.zeros.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}
"""Factories that read dtype and device of a tensor, and those that take both as arguments."""


def clean_graph(
    graph: fx.Graph, constants: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    """Remove no-op slices and casts, aliases, asserts and dead nodes from `graph`; unfold copies.

    - `constants`: by `get_attr` target; an index of consecutive numbers among them becomes a slice.

    Undefined values become zeros. Asserts on values remain; for those on sizes there are guards.

    Constraints:
    - No op of `graph` works in place.
    - Ops that draw random numbers remain even if unused, so that the random stream is the model's.
    """
    _unfold_ops(graph)
    for node in list(graph.nodes):
        if node.target in DEFINED:
            node.target = DEFINED[node.target]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        if node.op == "call_function" and DOES_NOTHING.get(node.target, _never)(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        _slice_run(graph, node, constants)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        _pack_input(graph, node)
    for node in reversed(list(graph.nodes)):
        if not node.users and is_removable(node):
            graph.erase_node(node)


def _unfold_ops(graph: fx.Graph) -> None:
    """Replace ops that only change a shape, dtype or device by simpler ones."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        _unfold_copy(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.broadcast_tensors.default):
        _unfold_broadcast(node)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _drop_empty_operands(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.view_as.default):
        node.target = aten.reshape_as.default  # a shard may have strides that no view allows
    for node in graph.nodes:
        if node.target in (aten.type_as.default, aten.to.other):
            _unfold_conversion(node)
        elif node.target in FACTORIES:
            _unfold_factory(node)


def _unfold_copy(graph: fx.Graph, node: fx.Node) -> None:
    """`copy(x, y)` becomes `y` with the dtype and shape of `x`: the op itself has no derivative."""
    target, source = cast(tuple[fx.Node, fx.Node], node.args[:2])
    with graph.inserting_before(node):
        typed = graph.call_function(aten.to.dtype, (source, node.meta["val"].dtype))
        typed.meta = dict(node.meta, val=source.meta["val"].to(node.meta["val"].dtype))
        wide = graph.call_function(aten.expand_as.default, (typed, target))
        wide.meta = dict(node.meta)
    same = spell_sizes(typed) == spell_sizes(node)
    node.replace_all_uses_with(typed if same else wide)
    graph.erase_node(node)


def _unfold_conversion(node: fx.Node) -> None:
    """`type_as(x, y)` and `to(x, y)` become `to(x, device, dtype)`: no value of `y` is read."""
    source, result = cast(fx.Node, node.args[0]), node.meta["val"]
    node.target = aten.to.device
    node.args = (source, result.device, result.dtype, *node.args[2:])


def _unfold_factory(node: fx.Node) -> None:
    """`new_zeros(x, size)` becomes `zeros(size)` with a dtype and a device: `x` is not read."""
    result = node.meta["val"]
    node.target, node.args = FACTORIES[node.target], node.args[1:]
    node.kwargs = {**node.kwargs, "dtype": result.dtype, "device": result.device}


def _slice_run(graph: fx.Graph, node: fx.Node, constants: Mapping[str, torch.Tensor]) -> None:
    """`x[:, [-2, -1]]` becomes a copy of a slice, which can be sharded in more ways."""
    source, listed = cast(tuple[fx.Node, list[fx.Node | None]], node.args[:2])
    used = [(d, item) for d, item in enumerate(listed) if item is not None]
    index = constants.get(str(used[0][1].target)) if len(used) == 1 else None
    size = source.meta["val"].shape[used[0][0]]
    run = None if index is None or type(size) is not int else _find_run(index, size)
    if run is None:
        return
    with graph.inserting_before(node):
        piece = graph.call_function(aten.slice.Tensor, (source, used[0][0], run.start, run.stop))
        piece.meta = dict(node.meta)
        copy = graph.call_function(
            aten.clone.default, (piece,)
        )  # contiguous, like the result of indexing
        copy.kwargs = {"memory_format": torch.contiguous_format}
        copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    graph.erase_node(node)


def _pack_input(graph: fx.Graph, node: fx.Node) -> None:
    """Make the input of a linear layer contiguous if it is a slice.

    Otherwise torch multiplies each row of the batch separately, unless the weight requires grad,
    and reads the full weight for each.
    """
    piece = cast(fx.Node, node.args[0])
    if piece.target is not aten.slice.Tensor or piece.meta["val"].dim() < 3:
        return
    with graph.inserting_before(node):
        packed = graph.call_function(aten.contiguous.default, (piece,))
    packed.meta = dict(piece.meta)
    node.replace_input_with(piece, packed)


def _find_run(index: torch.Tensor, size: int) -> range | None:
    """The range of consecutive positions that an index into `size` lists; None if there is none."""
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64) or index.is_meta:
        return None
    places = [n % size for n in index.tolist()]
    run = range(places[0], places[0] + len(places)) if places else range(0)
    return run if run and places == list(run) else None


def _unfold_broadcast(node: fx.Node) -> None:
    """Pass on the operands of `broadcast_tensors` that already have the common shape."""
    operands = cast(list[fx.Node], node.args[0])
    for item in list(node.users):
        source = operands[cast(int, item.args[1])]
        if spell_sizes(source) == spell_sizes(item):
            item.replace_all_uses_with(source)


def _drop_empty_operands(graph: fx.Graph, node: fx.Node) -> None:
    """Remove operands of shape (0,) from a `cat`, such as an empty cache."""
    operands = cast(list[fx.Node], node.args[0])
    kept = [n for n in operands if spell_sizes(n) != ["0"]]
    dtypes = {n.meta["val"].dtype for n in kept}
    if len(kept) == len(operands) or dtypes != {node.meta["val"].dtype}:
        return
    node.args = (kept, *node.args[1:])
    if len(kept) == 1:
        node.replace_all_uses_with(kept[0])
        graph.erase_node(node)


def is_disabled_dropout(node: fx.Node) -> bool:
    """Whether `node` is a disabled dropout, which returns its input itself, not a copy."""
    return node.target in DROPOUTS and (
        read_argument(node, "p") == 0 or not read_argument(node, "train")
    )


def retarget_graph(graph: fx.Graph, device: torch.device) -> None:
    """Set every device argument in `graph` (factory calls, `to`) to `device`, in place."""

    def retarget(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args = map_aggregate(node.args, retarget)
        node.kwargs = map_aggregate(node.kwargs, retarget)


def _never(node: fx.Node) -> bool:
    return False


def _always(node: fx.Node) -> bool:
    return True


def is_removable(node: fx.Node) -> bool:
    """Whether `node` can be removed if unused: it neither draws random numbers nor asserts."""
    if node.op != "call_function":
        return node.op == "get_attr"
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return torch.Tag.nondeterministic_seeded not in tags and not _checks_values(node)


def _checks_values(node: fx.Node) -> bool:
    """Whether `node` asserts a condition on values, not only on sizes."""
    if node.target is not aten._assert_scalar.default or not isinstance(node.args[0], fx.Node):
        return False
    condition = node.args[0].meta["val"]
    return isinstance(condition, torch.SymBool) and not condition.node.has_hint()


def _is_whole_slice(node: fx.Node) -> bool:
    if read_argument(node, "start") not in (None, 0) or read_argument(node, "step") != 1:
        return False
    end, dim = read_argument(node, "end"), read_argument(node, "dim")
    return end is None or end == END or _spell_size(node.args[0], dim) == _spell_size(node, dim)


def _spell_size(node: object, dim: object) -> str:
    """A size as text: comparing symbols adds no guard."""
    return str(node.meta["val"].shape[dim])  # type: ignore[attr-defined, index]


def _is_same_type(node: fx.Node) -> bool:
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    formats = (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.memory_format))
    kept = all(f is torch.preserve_format for f in formats)
    return kept and (source.dtype, source.device) == (result.dtype, result.device)


DOES_NOTHING: dict[object, Callable[[fx.Node], bool]] = {
    aten.slice.Tensor: _is_whole_slice,
    aten.to.dtype: _is_same_type,
    aten.to.dtype_layout: _is_same_type,
    aten.to.device: _is_same_type,
    aten._to_copy.default: _is_same_type,
    aten.alias.default: _always,
    aten.lift_fresh_copy.default: _always,
    aten.lift_fresh.default: _always,
}
"""For each op, whether a call returns its first argument unchanged."""
