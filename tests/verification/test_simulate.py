"""The lockstep simulator on hand-made graphs: it computes what processes would, right or wrong."""

import operator
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.algebra.placement import CONVERSIONS, Kind
from autotp.algebra.split import Split, block, segment
from autotp.capture.graph_facts import describe_node
from autotp.capture.program import Program
from autotp.errors import VerifyError
from autotp.runtime.ops.library import write_schema
from autotp.verification.simulate import RankGraph, Simulation, simulate, walk_ranks
from autotp.verification.simulate.collectives import JOINT
from tests.hand_made import ATEN, GROUP, OURS, case
from tests.spmd.placed import gradient_kind, is_placed, part, whole

RAW = torch.ops._c10d_functional
SHAPE = (4, 24)
CUTS: dict[str, tuple[int, Split]] = {
    "rows": (0, block(4)),
    "columns": (1, block(24)),
    "inner axis": (1, Split(1, (segment(6, 4, 1),))),
    "segments": (1, Split(1, (segment(1, 4, 3), segment(1, 12, 1)))),
    "uneven": (1, Split(1, (segment(1, 6, 2), segment(1, 12, 1)))),
}
OF_DIMS = [change for change in CONVERSIONS if "G" not in change]
"""Those of grouped rows ask for bounds: tests/spmd/test_rows.py."""
Body = Callable[[fx.Graph, fx.Node], Any]


def graph_of(body: Body) -> fx.Graph:
    """A graph of one input `x` and what `body` makes of it."""
    graph = fx.Graph()
    result = body(graph, graph.placeholder("x"))
    graph.output((result,))
    return graph


def program_of(graph: fx.Graph, **lifted: Tensor) -> Program:
    return Program(
        graph=graph,
        inputs=("x",),
        constants={},
        out_spec=pytree.tree_structure((0,)),
        lifted=lifted,
        tied={},
        data_dims={},
        guards=(),
        dynamic=True,
        reason="",
        training=False,
    )


class Holder(nn.Module):
    """One parameter `w`, a rank's own."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def run(body: Body, own: list[Tensor], x: Tensor | None = None, **options: Any) -> Simulation:
    """A walk of `body` on as many ranks as there are parameters `own`."""
    graphs = [graph_of(body) for _ in own]
    parts = [
        RankGraph(Holder(w), graph, {}, {node: node.name for node in graph.nodes})
        for w, graph in zip(own, graphs, strict=True)
    ]
    inputs = {"x": torch.zeros(()) if x is None else x}
    return walk_ranks(parts, program_of(graphs[0]), inputs, **options)


def weights(found: Simulation) -> list[Tensor]:
    return [own["w"] for own in found.parameters]


def on_parameter(op: Any, *args: Any) -> Body:
    """A body that runs `op` on the rank's parameter."""

    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(op, (graph.get_attr("w"), *args))

    return body


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("change", OF_DIMS, ids=lambda c: CONVERSIONS[c].op)
def test_a_conversion_keeps_the_law_of_placements(
    change: tuple[Kind, Kind], cut: str, world: int
) -> None:
    (source, target), conversion = change, CONVERSIONS[change]
    given = CUTS[cut]
    wanted = CUTS["columns" if cut == "rows" else "rows"] if target == source == "S" else given
    signature = write_schema(conversion)
    args: list[object] = [given[0], given[1].encode()] if "int[] split" in signature else []
    args += [wanted[0], wanted[1].encode()] if "int[] to_split" in signature else []
    own = [part(whole(SHAPE, 1), source, *given, rank, world) for rank in range(world)]
    back = [
        part(whole(SHAPE, 2), gradient_kind(target), *wanted, rank, world) for rank in range(world)
    ]
    found = run(on_parameter(getattr(OURS, conversion.op).default, *args, GROUP), own)
    values = [output[0] for output in found.outputs]
    gradients = torch.autograd.grad(values, weights(found), back)
    counts = Counter(
        f"{phase} {primitive.collective}"
        for phase, primitive in (
            ("forward", conversion.forward),
            ("backward", conversion.backward),
        )
        if primitive.collective
    )

    assert is_placed(whole(SHAPE, 1), values, target, *wanted)
    assert is_placed(whole(SHAPE, 2), gradients, gradient_kind(source), *given)
    assert counts == found.collectives


