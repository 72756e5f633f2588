import operator
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import autotp.runtime.ops.library  # noqa: F401  registers torch.ops.autotp
from autotp.capture.capture import capture
from autotp.capture.program import Program
from autotp.lower.outline import outline
from autotp.runtime.layered_graph import LayeredGraph
from tests import models

ATEN = torch.ops.aten
BATCH, WIDTH = 3, 4


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(3))


class Flat:
    """Writes a flat graph by hand: `at` is the module path a node is given, None for no stack."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        batch = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.mode.from_tensor(
            torch.empty(BATCH, WIDTH), symbolic_context=batch
        )

    def weight(self, layer: int) -> fx.Node:
        node = self.graph.get_attr(f"layers.{layer}.weight")
        node.meta["val"] = self.mode.from_tensor(torch.empty(WIDTH))
        return node

    def add(self, at: str | None, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        vals = fx.node.map_arg(args, lambda n: n.meta["val"])
        if "autotp" in str(target):  # keeps shapes; needs a group to run
            node.meta["val"] = vals[0]
        else:
            with self.mode:
                node.meta["val"] = target(*vals)
        if at is not None:
            node.meta["nn_module_stack"] = {p: (p, "Module") for p in ("layers", at)}
        return node

    def done(self, *results: fx.Node) -> LayeredGraph:
        self.graph.output(results)
        self.graph.lint()
        return outline(self.graph)


class Runner(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph, layers: Mapping[str, fx.Graph]) -> None:
        super().__init__(module, graph=graph)
        self.layers = layers

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.module.get_submodule(target)
        return Runner(module, self.layers[target], {}).run(*args, **kwargs)


def run(outlined: LayeredGraph, model: nn.Module, *inputs: torch.Tensor) -> Any:
    return Runner(model, outlined.root, outlined.layers).run(*inputs)


def ops(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op in ("call_function", "call_module")]


def assert_equal_to_flat(flat: Flat, outlined: LayeredGraph) -> None:
    model, x = Model(), torch.randn(BATCH + 2, WIDTH)
    expected = fx.Interpreter(model, graph=flat.graph).run(x)
    actual = run(outlined, model, x)

    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def hand() -> tuple[nn.Module, dict[str, Any], Program]:
    model, inputs = models.build(models.HAND)
    return model, inputs, capture(model, inputs)


def test_identical_layers_have_identical_code(hand: Any) -> None:
    model, inputs, program = hand
    outlined = outline(program.graph)
    codes = {graph.python_code("self").src for graph in outlined.layers.values()}
    with torch.no_grad():
        expected, (actual,) = model(**inputs), run(outlined, model, inputs["ids"])

    assert ["blocks.0", "blocks.1"] == list(outlined.layers)
    assert 1 == len(codes)
    assert torch.equal(expected, actual)


def test_values_are_called_after_the_module_that_gives_them(hand: Any) -> None:
    layer = outline(hand[2].graph).layers["blocks.1"]

    named = {"norm1", "query", "key", "value", "out", "up", "down"}
    assert named <= {node.name for node in layer.nodes}


def test_only_tensors_enter_a_layer(hand: Any) -> None:
    outlined = outline(hand[2].graph)
    for layer in outlined.layers.values():
        entering = [n.meta["val"].dim() for n in layer.nodes if n.op == "placeholder"]

        assert [3] == entering  # (batch, sequence, hidden)
        assert ATEN.sym_size.int in {n.target for n in layer.nodes}


def test_every_flat_node_with_a_value_is_found_again(hand: Any) -> None:
    graph = hand[2].graph
    found = set(outline(graph).origin.values())
    kept = {n.name for n in graph.nodes if n.users or n.op == "output"}

    assert kept == found | {n.name for n in graph.nodes if n.target is ATEN.sym_size.int}


def test_a_conversion_for_one_layer_moves_into_it() -> None:
    flat = Flat()
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    copy = flat.add(None, torch.ops.autotp.copy.default, first, "tp")
    second = flat.add("layers.1", ATEN.mul.Tensor, copy, flat.weight(1))
    outlined = flat.done(flat.add("layers.1", ATEN.add.Tensor, second, first))

    assert ["mul"] == ops(outlined.layers["layers.0"])
    assert ["copy", "mul", "add"] == ops(outlined.layers["layers.1"])


def test_a_conversion_for_several_layers_stays_where_its_value_is() -> None:
    flat = Flat()
    doubled = flat.add("", ATEN.add.Tensor, flat.x, flat.x)
    copy = flat.add("layers.0", torch.ops.autotp.copy.default, doubled, "tp")
    first = flat.add("layers.0", ATEN.mul.Tensor, copy, flat.weight(0))
    outlined = flat.done(first, flat.add("layers.1", ATEN.mul.Tensor, copy, flat.weight(1)))

    assert ["add", "copy", "layers_0", "layers_1"] == ops(outlined.root)


def test_a_sum_over_the_group_stays_with_what_it_sums() -> None:
    flat = Flat()
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    reduce = flat.add(None, torch.ops.autotp.reduce.default, first, "tp")
    outlined = flat.done(flat.add("layers.1", ATEN.mul.Tensor, reduce, flat.weight(1)))

    assert ["mul", "reduce"] == ops(outlined.layers["layers.0"])
    assert ["mul"] == ops(outlined.layers["layers.1"])


def test_parameters_shared_by_layers_stay_in_the_root() -> None:
    flat = Flat()
    weights = [flat.weight(0), flat.weight(1)]
    shared = flat.add(
        None, torch.ops.autotp.share_gradients.default, weights, [[]] * len(weights), "tp"
    )
    items = [flat.add(None, operator.getitem, shared, k) for k in range(2)]
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, items[0])
    outlined = flat.done(flat.add("layers.1", ATEN.mul.Tensor, first, items[1]))
    attributes = [n.target for n in outlined.root.nodes if n.op == "get_attr"]

    assert ["layers.0.weight", "layers.1.weight"] == attributes
    assert ["share_gradients", "getitem", "getitem_1", "layers_0", "layers_1"] == ops(outlined.root)
    assert [["mul"], ["mul"]] == [ops(layer) for layer in outlined.layers.values()]


def test_a_parameter_of_one_layer_read_by_another_is_passed_to_both() -> None:
    flat = Flat()
    weight = flat.weight(0)
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, weight)
    outlined = flat.done(flat.add("layers.1", ATEN.mul.Tensor, first, weight))

    assert ["layers.0.weight"] == [n.target for n in outlined.root.nodes if n.op == "get_attr"]
    assert_equal_to_flat(flat, outlined)


def test_a_layer_that_is_left_and_entered_again_takes_in_what_is_between() -> None:
    flat = Flat()
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    outside = flat.add("", ATEN.neg.default, first)
    further = flat.add("", ATEN.relu.default, outside)
    outlined = flat.done(flat.add("layers.0", ATEN.add.Tensor, further, first), outside)

    assert ["mul", "neg", "relu", "add"] == ops(outlined.layers["layers.0"])
    assert ["layers_0", "getitem", "getitem_1"] == ops(outlined.root)
    assert_equal_to_flat(flat, outlined)


def test_layers_that_need_each_other_stay_in_the_root() -> None:
    flat = Flat()
    x = flat.x
    for layer in (0, 1, 0, 1, 2):
        x = flat.add(f"layers.{layer}", ATEN.mul.Tensor, x, flat.weight(layer))
    outlined = flat.done(x)

    assert ["layers.2"] == list(outlined.layers)
    assert ["mul", "mul_1", "mul_2", "mul_3", "layers_2"] == ops(outlined.root)
    assert_equal_to_flat(flat, outlined)


def test_two_layers_crossed_without_a_way_through_stay_in_the_root() -> None:
    flat = Flat()
    early = [flat.add(f"layers.{k}", ATEN.mul.Tensor, flat.x, flat.weight(k)) for k in (0, 1)]
    late = [flat.add(f"layers.{k}", ATEN.neg.default, early[1 - k]) for k in (0, 1)]
    outlined = flat.done(*late)

    assert {} == outlined.layers
    assert_equal_to_flat(flat, outlined)


def test_a_layer_with_several_results_gives_a_tuple() -> None:
    flat = Flat()
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    bias = flat.add("layers.0", ATEN.neg.default, first)
    second = flat.add("layers.1", ATEN.add.Tensor, first, bias)
    third = flat.add("layers.2", ATEN.add.Tensor, second, bias)
    outlined = flat.done(third)
    result = next(n for n in outlined.layers["layers.0"].nodes if n.op == "output")

    assert 2 == len(result.args[0])
    assert [1, 2, 2] == [
        sum(n.op == "placeholder" for n in layer.nodes) for layer in outlined.layers.values()
    ]
    assert_equal_to_flat(flat, outlined)


def test_sizes_are_read_where_they_are_used() -> None:
    flat = Flat()
    batch = flat.add(None, ATEN.sym_size.int, flat.x, 0)
    wanted = flat.add(None, operator.mul, batch, WIDTH)
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    second = flat.add("layers.1", ATEN.reshape.default, first, [wanted])
    outlined = flat.done(second)

    assert ["layers_0", "layers_1"] == ops(outlined.root)
    assert ["sym_size", "mul", "reshape"] == ops(outlined.layers["layers.1"])
    assert_equal_to_flat(flat, outlined)


def test_a_size_no_input_has_brings_the_tensor_that_has_it() -> None:
    flat = Flat()
    batch = flat.add(None, ATEN.sym_size.int, flat.x, 0)
    outlined = flat.done(flat.add("layers.0", ATEN.mul.Tensor, flat.weight(0), batch))
    (call,) = (n for n in outlined.root.nodes if n.op == "call_module")

    assert ["x"] == [n.name for n in call.args]
    assert_equal_to_flat(flat, outlined)


def test_placeholders_stand_first_and_nodes_keep_their_origin_and_place() -> None:
    flat = Flat()
    first = flat.add("layers.0", ATEN.mul.Tensor, flat.x, flat.weight(0))
    outlined = flat.done(first)
    (mul,) = (n for n in outlined.layers["layers.0"].nodes if n.op == "call_function")

    assert "placeholder" == next(iter(outlined.root.nodes)).op
    assert first.name == outlined.origin[mul]
    assert first.meta["nn_module_stack"] == mul.meta["nn_module_stack"]
    assert first.meta["val"].shape == mul.meta["val"].shape
