"""Replaces in-place ops by their functional twins where that is proven to change nothing.

`y = x.add_(1)` becomes `y = x + 1` when nothing reads `x`'s memory afterwards except through `y`.
torch.export records later reads of the Python object `x` as reads of `y`, so what remains to be
excluded are views of `x` and tensors that `x` is a view of. A graph in which this cannot be proven
needs torch's own functionalisation, which costs as much as the export itself.
"""

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

__all__ = ["functionalise"]

UNANNOTATED = (
    frozenset(  # return their input itself in some modes, without saying so in their schema
        {
            torch.ops.aten.dropout.default,
            torch.ops.aten.feature_dropout.default,
            torch.ops.aten.alpha_dropout.default,
            torch.ops.aten.feature_alpha_dropout.default,
        }
    )
)


def functionalise(graph: fx.Graph) -> str:
    """Replaces every in-place op of `graph`; empty when done, else the reason why the first cannot be.

    Example: `add_ = aten.add_.Tensor(linear, 1)` becomes `add = aten.add.Tensor(linear, 1)`.
    """
    in_place = [n for n in graph.nodes if _mutates(n)]
    memory = _Memory(graph) if in_place else None
    for node in in_place:
        twin = _twin(node)
        if twin is None:
            return f"{node.name}: {node.target} has no functional twin"
        reader = memory.reader_after(node) if memory else ""
        if reader:
            return f"{node.name}: {node.target} changes memory that {reader}"
        _replace(graph, node, twin)
    return ""


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _twin(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op with the same arguments that returns what `node`'s op writes to its first argument."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    namespace, name = schema.name.split("::")
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    overload = getattr(packet, schema.overload_name or "default", None)
    if written != [0] or overload is None or overload._schema.is_mutable:
        return None
    same = [a.name for a in overload._schema.arguments] == [a.name for a in schema.arguments]
    return overload if same else None


def _replace(graph: fx.Graph, node: fx.Node, twin: torch._ops.OpOverload) -> None:
    with graph.inserting_before(node):
        name = node.name.replace(
            node.target._schema.name.split("::")[1], twin._schema.name.split("::")[1]
        )  # type: ignore[union-attr]
        made = graph.create_node("call_function", twin, node.args, node.kwargs, name)
        made.meta = dict(node.meta)
        result = _cast_back(graph, node, made)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _cast_back(graph: fx.Graph, node: fx.Node, made: fx.Node) -> fx.Node:
    """`made`, or its cast to the dtype of what was written to: in-place ops do not promote."""
    wanted: torch.Tensor = node.meta["val"]
    operands = [v for v in (n.meta.get("val") for n in node.all_input_nodes) if _is_tensor(v)]
    if all(v.dtype == wanted.dtype for v in operands):
        return made
    made.meta["val"] = _run(made, wanted)
    if made.meta["val"].dtype == wanted.dtype:
        return made
    cast = graph.call_function(torch.ops.aten.to.dtype, (made, wanted.dtype))
    cast.meta = dict(node.meta)
    return cast


def _run(node: fx.Node, like: torch.Tensor) -> torch.Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with like.fake_mode:  # type: ignore[attr-defined]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class _Memory:
    """Which nodes of a graph may hold the same memory, before anything was replaced."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {n: i for i, n in enumerate(graph.nodes)}
        self._neighbours: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for source in _aliased(node):
                self._neighbours[node].append(source)
                self._neighbours[source].append(node)
        self._same: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if storage := _storage(node):
                self._same[storage].append(node)

    def reader_after(self, node: fx.Node) -> str:
        """Who may see that `node` wrote, other than through its result; empty when nobody does."""
        here = self._position[node]
        for alias in self._aliases(node.args[0], here):  # type: ignore[arg-type]
            if alias.op != "call_function":
                return f"belongs to {alias.target}"
            late = next((u for u in alias.users if self._position.get(u, -1) > here), None)
            if late is not None:
                return f"{late.name} reads later through {alias.name}"
        return ""

    def _aliases(self, start: fx.Node, before: int) -> list[fx.Node]:
        found, queue = {start: None}, [start]
        while queue:
            node = queue.pop()
            near = self._neighbours[node] + self._same.get(_storage(node), [])
            new = [n for n in near if n not in found and self._position[n] < before]
            found |= dict.fromkeys(new)
            queue += new
        return list(found)


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory `node`'s result may share, by its op's schema."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return _aliased(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if node.target in UNANNOTATED:
        return [n for n in node.args[:1] if isinstance(n, fx.Node)]
    if not any(r.alias_info for r in schema.returns):
        return []
    shared = [a.name for a in schema.arguments if a.alias_info]
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    nodes: list[fx.Node] = []
    fx.map_arg([given[name] for name in shared if name in given], nodes.append)
    return nodes


def _storage(node: fx.Node) -> int:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return 0
    return val.untyped_storage()._cdata
