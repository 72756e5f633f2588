"""The postcondition of capture: a sound program has no fault, and each planted one is named."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.capture.capture import capture
from autotp.capture.postconditions import find_program_faults
from autotp.capture.program import Carried, Guard, Program

aten = torch.ops.aten


class Scaled(nn.Module):
    """A parameter, a buffer and a constant that the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.register_buffer("scale", torch.full([8], 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)) * self.scale + torch.tensor([3.0])


MODEL = Scaled()


@pytest.fixture(scope="module")
def sound() -> Program:
    return capture(MODEL, {"x": torch.randn(2, 5, 6)})


def copied(program: Program) -> Program:
    """The same program, whose graph may be changed."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(program.graph, copies)
    graph.output(outputs)
    return replace(program, graph=graph)


def tensors() -> dict[str, Tensor]:
    return dict(MODEL.named_parameters()) | dict(MODEL.named_buffers())


def node_of(program: Program, target: object) -> fx.Node:
    return next(n for n in program.graph.nodes if n.target == target)


def read_nothing(program: Program) -> Program:
    relu = node_of(program, aten.relu.default)
    with program.graph.inserting_after(relu):
        dead = program.graph.call_function(aten.neg.default, (relu,))
    dead.meta = dict(relu.meta)
    return program


def write_in_place(program: Program) -> Program:
    node_of(program, aten.relu.default).target = aten.relu_.default
    return program


def drop_meta(program: Program) -> Program:
    del node_of(program, aten.relu.default).meta["val"]
    return program


def rename_input(program: Program) -> Program:
    node_of(program, "x").target = "y"
    return program


def read_elsewhere(program: Program) -> Program:
    node_of(program, "up.weight").target = "down.weight"
    return program


def read_transposed(program: Program) -> Program:
    meta = node_of(program, "up.weight").meta
    meta["val"] = meta["val"].t()
    return program


def read_twice(program: Program) -> Program:
    scale = node_of(program, "scale")
    with program.graph.inserting_after(scale):
        again = program.graph.get_attr("scale")
    again.meta = dict(scale.meta)
    node_of(program, aten.mul.Tensor).replace_input_with(scale, again)
    return program


def call_a_module(program: Program) -> Program:
    relu = node_of(program, aten.relu.default)
    relu.op, relu.target = "call_module", "up"
    return program


def fix_the_input(program: Program) -> Program:
    node_of(program, "x").meta["val"] = torch.empty(2, 5, 6)
    return program


def name_twice(program: Program) -> Program:
    node_of(program, aten.relu.default).name = node_of(program, aten.mul.Tensor).name
    return program


def return_a_tensor(program: Program) -> Program:
    output = program.graph.output_node()
    output.args = (output.args[0][0],)  # type: ignore[index]
    return program


PLANTED: list[tuple[Callable[[Program], Program], str]] = [
    (read_nothing, r"aten.neg .*: nothing reads it"),
    (write_in_place, r"aten.relu_ \(test_postconditions.py:\d+: `return torch.relu.*writes"),
    (drop_meta, r'has no meta\["val"\]'),
    (rename_input, r"the graph takes \['y'\], but the program's inputs are \['x'\]"),
    (read_elsewhere, r"down.weight is neither a parameter, a buffer nor a lifted constant"),
    (read_transposed, r"up.weight is \(8, 6\) of .* in the model, but \(6, 8\) of .* in the graph"),
    (read_twice, r"scale is read by two get_attr nodes"),
    (call_a_module, r"a node of kind call_module"),
    (fix_the_input, r"its size s\d+ has s\d+, unlike any input"),
    (name_twice, r"the graph is malformed: .*mul"),
    (return_a_tensor, r"the graph returns add, not a flat tuple"),
    (lambda p: replace(p, lifted={}), r"_const_\w+ is neither"),
    (lambda p: replace(p, tied={"up.bias": "scale"}), r"up.bias is tied to scale"),
    (lambda p: replace(p, data_dims={"x": (0, 3)}), r"input x has 3 dims, but its data dims are"),
    (lambda p: replace(p, data_dims={"z": (0,)}), r"data dims \(0,\) are given for z"),
    (
        lambda p: replace(p, out_spec=pytree.tree_structure((1, 2))),
        r"returns 1 values, but the model's output has 2 leaves",
    ),
    (
        lambda p: replace(p, carried={3: Carried("layers.0.keys", "")}),
        r"layers.0.keys of the cache is output 3 of 1",
    ),
    (
        lambda p: replace(p, carried={0: Carried("layers.0.keys", "cache.0")}),
        r"layers.0.keys of the cache replaces cache.0, which is not an input",
    ),
    (lambda p: replace(p, guards=(Guard("L['z'].dim() == 2"),)), r"refers to z, not to an input"),
    (lambda p: replace(p, guards=(Guard("s0 <= max(2, 3)"),)), r"refers to s0, not to an input"),
    (lambda p: replace(p, guards=(Guard("1 =="),)), r"is not an expression"),
]


def test_a_sound_program_has_no_fault(sound: Program) -> None:
    assert [] == list(find_program_faults(copied(sound), tensors()))


@pytest.mark.parametrize(("plant", "reason"), PLANTED, ids=[reason for _, reason in PLANTED])
def test_a_planted_fault_is_named(
    sound: Program, plant: Callable[[Program], Program], reason: str
) -> None:
    found = list(find_program_faults(plant(copied(sound)), tensors()))

    assert any(re.search(reason, fault) for fault in found), found
