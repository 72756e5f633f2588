"""The public interface on models as they are: without values, training, of an unknown class.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import autotp
from autotp.errors import WeightsError
from tests import models
from tests.models import build, randomize
from tests.proven import Captured

ONE = {"num_hidden_layers": 1}


@pytest.mark.slow
def test_a_model_without_values_is_planned_and_shaped_but_not_verified() -> None:
    model, inputs = build("llama", **ONE)
    expected = autotp.plan(model, 3, example_inputs=inputs)
    model = model.to("meta")
    part = autotp.parallelize(model, 3, rank=2, example_inputs=inputs)

    assert expected.hash == part.plan.hash
    assert {True} == {p.is_meta for p in part.parameters()}
    assert {n: p.shards[2].shape for n, p in expected.parameters.items()} == {
        n: tuple(p.shape) for n, p in part.named_parameters()
    }
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight .* has no values .* Load the"):
        autotp.verify(model, 3, example_inputs=inputs)


@pytest.mark.slow
def test_a_model_in_training_mode_is_planned_for_training_and_right() -> None:
    model, inputs = build("llama", **ONE)
    evidence = autotp.verify(model.train(), 3, example_inputs=inputs)

    assert evidence.ok
    assert set(dict(model.named_parameters())) == set(evidence.gradients)


@pytest.mark.slow
def test_a_model_that_draws_is_told_to_be_compared_in_eval_mode() -> None:
    model, inputs = build("bert", **ONE)
    drawing = autotp.verify(model.train(), 2, example_inputs=inputs, gradients=False)

    assert not drawing.ok
    assert any("Compare in eval mode" in note for note in drawing.notes)
    assert autotp.verify(model.eval(), 2, example_inputs=inputs, training=True).ok


class StrangerConfig(PretrainedConfig):
    model_type = "stranger"

    def __init__(self, width: int = 48, classes: int = 101, **more: Any) -> None:
        super().__init__(**more)
        self.width, self.vocab_size = width, classes


class Stranger(PreTrainedModel):
    """A language model as code on a hub is: its own words for all sizes, a loss of its own.

    Queries, keys and values of six heads are one product; a gate's rows are the even ones.
    """

    config_class = StrangerConfig

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        width = config.width
        self.token, self.scale = nn.Embedding(config.vocab_size, width), nn.RMSNorm(width)
        self.spread = nn.Linear(width, 6 * 3 * 8)
        self.close, self.mix = nn.Linear(48, width), nn.Linear(width, 2 * 50)
        self.shut = nn.Linear(50, width, bias=False)
        self.score = nn.Linear(width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        x = self.token(input_ids)
        q, k, v = self.spread(x).unflatten(-1, (6, 3, 8)).unbind(-2)
        scores = torch.einsum("bshd,bthd->bhst", q, k) / 8**0.5
        causal = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
        weights = scores.masked_fill(~causal, -1e4).softmax(-1)
        x = x + self.close(torch.einsum("bhst,bthd->bshd", weights, v).flatten(-2))
        mixed = self.mix(self.scale(x))
        x = x + self.shut(functional.silu(mixed[..., ::2]) * mixed[..., 1::2])
        logits = self.score(self.scale(x))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.fixture(scope="module")
def stranger() -> Captured:
    torch.manual_seed(0)
    model = Stranger(StrangerConfig()).eval()
    randomize(model, 0)
    words = torch.randint(0, 101, (2, 9))
    return Captured(model, {"input_ids": words, "labels": words})


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 5])
def test_a_class_outside_the_library_is_cut_and_right(stranger: Captured, tp: int) -> None:
    plan = stranger.proven(tp)
    layouts = {
        n: p.layout for n, p in plan.parameters.items() if "weight" in n and p.dim is not None
    }

    assert {"attention", "mlp", "vocabulary"} <= {pair.role for pair in plan.pairs if pair.split}
    assert ["column", "row", "column", "row", "vocabulary"] == [
        layouts[f"{n}.weight"] for n in ("spread", "close", "mix", "shut", "score")
    ]
    assert 0.05 > plan.replicated_fraction


@pytest.mark.slow
def test_what_is_sharded_says_so() -> None:
    """Models ran unsharded, and nothing said so (C034)."""
    model, inputs = build(models.HAND)
    sharded = autotp.parallelize(model, 2, rank=1, example_inputs=inputs)
    held = dict(sharded.named_parameters())

    assert (2, 1) == (sharded.plan.tp, sharded.rank)
    assert "tensor-parallel over 2 ranks" in str(sharded.plan)
    assert {n: p.shards[1].shape for n, p in sharded.plan.parameters.items()} == {
        n: tuple(p.shape) for n, p in held.items()
    }


@pytest.mark.slow
def test_every_weight_has_its_layout_in_the_plan() -> None:
    """Plans told of some layers alone (C036)."""
    model, inputs = build(models.HAND)
    plan = autotp.plan(model, 2, example_inputs=inputs)
    printed = " ".join(str(plan).split())
    whole = sum(p.bytes for p in plan.parameters.values())
    large = {n: p for n, p in plan.parameters.items() if p.bytes > 0.01 * whole}

    assert [n for n, _ in model.named_parameters()] == list(plan.parameters)
    assert len(large) > 12
    for name, record in large.items():
        word = name.removesuffix(".weight").rpartition(".")[2]
        assert record.layout in ("column", "row", "vocabulary")
        assert word in printed, word
