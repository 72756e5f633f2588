"""A two-layer MLP captured, sharded and rewritten by hand, for tests to plant faults in.

    x → inner → h ─→ copy → up (column) → relu → down (row) → reduce → + h → y

Nothing here comes from the passes, so that a test of the simulator or the proof fails by its own
fault.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.algebra.placement import PARTIAL, REPLICATED, SHARED, Placement, split
from autotp.algebra.split import Split, block
from autotp.capture.program import Program
from autotp.records.plan import ParameterRecord, Plan
from autotp.records.trace import Trace, TracedValue
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel, add_variant
from autotp.runtime.module_tree import build_tree
from autotp.runtime.ops.blocks import slice_block
from tests.plans import collective, decoder_plan, parameter

ATEN, OURS = torch.ops.aten, torch.ops.autotp
HIDDEN, FFN, TP = 8, 16, 2
GROUP = "tp"

Edit = Callable[[fx.Graph], None]
Shards = Callable[[ParameterRecord, Tensor, int], Tensor | None]
"""The tensor of a rank for a parameter, given its record and whole tensor; None: the right one."""


class HandMade(nn.Module):
    """`h + down(relu(up(h)))` of `h = inner(x)`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.inner(x)
        return {"y": h + self.down(self.up(h).relu())}


@dataclass(frozen=True, slots=True)
class Case:
    """The whole model, its ranks, and all that the proof asks for."""

    whole: HandMade
    models: list[ShardedModel]
    inputs: dict[str, Tensor]
    plan: Plan
    trace: Trace
    program: Program


@dataclass(frozen=True, slots=True)
class Flat:
    """A graph without layers."""

    root: fx.Graph
    layers: Mapping[str, fx.Graph]
    origin: Mapping[fx.Node, str]
    shorter: tuple[()] = ()


def whole_graph() -> fx.Graph:
    """What capture would give."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    inner = graph.create_node("get_attr", "inner.weight", name="inner_w")
    h = graph.create_node("call_function", ATEN.linear.default, (x, inner), name="h")
    up = [graph.create_node("get_attr", f"up.{n}", name=f"up_{n[0]}") for n in ("weight", "bias")]
    u = graph.create_node("call_function", ATEN.linear.default, (h, *up), name="u")
    a = graph.create_node("call_function", ATEN.relu.default, (u,), name="a")
    names = ("weight", "bias")
    down = [graph.create_node("get_attr", f"down.{n}", name=f"down_{n[0]}") for n in names]
    d = graph.create_node("call_function", ATEN.linear.default, (a, *down), name="d")
    graph.output((graph.create_node("call_function", ATEN.add.Tensor, (h, d), name="y"),))
    return graph


def rank_graph() -> fx.Graph:
    """What rewrite would give."""
    graph = whole_graph()
    node = {n.name: n for n in graph.nodes}
    for value, op in (("h", OURS.copy), ("down_b", OURS.keep_first), ("d", OURS.reduce)):
        with graph.inserting_after(node[value]):
            new = graph.create_node(
                "call_function", op.default, (node[value], GROUP), name=f"{value}_{op.__name__}"
            )
        readers = {"h": [node["u"]], "down_b": [node["d"]], "d": [node["y"]]}[value]
        for reader in readers:
            reader.replace_input_with(node[value], new)
    return graph


def trace() -> Trace:
    """How each value of `rank_graph` lies."""
    columns, rows = (split(d, "ffn") for d in (2, 1))
    first = split(0, "ffn")
    placements: dict[str, tuple[str, Placement]] = {
        "inner_w": ("inner_w", REPLICATED),
        "h": ("h", REPLICATED),
        "h_copy": ("h", SHARED),
        "up_w": ("up_w", first),
        "up_b": ("up_b", first),
        "u": ("u", columns),
        "a": ("a", columns),
        "down_w": ("down_w", rows),
        "down_b": ("down_b", REPLICATED),
        "down_b_keep_first": ("down_b", PARTIAL),
        "d": ("d", PARTIAL),
        "d_reduce": ("d", REPLICATED),
        "y": ("y", REPLICATED),
    }
    cut = block(FFN).encode()
    return Trace(
        {
            name: TracedValue(origin, 0, p, cut if p.kind == "S" else None)
            for name, (origin, p) in placements.items()
        }
    )


def plan() -> Plan:
    """The plan that `rank_graph` follows."""
    records = [
        parameter("inner.weight", (HIDDEN, HIDDEN), TP, "replicated"),
        parameter("up.weight", (FFN, HIDDEN), TP, "column", 0, "ffn", FFN),
        parameter("up.bias", (FFN,), TP, "column", 0, "ffn", FFN),
        parameter("down.weight", (HIDDEN, FFN), TP, "row", 1, "ffn", FFN),
        parameter("down.bias", (HIDDEN,), TP, "replicated"),
        parameter("unused", (3,), TP, "replicated"),
    ]
    moved = (collective("all_reduce", phase, "", 1, TP) for phase in ("forward", "backward"))
    return replace(
        decoder_plan(1, TP),
        parameters={record.name: record for record in records},
        pairs=(),
        collectives=tuple(moved),
    )


def case(
    edit: Edit = lambda graph: None,
    shards: Shards = lambda record, whole, rank: None,
) -> Case:
    """The MLP with its ranks.

    `edit` plants a fault in each rank's graph, `shards` in what a rank holds of a parameter.
    """
    whole, drawn = HandMade().eval(), plan()
    inputs = {"x": torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))}
    program = _program()
    models = [_rank(whole, drawn, program, rank, edit, shards) for rank in range(TP)]
    return Case(whole, models, inputs, drawn, trace(), program)


def _rank(
    whole: HandMade,
    drawn: Plan,
    program: Program,
    rank: int,
    edit: Edit,
    shards: Shards,
) -> ShardedModel:
    tensors: dict[str, Tensor] = {}
    for name, record in drawn.parameters.items():
        tensor = whole.get_parameter(name).detach()
        planted = shards(record, tensor, rank)
        tensors[name] = _shard(record, tensor, rank) if planted is None else planted
    graph = rank_graph()
    edit(graph)
    model = build_tree(
        whole,
        tensors,
        plan=drawn,
        group=Group("tp", TP, rank, torch.device("cpu")),
        device=torch.device("cpu"),
        source=whole,
        capture_variant=capture_nothing,
    ).eval()
    flat = Flat(graph, {}, {node: node.name for node in graph.nodes})
    add_variant(model, model.key(x=torch.empty(0)), program, flat, drawn)
    return model


def _shard(record: ParameterRecord, whole: Tensor, rank: int) -> Tensor:
    if record.dim is None:
        return whole.clone()
    return slice_block(whole, record.dim, Split.decode(record.split), rank, TP).clone()


def _program() -> Program:
    return Program(
        graph=whole_graph(),
        inputs=("x",),
        constants={},
        out_spec=pytree.tree_structure({"y": 0}),
        lifted={},
        tied={},
        data_dims={"x": (0, 1)},
        guards=(),
        dynamic=True,
        reason="",
        training=False,
    )


def capture_nothing(sharded: ShardedModel, inputs: Mapping[str, Any]) -> None:
    """What is asked for no further graph."""
    raise AssertionError(f"no further graph is to be made, for {list(inputs)}")
