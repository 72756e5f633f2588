"""Replaces in-place ops by their functional counterparts where this provably changes nothing.

`y = x.add_(1)` becomes `y = x + 1` when nothing reads `x`'s memory afterwards except through `y`.
torch.export records later reads of the Python object `x` as reads of `y`, so only views of `x` and
tensors that `x` is a view of remain to be excluded. A graph in which this cannot be proven needs
torch's own functionalisation, which costs as much as the export itself.

Two values are taken to share memory where an op's schema says that they may (`contiguous` shares
at some sizes only), and where they did so in the trace (`type_as` shares, but its schema does not
say so). Disabled dropouts share memory too, unseen by the trace: they have been removed before.
"""

import operator
from collections import defaultdict
from typing import Any, cast

import torch
from torch import fx
from torch._C import FunctionSchema
from torch._C._functorch import is_batchedtensor
from torch._ops import OpOverload


def functionalise_graph(graph: fx.Graph) -> str:
    """Replace every in-place op of `graph`; returns why the first one cannot be, or "".

    Example: `add_ = aten.add_.Tensor(linear, 1)` becomes `add = aten.add.Tensor(linear, 1)`.
    """
    in_place = [n for n in graph.nodes if _is_in_place(n)]
    memory = _Memory(graph) if in_place else None
    for node in in_place:
        twin = _find_twin(node)
        if twin is None:
            return f"{node.name}: {node.target} has no functional twin"
        reader = memory.find_later_reader(node) if memory else ""
        if reader:
            return f"{node.name}: {node.target} changes memory that {reader}"
        _replace_op(graph, node, twin)
    return ""


def has_vmap(graph: fx.Graph) -> bool:
    """Whether `graph` has values inside a vmap, whose tensors have dims that no op names."""
    values = (n.meta.get("val") for n in graph.nodes)
    return any(isinstance(v, torch.Tensor) and is_batchedtensor(v) for v in values)


def _is_in_place(node: fx.Node) -> bool:
    schema = _find_schema(node)
    return schema is not None and schema.is_mutable


def _find_schema(node: fx.Node) -> FunctionSchema | None:
    if not isinstance(node.target, OpOverload):
        return None
    return node.target._schema  # pyright: ignore[reportPrivateUsage] torch has no public way


def _find_twin(node: fx.Node) -> OpOverload | None:
    """The op with the same arguments that returns what the op of `node` writes to its first one."""
    schema = _find_schema(node)
    assert schema is not None
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    packet = getattr(torch.ops, schema.name.split("::")[0])
    found = getattr(
        getattr(packet, _name_functional(schema), None), schema.overload_name or "default", None
    )
    if written != [0] or not isinstance(found, OpOverload):
        return None
    twin = found._schema  # pyright: ignore[reportPrivateUsage]
    same = [a.name for a in twin.arguments] == [a.name for a in schema.arguments]
    return found if same and not twin.is_mutable else None


def _name_functional(schema: FunctionSchema) -> str:
    """The functional name: `add_` gives `add`, `__iand__` gives `__and__`."""
    name = schema.name.split("::")[1]
    return f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")


def _replace_op(graph: fx.Graph, node: fx.Node, twin: OpOverload) -> None:
    schema = _find_schema(node)
    assert schema is not None
    with graph.inserting_before(node):
        name = _name_functional(schema).strip("_")
        made = graph.create_node("call_function", twin, node.args, node.kwargs, name)
        made.meta = dict(node.meta)
        result = _cast_back(graph, node, made)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _cast_back(graph: fx.Graph, node: fx.Node, made: fx.Node) -> fx.Node:
    """`made`, or its cast to the dtype of the tensor written to: in-place ops do not promote."""
    wanted: torch.Tensor = node.meta["val"]
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if all(v.dtype == wanted.dtype for v in operands if isinstance(v, torch.Tensor)):
        return made
    made.meta["val"] = value = _compute_value(made, wanted)
    if value.dtype == wanted.dtype:
        return made
    cast = graph.call_function(torch.ops.aten.to.dtype, (made, wanted.dtype))
    cast.meta = dict(node.meta)
    return cast


def _compute_value(node: fx.Node, like: torch.Tensor) -> torch.Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), _read_val)
    with like.fake_mode:  # type: ignore[attr-defined]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _read_val(node: fx.Node) -> Any:
    return node.meta["val"]


class _Memory:
    """Which nodes of a graph may share memory, before any op is replaced."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {n: i for i, n in enumerate(graph.nodes)}
        self._users = {n: list(n.users) for n in graph.nodes}  # replacing a node changes its users
        self._written = {n: cast(fx.Node, n.args[0]) for n in graph.nodes if _is_in_place(n)}
        self._neighbours: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for source in _list_aliased(node):
                self._neighbours[node].append(source)
                self._neighbours[source].append(node)
        self._same: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if storage := _find_storage(node):
                self._same[storage].append(node)

    def find_later_reader(self, node: fx.Node) -> str:
        """What may see the write of `node` other than through its result; empty if nothing may."""
        here = self._position[node]
        for alias in self._list_aliases(self._written[node], here):
            if alias.op != "call_function":
                return f"belongs to {alias.target}"
            late = next((u for u in self._users[alias] if self._position[u] > here), None)
            if late is not None:
                return f"{late.name} reads later through {alias.name}"
        return ""

    def _list_aliases(self, start: fx.Node, before: int) -> list[fx.Node]:
        found, queue = {start: None}, [start]
        while queue:
            node = queue.pop()
            near = self._neighbours[node] + self._same.get(_find_storage(node), [])
            new = [n for n in near if n not in found and self._position[n] < before]
            found |= dict.fromkeys(new)
            queue += new
        return list(found)


def _list_aliased(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the result of `node` may share, by the schema of its op."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return _list_aliased(source)
    schema = _find_schema(node)
    if schema is None or not any(r.alias_info for r in schema.returns):
        return []
    shared = [a.name for a in schema.arguments if a.alias_info]
    given = dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | node.kwargs
    nodes: list[fx.Node] = []
    fx.map_arg([given[name] for name in shared if name in given], nodes.append)
    return nodes


def _find_storage(node: fx.Node) -> int:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return 0
    return val.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
