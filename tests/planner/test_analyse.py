"""Analyse: which nodes need a rule, what flows where, how a late view refines an early weight."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autotp.capture.capture import capture
from autotp.errors import RuleError, UnknownOpError
from autotp.oprules.notation import parse_rule
from autotp.oprules.rulebook import Rulebook, load_rulebook
from autotp.planner.analysis import Analysis, Use
from autotp.planner.propagate import propagate
from tests import models
from tests.analysed import Analysed, family

WIDTH, OUT = 12, 18


class Around(nn.Module):
    """One weight, and a function of the input and of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(OUT, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def around(
    function: Callable[[Tensor, Tensor], Tensor],
    rules: Rulebook | None = None,
    *,
    strict: bool = False,
) -> Analysis:
    program = capture(Around(function), {"x": torch.randn(2, 5, WIDTH)})
    return propagate(program, ["weight"], rules or load_rulebook(), strict=strict)


def use_of(analysis: Analysis, op: str) -> Use:
    return next(u for u in analysis.uses.values() if str(u.node.target) == op)


def ops(analysis: Analysis) -> list[str]:
    return [str(node.target).split(".")[1] for node in analysis.uses]


def flowing(analysis: Analysis) -> list[str]:
    """Ops whose result carries a gradient."""
    return [str(n.target).split(".")[1] for n in analysis.uses if (n, 0) in analysis.differentiable]


# ── which nodes need a rule ──────────────────────────────────────────────────────────────────────


def test_what_depends_on_no_parameter_needs_no_rule() -> None:
    found = around(lambda x, w: nn.functional.linear(torch.sinc(x.cumsum(1)), w))

    assert ["linear"] == ops(found)
    assert [] == found.unruled


def test_a_factory_that_takes_a_dtype_from_a_weight_is_no_use_of_it() -> None:
    found = around(lambda x, w: nn.functional.linear(x + w.new_full([WIDTH], 2.0), w))

    assert ["linear"] == ops(found)


def test_each_use_of_a_constant_has_dims_of_its_own() -> None:
    def halves(x: Tensor, w: Tensor) -> Tensor:
        part = x[..., :6]
        return torch.cat([part * w[0, :6], part * w[0, 6:]], -1)

    found = around(halves)
    one, other = (
        u.operands[0] for u in found.uses.values() if str(u.node.target) == "aten.mul.Tensor"
    )

    assert one.value == other.value
    assert found.forest.flatten(one.dims[-1]) != found.forest.flatten(other.dims[-1])


def test_an_op_without_a_row_is_whole_and_listed() -> None:
    found = around(lambda x, w: nn.functional.linear(x, w.unfold(1, WIDTH, 1).squeeze(1)))
    use = use_of(found, "aten.unfold.default")

    assert ["aten.unfold.default"] == [str(n.target) for n in found.unruled]
    assert not use.rule.ruled
    assert {"unshardable"} == {factor.kind for factor in use.rule.factors}


def test_the_rule_of_an_op_without_a_row_is_found_and_kept_apart() -> None:
    found = around(lambda x, w: nn.functional.linear(x, torch.sinc(w)))
    (told,) = found.discovered.values()

    assert [] == found.unruled
    assert ("aten.sinc.default", "a b -> a b") == (told.op, str(told.row))
    assert use_of(found, "aten.sinc.default").rule.ruled


def test_strict_mode_refuses_an_op_without_a_row() -> None:
    with pytest.raises(UnknownOpError, match=r"aten\.sinc\.default"):
        around(lambda x, w: nn.functional.linear(x, torch.sinc(w)), strict=True)


def test_a_row_with_too_few_results_contradicts_its_op() -> None:
    rows = load_rulebook().rows
    wrong = replace(rows["aten.sort.default"], signature=parse_rule("... -> ..."), derive="")
    rules = Rulebook({**rows, "aten.sort.default": wrong}, load_rulebook().roles)
    message = "aten.sort.default: the row has 1 results, but the op returns 2"

    with pytest.raises(RuleError, match=re.escape(message)):
        around(lambda x, w: nn.functional.linear(x, w.sort()[0]), rules)


# ── what flows where ─────────────────────────────────────────────────────────────────────────────


def test_gradients_stop_at_integers_and_detached_values() -> None:
    found = around(lambda x, w: nn.functional.linear(x, w.detach().abs() + w * (w > 0)))

    assert {"detach", "abs", "gt"} == {*ops(found)} - {*flowing(found)}
    assert ["mul", "add", "linear"] == flowing(found)


def test_gradients_flow_through_complex_numbers() -> None:
    def turned(x: Tensor, w: Tensor) -> Tensor:
        pairs = torch.view_as_complex(w.unflatten(-1, (-1, 2)))
        return nn.functional.linear(x, torch.view_as_real(pairs * pairs).flatten(-2))

    assert "view_as_complex" in flowing(around(turned))


def test_weights_are_what_parameters_alone_make() -> None:
    found = around(lambda x, w: (x @ w.T.contiguous()) + 1)
    names = [str(v[0].target) for v in found.weights]

    assert {"weight", "aten.numpy_T.default", "aten.contiguous.default"} >= set(names)
    assert {"aten.matmul.default", "aten.add.Tensor"}.isdisjoint(names)


def test_batch_and_sequence_belong_to_the_data() -> None:
    found = around(lambda x, w: nn.functional.linear(x, w))
    (result,) = use_of(found, "aten.linear.default").rule.results
    marks = [[atom.data for atom in found.forest.flatten(dim)] for dim in result]

    assert [[True], [True], [False]] == marks


# ── refinement ───────────────────────────────────────────────────────────────────────────────────


def test_a_late_view_refines_the_weight_before_it() -> None:
    def headed(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.linear(x, w).unflatten(-1, (6, 3)).softmax(-1)

    found = around(headed)
    dims = found.dims[(found.parameters["weight"], 0)]

    assert "6*3" == found.forest.format(dims[0])
    assert str(WIDTH) == found.forest.format(dims[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_every_op_of_the_models_has_a_rule(name: str) -> None:
    assert [] == [str(node.target) for node in family(name).analysis.unruled]


def shares(found: Analysed, layer: str) -> list[bool]:
    """Whether query, key, value and output of one layer share their key-value heads."""
    names = {p: f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"}
    heads = found.pair(names["q"]).axes[0]
    return [heads in found.leaves(names[p], p == "o") for p in "qkvo"]


@pytest.mark.slow
def test_the_heads_of_a_layer_are_one_axis_and_of_two_layers_two() -> None:
    found = family("llama")
    first, second = (found.pair(f"model.layers.{n}.self_attn.q_proj.weight").axes for n in (0, 1))

    assert [True] * 4 == shares(found, "model.layers.0") == shares(found, "model.layers.1")
    assert set(first).isdisjoint(second)


@pytest.mark.slow
def test_the_residual_is_one_axis_through_all_layers() -> None:
    found = family("llama")

    assert found.same("model.embed_tokens.weight", "lm_head.weight", (1, 1))
    assert found.same("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", (1, 0))


@pytest.mark.slow
def test_an_analysis_takes_one_pass_and_few_atoms() -> None:
    """A layer more adds a layer's atoms: the forest grows with the nodes, not with their square."""
    atoms = [len(family("llama", num_hidden_layers=n).analysis.forest.atoms) for n in (1, 2, 3)]

    assert atoms[2] - atoms[1] == atoms[1] - atoms[0]
