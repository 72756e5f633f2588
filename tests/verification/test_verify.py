"""The proof on a hand-made MLP: right as it is, and every planted fault found and named."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import autotp
from autotp.algebra.split import Split, block
from autotp.api import verify
from autotp.errors import VerifyError
from autotp.records.evidence import Evidence
from autotp.records.plan import ParameterRecord
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel
from autotp.runtime.ops.blocks import slice_block
from autotp.verification import compare_ranks
from autotp.verification.agreement import Difference, find_disagreement, measure_difference
from autotp.verification.bisection import ComparisonCase as Search
from autotp.verification.bisection import find_first_divergence
from autotp.verification.measure import compute_loss, name_tensors
from tests.hand_made import ATEN, OURS, TP, Case, Edit, HandMade, Shards, case
from tests.models import build
from tests.proven import Captured
from tests.toys import MLP, batch


def proved(one: Case, *, gradients: bool = True, dtype: torch.dtype = torch.float32) -> Evidence:
    return compare_ranks(
        one.whole,
        one.models,
        one.inputs,
        one.plan,
        one.trace,
        program=one.program,
        gradients=gradients,
        seed=0,
        dtype=dtype,
    )


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def graph_of(model: ShardedModel) -> fx.Graph:
    return next(iter(model.variants.values())).outlined.root


def erased(name: str) -> Edit:
    """Takes a conversion out: its readers read what it read."""

    def edit(graph: fx.Graph) -> None:
        node = node_of(graph, name)
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)

    return edit


def idle(name: str) -> Edit:
    """Makes a conversion the identity, forward and backward."""

    def edit(graph: fx.Graph) -> None:
        node = node_of(graph, name)
        node.target, node.args = ATEN.alias.default, (node.args[0],)

    return edit


def retargeted(name: str, target: object) -> Edit:
    def edit(graph: fx.Graph) -> None:
        node_of(graph, name).target = target  # type: ignore[assignment]

    return edit


def doubled(graph: fx.Graph) -> None:
    """Adds the down bias on every rank once more, after the sum."""
    node = node_of(graph, "d_reduce")
    with graph.inserting_after(node):
        new = graph.call_function(ATEN.add.Tensor, (node, node_of(graph, "down_b")))
    node_of(graph, "y").replace_input_with(node, new)


def another_rank(record: ParameterRecord, whole: Tensor, rank: int) -> Tensor | None:
    """Gives each rank the slice of up.weight that belongs to the next."""
    if record.name != "up.weight":
        return None
    return slice_block(whole, 0, Split.decode(record.split), (rank + 1) % TP, TP).clone()


def swapped_layouts(record: ParameterRecord, whole: Tensor, rank: int) -> Tensor | None:
    """Cuts up along its input and down along its output."""
    if not record.name.endswith("weight") or record.dim is None:
        return None
    return whole.chunk(TP, 1 - record.dim)[rank].clone()


def test_a_right_model_is_proved() -> None:
    found = proved(case())

    assert found.ok
    assert found.first_divergence is None
    assert 0 < found.max_rel_error < 1e-6
    assert {"forward all_reduce": 1, "backward all_reduce": 1} == found.collectives_seen
    assert found.collectives_predicted == found.collectives_seen
    assert (TP, "float32") == (found.tp, found.dtype)


def test_every_parameter_has_a_figure_even_one_without_gradient() -> None:
    found = proved(case()).gradients

    assert {name for name, _ in HandMade().named_parameters()} == set(found)
    assert found["unused"] == 0
    assert max(found.values()) < 1e-6


def test_without_gradients_only_the_forward_pass_is_predicted() -> None:
    found = proved(case(), gradients=False)

    assert found.ok
    assert {} == found.gradients
    assert {"forward all_reduce": 1} == found.collectives_predicted == found.collectives_seen


def test_nothing_is_changed() -> None:
    one = case()
    before = torch.get_rng_state()
    proved(one)

    assert torch.equal(before, torch.get_rng_state())
    assert torch.float32 == torch.get_default_dtype()
    assert all(p.grad is None for m in (one.whole, *one.models) for p in m.parameters())


def test_another_dtype_than_the_models_is_computed_in() -> None:
    found = proved(case(), dtype=torch.float64)

    assert found.ok
    assert "float64" == found.dtype
    assert found.max_rel_error < 1e-15
    assert max(found.gradients.values()) < 1e-14


def test_in_a_narrow_dtype_every_figure_is_decided_in_float64() -> None:
    one = case()
    found = proved(one, dtype=torch.bfloat16)
    wrong = proved(case(idle("h_copy")), dtype=torch.bfloat16)

    assert found.ok
    assert "bfloat16" == found.dtype
    assert found.max_rel_error < 1e-15
    assert "decided in float64" in found.notes[0]
    assert wrong.first_divergence is not None
    assert wrong.first_divergence.startswith("h_copy = aten.alias")


@pytest.mark.parametrize(
    ("edit", "node", "meaning"),
    [
        (erased("d_reduce"), "y = aten.add", "not in the graph: d_reduce R"),
        (idle("d_reduce"), "d_reduce = aten.alias", "Their sum is right: a forward all-reduce"),
        (erased("h_copy"), "u = aten.linear", "not in the graph: h_copy R~"),
        (idle("h_copy"), "h_copy = aten.alias", "Their sum is right: a backward all-reduce"),
        (erased("down_b_keep_first"), "d = aten.linear", "not in the graph: down_b_keep_first P"),
        (idle("down_b_keep_first"), "down_b_keep_first = aten.alias", "summed, it counts 2 times"),
        (doubled, "y = aten.add", "All ranks agree on it"),
        (
            retargeted("h_copy", OURS.first_gradient.default),
            "h_copy = autotp.first_gradient",
            "the one that it passes to h (R) is not",
        ),
        (
            retargeted("d_reduce", OURS.reduce_copy.default),
            "d_reduce = autotp.reduce_copy",
            "d (P)",
        ),
        (retargeted("a", ATEN.neg.default), "a = aten.neg", "should be S(2, ffn)"),
    ],
)
def test_a_fault_in_the_graph_is_named(edit: Edit, node: str, meaning: str) -> None:
    found = proved(case(edit))

    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.startswith(node)
    assert meaning in found.first_divergence


@pytest.mark.parametrize(
    ("shards", "meaning"),
    [(another_rank, "a slice or a layout is wrong"), (swapped_layouts, "do not fit")],
)
def test_a_wrong_part_of_a_parameter_is_named(shards: Shards, meaning: str) -> None:
    found = proved(case(shards=shards))

    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.startswith("up_w = up.weight: its value should be S(0, ffn)")
    assert meaning in found.first_divergence


def test_a_fault_of_the_backward_pass_alone_leaves_the_outputs_right() -> None:
    found = proved(case(idle("h_copy")))

    assert found.max_rel_error < 1e-6
    assert found.gradients["inner.weight"] > 0.01
    assert {"forward all_reduce": 1} == found.collectives_seen
    assert any("predicted: {" in note for note in found.notes)


def test_right_figures_with_other_collectives_than_predicted_are_not_ok() -> None:
    one = case()
    found = proved(replace(one, plan=replace(one.plan, collectives=())))

    assert not found.ok
    assert found.first_divergence is None
    assert {} == found.collectives_predicted


def test_a_fault_too_small_for_float32_is_found_in_float64() -> None:
    """Four millionths of the largest value: below the tolerance of float32, yet a fault."""

    def edit(graph: fx.Graph) -> None:
        node = node_of(graph, "a")
        with graph.inserting_after(node):
            new = graph.call_function(ATEN.mul.Tensor, (node, 1 + 8e-6))
        node_of(graph, "d").replace_input_with(node, new)

    found = proved(case(edit))

    assert 1e-6 < found.max_rel_error < found.tolerance
    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.startswith("d = aten.linear")


class Exploding(torch.nn.Module):
    """Eight steps, each of which multiplies a difference by up to 60: any rounding shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = (64, 64)
        self.up = torch.nn.ParameterList(torch.randn(shape) for _ in range(8))
        self.down = torch.nn.ParameterList(torch.randn(shape) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.sin(torch.nn.functional.linear(torch.tanh(x @ up), down))
        return x


def exploding() -> tuple[torch.nn.Module, dict[str, Tensor]]:
    return Exploding(), {"x": torch.randn(2, 64)}


def test_what_shrinks_with_the_roundings_is_rounding() -> None:
    model, inputs = exploding()
    found = verify(model, 2, gradients=True, example_inputs=inputs)

    assert found.ok
    assert max(found.gradients.values()) > 1e-9  # in float64, so float32 shows nothing at all
    assert "decided in float64" in found.notes[0]


@pytest.mark.slow
def test_among_exploding_gradients_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three roundings of float32, on one rank, in one weight."""
    model, inputs = exploding()
    captured = Captured(model, inputs)
    built = captured.work.build

    def faulty(made: Any, group: Group) -> ShardedModel:
        rank = built(made, group)
        if group.rank == 1:
            with torch.no_grad():
                next(p for name, p in rank.named_parameters() if "up" in name).mul_(1 + 3.6e-7)
        return rank

    monkeypatch.setattr(captured.work, "build", faulty)
    found = captured.proof(2).evidence

    assert not found.ok
    assert found.first_divergence is not None


def test_where_float64_cannot_be_had_float32_decides_and_says_so() -> None:
    def narrowed(x: Tensor) -> Tensor:
        return x.float().relu()

    one = case(idle("d_reduce"))
    for graph in (one.program.graph, *map(graph_of, one.models)):
        node_of(graph, "a").target = narrowed
    found = proved(one)

    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.startswith("d_reduce")
    assert any("float64 could not decide" in note for note in found.notes)


def test_dropout_is_drawn_alike_where_values_are_whole() -> None:
    def dropping(graph: fx.Graph, name: str) -> None:
        node = node_of(graph, name)
        with graph.inserting_after(node):
            new = graph.call_function(ATEN.dropout.default, (node, 0.5, True))
        node_of(graph, "y").replace_input_with(node, new)

    one = case(lambda graph: dropping(graph, "d_reduce"))
    dropping(one.program.graph, "d")
    search = Search(one.whole, one.models, one.program, one.inputs, one.trace, 0, None, 1e-5, 1e-2)

    assert find_first_divergence(search, gradients=True) is None


def test_nan_is_wrong_even_where_all_agree() -> None:
    one = case()
    with torch.no_grad():
        for model in (one.whole, *one.models):
            model.get_parameter("inner.weight")[0, 0] = math.nan
    found = proved(one)

    assert not found.ok
    assert math.inf == found.max_rel_error


def test_a_program_that_is_not_the_model_is_not_excused_by_float64() -> None:
    def edit(graph: fx.Graph) -> None:
        node = node_of(graph, "y")
        node.kwargs = {"alpha": 0.5}

    one = case(edit)
    edit(one.program.graph)
    found = proved(one)

    assert not found.ok
    assert any("the captured program differs from the model" in note for note in found.notes)


def test_a_right_model_has_no_wrong_node() -> None:
    one = case()
    search = Search(
        one.whole, one.models, one.program, one.inputs, one.trace, 0, torch.float64, 1e-9, 1e-5
    )

    assert find_first_divergence(search, gradients=True) is None


def test_a_gradient_that_is_zero_but_for_rounding_is_decided_in_float64() -> None:
    """A bias of keys shifts all scores of a query alike, so the softmax undoes it."""
    model, inputs = build("hand", layers=1)
    found = verify(model, 2, gradients=True, example_inputs=inputs)

    assert found.ok
    assert found.gradients["blocks.0.attention.key.bias"] < 1e-9
    note = next(n for n in found.notes if "gradient of blocks.0.attention.key.bias" in n)
    assert "with a tolerance of 1e-09" in note


@pytest.mark.slow
def test_a_model_of_transformers_is_proved_with_its_own_loss() -> None:
    model, inputs = build("gpt2", n_layer=1)
    inputs["labels"] = inputs["input_ids"]
    found = verify(model, 2, gradients=True, example_inputs=inputs)

    assert found.ok
    assert max(found.gradients.values()) < 1e-5
    assert found.collectives_predicted == found.collectives_seen


# ── the parts ────────────────────────────────────────────────────────────────────────────────────


def test_a_difference_is_relative_to_the_largest_value_of_the_whole() -> None:
    found = measure_difference(torch.tensor([4.0, -8.0]), torch.tensor([5.0, -8.0]))

    assert (1.0, 1 / 8, 4.0, 5.0) == (found.absolute, found.relative, found.expected, found.actual)


@pytest.mark.parametrize(
    ("whole", "found", "expected"),
    [
        ([0.0], [0.0], 0.0),
        ([0.0], [1.0], math.inf),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0], [math.nan], math.inf),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_zeros_infinities_and_nan(whole: list[float], found: list[float], expected: float) -> None:
    assert expected == measure_difference(torch.tensor(whole), torch.tensor(found)).relative


def test_another_dtype_is_a_difference() -> None:
    assert math.inf == measure_difference(torch.ones(1), torch.ones(1).double()).relative


def test_a_floor_keeps_rounding_of_zero_from_counting() -> None:
    found = measure_difference(torch.tensor([1e-18]), torch.tensor([3e-18]), floor=1e-6)

    assert found.relative < 1e-11


@pytest.mark.parametrize(
    ("parts", "claim", "right"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], "each", True),
        ([[1.0, 2.0], [1.0, 1.0]], "each", False),
        ([[0.5, 3.0], [0.5, -1.0]], "sum", True),
        ([[1.0, 2.0], [1.0, 2.0]], "sum", False),
        ([[1.0], [2.0]], "concatenation", True),
        ([[2.0], [1.0]], "concatenation", False),
        ([[1.0, 2.0], [2.0]], "concatenation", False),
    ],
)
def test_what_each_claim_says(parts: list[list[float]], claim: Any, right: bool) -> None:
    found = find_disagreement(
        torch.tensor([1.0, 2.0]), [torch.tensor(p) for p in parts], claim, 0, block(2).encode()
    )

    assert right == (found.relative == 0)


def test_both_figures_are_told() -> None:
    found = find_disagreement(
        torch.tensor([4.0]), [torch.tensor([4.0]), torch.tensor([3.0])], "each"
    )

    text = "rank 1 has 3 where the unsharded model has 4 (2.5e-01 of the largest value)"
    assert text == str(found)


def test_a_reason_stands_for_figures() -> None:
    assert "no such tensor" == str(Difference(math.inf, math.inf, reason="no such tensor"))


def test_outputs_are_named_by_where_they_stand() -> None:
    x = torch.ones(1)
    output: Mapping[str, Any] = {"logits": x, "states": (x, [x]), "cache": None, "count": 3}

    assert ["logits", "states.0", "states.1.0"] == list(name_tensors(output))
    assert ["output"] == list(name_tensors(x))


def test_the_projection_is_the_same_in_both_precisions() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    single, double = compute_loss({"y": x}, 5), compute_loss({"y": x.double()}, 5)

    assert torch.allclose(single.double(), double, rtol=1e-5)
    assert not torch.allclose(double, compute_loss({"y": x.double()}, 6))


def test_outputs_without_gradients_are_refused() -> None:
    with pytest.raises(VerifyError, match="none of its 1 tensors"):
        compute_loss({"y": torch.ones(2)}, 0)


class Moody(MLP):
    """Computes otherwise when it is captured than when it is called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.body(x) * (2 if self.calls > 1 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wrong_capture_is_told_whatever_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    Moody.calls = 0
    evidence = autotp.verify(
        Moody(24, 48).to(dtype).eval(), 2, example_inputs={"x": batch().to(dtype)}
    )

    assert not evidence.ok
    assert autotp.verify(MLP(24, 48).to(dtype), 2, example_inputs={"x": batch().to(dtype)}).ok