@pytest.mark.parametrize(
    ("op", "args", "value", "gradient", "kind"),
    [
        (RAW.all_reduce, ("sum", GROUP), [[4.0, 6.0]] * 2, [[3.0, 3.0]] * 2, "all_reduce"),
        (
            RAW.all_gather_into_tensor,
            (2, GROUP),
            [[1.0, 2.0, 3.0, 4.0]] * 2,
            [[3.0, 3.0]] * 2,
            "all_gather",
        ),
        (
            RAW.reduce_scatter_tensor,
            ("sum", 2, GROUP),
            [[4.0], [6.0]],
            [[1.0, 2.0]] * 2,
            "reduce_scatter",
        ),
        (
            RAW.all_to_all_single,
            ([1, 1], [1, 1], GROUP),
            [[1.0, 3.0], [2.0, 4.0]],
            [[1.0, 2.0]] * 2,
            "all_to_all",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_plain_collectives(
    op: Any, args: tuple[Any, ...], value: Any, gradient: Any, kind: str
) -> None:
    """Backward as torch has it: the all-reduce of an all-reduce, which our own ops avoid."""

    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        started = graph.call_function(op.default, (graph.get_attr("w"), *args))
        return graph.call_function(RAW.wait_tensor.default, (started,))

    found = run(body, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    losses = [(rank + 1) * output[0].sum() for rank, output in enumerate(found.outputs)]
    gradients = torch.autograd.grad(losses, weights(found))

    assert value == [output[0].tolist() for output in found.outputs]
    assert gradient == [g.tolist() for g in gradients]
    assert 1 == found.collectives[f"forward {kind}"]


def test_pieces_of_unequal_size_are_exchanged() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        sizes = graph.call_function(ATEN.sym_size.int, (graph.get_attr("w"), 0))
        rest = graph.call_function(operator.sub, (6, sizes))
        args = (graph.get_attr("w"), [sizes, rest], [sizes, rest], GROUP)
        return graph.call_function(RAW.all_to_all_single.default, args)

    with pytest.raises(VerifyError, match="but expect"):
        run(body, [torch.ones(3), torch.ones(2)])


def test_a_local_index_is_counted_from_the_ranks_own_rows() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(OURS.local_index.default, (x, 6, GROUP))

    found = run(body, [torch.zeros(1)] * 2, torch.tensor([0, 2, 3, 5]))
    local, outside = zip(*(output[0] for output in found.outputs), strict=True)

    assert [[0, 2, 2, 2], [0, 0, 0, 2]] == [x.tolist() for x in local]
    assert [[False, False, True, True], [True, True, False, False]] == [x.tolist() for x in outside]


def test_shared_gradients_are_summed_in_one_bucket_a_dtype() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        w = graph.get_attr("w")
        half = graph.call_function(ATEN.mul.Tensor, (w, 0.5))
        shared = graph.call_function(OURS.share_gradients.default, ([w, half], [[], []], GROUP))
        items = [graph.call_function(operator.getitem, (shared, k)) for k in (0, 1)]
        scaled = graph.call_function(ATEN.mul.Tensor, (items[1], 10.0))
        return graph.call_function(ATEN.add.Tensor, (items[0], scaled))

    found = run(body, [torch.ones(2), torch.ones(2)])
    losses = [(rank + 1) * output[0].sum() for rank, output in enumerate(found.outputs)]
    gradients = torch.autograd.grad(losses, weights(found))

    assert [[6.0, 6.0]] * 2 == [output[0].tolist() for output in found.outputs]
    assert [[18.0, 18.0]] * 2 == [g.tolist() for g in gradients]
    assert {"backward all_reduce": 1} == found.collectives


def test_no_bucket_is_sent_where_nothing_needs_it() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        w = graph.get_attr("w")
        graph.call_function(OURS.share_gradients.default, ([w], [[]], GROUP))
        return w

    found = run(body, [torch.ones(2), torch.ones(2)])
    torch.autograd.grad([o[0].sum() for o in found.outputs], weights(found))

    assert {} == found.collectives


def test_every_op_that_asks_for_the_group_is_known() -> None:
    ours = {f"autotp::{conversion.op}" for conversion in CONVERSIONS.values()}

    assert ours | {"autotp::share_gradients", "autotp::local_index", "autotp::local_bounds"} == {
        name for name in JOINT if name.startswith("autotp")
    }


# ── whole graphs ─────────────────────────────────────────────────────────────────────────────────


def test_an_mlp_on_its_shards_equals_the_whole_one() -> None:
    one = case()
    expected = one.whole(**one.inputs)["y"]
    found = simulate(one.models, one.inputs)

    assert all(torch.allclose(expected, output["y"], atol=1e-6) for output in found.outputs)
    assert {"forward all_reduce": 1} == found.collectives


def test_gradients_flow_to_the_models_own_parameters() -> None:
    one = case()
    found = simulate(one.models, one.inputs)
    torch.autograd.backward([output["y"].sum() for output in found.outputs])
    one.whole(**one.inputs)["y"].sum().backward()
    expected, (first, second) = one.whole.up.weight.grad, one.models

    assert expected is not None
    assert torch.allclose(
        expected, torch.cat([m.get_parameter("up.weight").grad for m in (first, second)])
    )
    assert {"forward all_reduce": 1, "backward all_reduce": 1} == found.collectives


def test_a_missing_all_reduce_gives_each_rank_its_part() -> None:
    """Wrong as it is in processes: nobody's value reaches another rank."""

    def erased(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.name == "d_reduce")
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    one = case(erased)
    h = one.whole.inner(one.inputs["x"])
    whole = one.whole(**one.inputs)["y"]
    parts = [output["y"] - h for output in simulate(one.models, one.inputs).outputs]

    assert not torch.allclose(parts[0], parts[1])
    assert torch.allclose(whole - h, parts[0] + parts[1], atol=1e-6)


def test_values_are_observed_once_in_program_order() -> None:
    one, seen = case(), list[str]()
    simulate(one.models, one.inputs, observe=lambda name, found: seen.append(name))

    assert ["x", "inner_w", "h", "h_copy", "up_w", "up_b", "u", "a"] == seen[:8]
    assert len(set(seen)) == len(seen)


def test_a_value_is_gone_after_its_last_reader() -> None:
    one, alive = case(), dict[str, weakref.ref[Tensor]]()
    after: list[str] = []

    def observe(name: str, found: list[Tensor]) -> None:
        if name == "y":
            after.extend(n for n, value in alive.items() if value() is not None)
        if name in ("u", "a", "d"):
            alive[name] = weakref.ref(found[0])

    with torch.no_grad():
        simulate(one.models, one.inputs, observe=observe)

    assert {"u", "a", "d"} == set(alive)
    assert [] == after


def test_layers_run_on_their_own_module() -> None:
    def layer(name: str) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x0")
        graph.output(graph.call_function(ATEN.mul.Tensor, (x, graph.get_attr("w")), None))
        return graph

    class Tree(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [Holder(torch.tensor(2.0 + rank)), Holder(torch.tensor(5.0))]
            )

    def rank_part(rank: int) -> RankGraph:
        root = graph_of(lambda g, x: g.call_module("blocks.1", (g.call_module("blocks.0", (x,)),)))
        layers = {f"blocks.{k}": layer(f"blocks.{k}") for k in (0, 1)}
        origin = {
            node: f"{path}.{node.op}"
            for path, graph in layers.items()
            for node in graph.nodes
            if node.op == "call_function"
        }
        return RankGraph(Tree(rank), root, layers, origin)

    parts, seen = [rank_part(rank) for rank in (0, 1)], dict[str, list[float]]()
    found = walk_ranks(
        parts,
        program_of(parts[0].root),
        {"x": torch.tensor(1.0)},
        observe=lambda name, values: seen.update({name: [v.item() for v in values]}),
    )

    assert [10.0, 15.0] == [output[0].item() for output in found.outputs]
    assert [2.0, 3.0] == seen["blocks.0.call_function"]
    assert [10.0, 15.0] == seen["blocks.1.call_function"]


def test_float64_takes_the_place_of_every_floating_dtype() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        wide = graph.call_function(ATEN.to.dtype, (graph.get_attr("w"), torch.float32))
        ones = graph.call_function(ATEN.ones.default, ([2],))
        total = graph.call_function(ATEN.add.Tensor, (wide, ones))
        given = graph.call_function(ATEN.add.Tensor, (total, x))
        return graph.call_function(ATEN.add.Tensor, (given, graph.get_attr("constant")))

    graph = graph_of(body)
    part = RankGraph(Holder(torch.ones(2).bfloat16()), graph, {}, {}, {"constant": torch.ones(2)})
    found = walk_ranks([part], program_of(graph), {"x": torch.ones(2)}, dtype=torch.float64)

    assert torch.float64 == found.outputs[0][0].dtype == found.parameters[0]["w"].dtype
    assert torch.bfloat16 == part.module.get_parameter("w").dtype


def test_random_ops_draw_the_same_on_every_rank_and_go_on() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        first = graph.call_function(ATEN.rand_like.default, (x,))
        second = graph.call_function(ATEN.rand_like.default, (x,))
        return graph.call_function(ATEN.stack.default, ([first, second],))

    with torch.random.fork_rng():
        found = run(body, [torch.ones(1)] * 2, torch.ones(3))
    values = [output[0] for output in found.outputs]

    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0][0], values[0][1])


def test_a_rank_cannot_change_what_another_reads() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(ATEN.add_.Tensor, (x, graph.get_attr("w")))

    given = torch.zeros(1)
    with torch.no_grad():
        found = run(body, [torch.tensor([1.0]), torch.tensor([2.0])], given)

    assert [1.0, 2.0] == [output[0].item() for output in found.outputs]
    assert 0.0 == float(given)


# ── what would hang or crash in processes ────────────────────────────────────────────────────────


def test_different_shapes_in_one_collective() -> None:
    body = on_parameter(OURS.reduce.default, GROUP)

    with pytest.raises(
        VerifyError, match=r"reduce.*2 ranks pass different tensors.*\(2,\).*\(3,\)"
    ):
        run(body, [torch.ones(2), torch.ones(3)])


def test_an_op_of_unknown_meaning() -> None:
    body = on_parameter(RAW.all_gather_into_tensor_coalesced.default, 2, GROUP)

    with pytest.raises(VerifyError, match="knows no joint op .* for 2 ranks"):
        run(body, [torch.ones(2), torch.ones(2)])


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        (RAW.all_reduce, ("max", GROUP), "reduces by 'max'"),
        (RAW.all_gather_into_tensor, (3, GROUP), "a collective for 3 ranks is run by 2"),
    ],
)
def test_a_collective_that_has_no_placement(op: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        run(on_parameter(op.default, *args), [torch.ones(2), torch.ones(2)])


def test_ranks_that_cut_differently() -> None:
    def body(dim: int) -> Body:
        return on_parameter(OURS.gather.default, dim, block(4).encode(), GROUP)

    graphs = [graph_of(body(dim)) for dim in (0, 1)]
    parts = [RankGraph(Holder(torch.ones(2, 2)), graph, {}, {}) for graph in graphs]

    with pytest.raises(
        VerifyError, match="ranks 0 and 1 of 2 pass different arguments to one collective"
    ):
        walk_ranks(parts, program_of(graphs[0]), {"x": torch.ones(1)})


def test_ranks_that_run_different_ops() -> None:
    graphs = [graph_of(on_parameter(op.default)) for op in (ATEN.relu, ATEN.neg)]
    parts = [RankGraph(Holder(torch.ones(2)), graph, {}, {}) for graph in graphs]

    with pytest.raises(VerifyError, match=r"aten.relu.*2 ranks run different ops here"):
        walk_ranks(parts, program_of(graphs[0]), {"x": torch.ones(1)})


def test_ranks_of_unequal_length() -> None:
    first, second = (graph_of(on_parameter(ATEN.relu.default)) for _ in range(2))
    second.call_function(ATEN.relu.default, (next(iter(second.nodes)),))
    parts = [RankGraph(Holder(torch.ones(2)), graph, {}, {}) for graph in (first, second)]

    with pytest.raises(VerifyError, match=r"root: the ranks' graphs have \[4, 5\] nodes"):
        walk_ranks(parts, program_of(first), {"x": torch.ones(1)})


def test_a_node_that_cannot_run_is_named_with_its_source() -> None:
    def body(graph: fx.Graph, x: fx.Node) -> fx.Node:
        node = graph.call_function(ATEN.mm.default, (x, x))
        node.meta = {
            "nn_module_stack": {"": ("", "Model"), "mlp": ("layers.0.mlp", "MLP")},
            "stack_trace": '  File "/a/mine.py", line 7, in forward\n    return x @ x\n',
        }
        return node

    with pytest.raises(
        VerifyError, match=r"mm_default = aten.mm at layers.0.mlp \(mine.py:7: `return x @ x`"
    ):
        run(body, [torch.ones(1)], torch.ones(2, 3))


def test_the_models_own_line_is_named_rather_than_the_librarys() -> None:
    graph = graph_of(on_parameter(ATEN.relu.default))
    node = next(node for node in graph.nodes if node.op == "call_function")
    library = torch.nn.functional.__file__
    node.meta["stack_trace"] = (
        '  File "/a/mine.py", line 7, in forward\n    return self.act(x)\n'
        f'  File "{library}", line 1, in forward\n    return F.relu(x)\n'
    )

    assert "relu_default = aten.relu (mine.py:7: `return self.act(x)`)" == describe_node(node)
    assert "relu_3 (relu_default) = aten.relu" in describe_node(node, "relu_3")
