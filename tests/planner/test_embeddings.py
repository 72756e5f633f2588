"""Embeddings and heads: split along the vocabulary or the hidden axis, tied ones as one.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import autotp
from tests.models import build, randomize
from tests.proven import Captured, proven
from tests.toys import MLP, Tokens


class Indexing(nn.Module):
    """Reads its table by indexing, from both ends, and writes with the same or another."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, 8))
        self.head = self.table if tied else nn.Parameter(torch.randn(24, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return functional.layer_norm(self.table[ids], [8]) @ self.head.T


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_read_by_indexing_is_a_lookup(tied: bool) -> None:
    inputs = {"ids": torch.tensor([[0, 11, 12, 23], [-1, -24, -12, -13]])}
    evidence = autotp.verify(Indexing(tied=tied), 3, example_inputs=inputs, training=True)

    assert evidence.ok
    assert 0.0 == evidence.replicated_fraction


class Classifier(nn.Module):
    """A loss by hand: logarithms of probabilities, and the right class of each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 24)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        picked = self.head(x).log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return -picked.mean()


def test_an_axis_that_reaches_logarithms_of_probabilities_is_a_vocabulary() -> None:
    inputs = {"x": torch.randn(2, 5, 8), "labels": torch.randint(0, 24, (2, 5))}
    plan = autotp.plan(Classifier(), 2, example_inputs=inputs, training=True)

    assert "vocabulary" == plan.parameters["head.weight"].layout


def test_a_gradient_scaled_by_frequency_keeps_the_rows_whole() -> None:
    inputs = {"ids": torch.tensor([[0, 0, 1, 2], [2, 2, 13, 13]])}
    model = Tokens(scale_grad_by_freq=True)
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert evidence.ok
    rows = {"table.weight": "vocabulary"}
    with pytest.raises(autotp.PlanError, match="Its possible layouts are column"):
        autotp.plan(model, 2, example_inputs=inputs, training=True, overrides=rows)


@pytest.fixture(scope="module")
def tied() -> Captured:
    return Captured(*build("llama", num_hidden_layers=1, tie_word_embeddings=True))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
def test_a_tied_model_keeps_its_keys(tied: Captured, tp: int) -> None:
    """A tied head was saved twice (C043)."""
    proof = tied.proof(tp)
    record = proof.plan.parameters["model.embed_tokens.weight"]

    assert proof.evidence.ok
    assert ("vocabulary", ("lm_head.weight",)) == (record.layout, record.tied)
    for rank in proof.ranks:
        assert list(tied.model.state_dict()) == list(rank.state_dict())
        assert rank.get_parameter("lm_head.weight") is rank.get_parameter(record.name)


@pytest.mark.slow
def test_a_file_without_the_head_gives_the_tied_one(tied: Captured, tmp_path: Path) -> None:
    """A tied head was loaded wrongly (C045)."""
    cast("Any", tied.model).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sharded = autotp.parallelize(read, 2, rank=1, example_inputs=tied.work.inputs)

    assert "lm_head.weight" not in saved
    assert torch.equal(saved["model.embed_tokens.weight"][256:], sharded.lm_head.weight)


class Packed(nn.Module):
    """One table has a vector a word for every layer, read by indexing; a layer takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.packed = nn.Parameter(torch.randn(30, 2 * 12))
        self.gates = nn.ModuleList(nn.Linear(16, 12) for _ in range(2))
        self.backs = nn.ModuleList(nn.Linear(12, 16) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, own = self.words(ids), self.packed[ids].unflatten(-1, (2, 12))
        for k, (gate, back) in enumerate(zip(self.gates, self.backs, strict=True)):
            x = x + back(functional.gelu(gate(x)) * own[..., k, :])
        return x


@pytest.fixture(scope="module")
def packed() -> Captured:
    torch.manual_seed(0)
    return Captured(Packed(), {"ids": torch.randint(0, 30, (2, 7))})


@pytest.mark.parametrize("tp", [2, 3])
def test_a_table_of_all_layers_is_cut(packed: Captured, tp: int) -> None:
    """Such a table stayed on every rank (C046)."""
    plan = packed.proven(tp)

    assert plan.parameters["packed"].dim is not None
    assert 0.07 > plan.replicated_fraction


class Tables(MLP):
    """Words, kinds and places, added up and normed, as encoders begin; words are the head too."""

    def __init__(self, places: int) -> None:
        super().__init__(32, 64, torch.relu)
        self.words, self.kinds = nn.Embedding(64, 32), nn.Embedding(2, 32)
        self.places = nn.Embedding(places, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        kinds = places % 2
        x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
        return functional.linear(x + self.body(x), self.words.weight)


@cache
def tables(places: int) -> Captured:
    model = Tables(places)
    randomize(model, 0)
    return Captured(model, {"ids": torch.randint(0, 64, (2, 12))})


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("places", [16, 18])
def test_a_table_too_short_to_cut_keeps_no_other_whole(places: int, tp: int) -> None:
    reasons = {
        3: "not in a column/row pair, and tp 3 divides none of its axes (2, 32)",
        4: "not in a column/row pair: sharding dim 1 (32) is prevented by aten.add.Tensor at add (",
    }
    plan = tables(places).proven(tp)

    assert plan.parameters["kinds.weight"].dim is None
    assert plan.parameters["kinds.weight"].reason.startswith(reasons[tp])
    assert 0 == plan.parameters["places.weight"].dim
    assert 0 == plan.parameters["words.weight"].dim
    kinds = [c.kind for c in plan.collectives if c.phase == "forward"]
    assert ["all_reduce", "all_reduce", "all_gather"] == kinds


class Optional(nn.Module):
    """Words beside shapes, of which none may be given; both are brought to one size together."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.shapes = nn.Embedding(64, 16), nn.Embedding(256, 48)
        self.join, self.norm = nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor, shapes: Tensor | None = None) -> Tensor:
        if shapes is None:
            shapes = torch.zeros(ids.shape, dtype=torch.int64)
        return self.norm(self.join(torch.cat([self.words(ids), self.shapes(shapes)], -1)))


def test_a_table_is_cut_whether_its_input_is_given_or_not() -> None:
    model, ids = Optional(), torch.randint(0, 64, (2, 12))
    randomize(model, 0)
    without = proven(model, {"ids": ids}, 4)
    given = proven(model, {"ids": ids, "shapes": ids + 7}, 4)

    for plan in (without, given):
        assert all(
            plan.parameters[f"{name}.weight"].dim is not None for name in ("words", "shapes")
        )


@pytest.mark.slow
def test_an_odd_vocabulary_is_cut_over_any_tp() -> None:
    """Vocabularies that the ranks do not divide could not be split (C042)."""
    model, inputs = build("gpt2", n_layer=1, vocab_size=2 * 251)

    assert 0 == proven(model, inputs, 3).cost["home_bytes"]
