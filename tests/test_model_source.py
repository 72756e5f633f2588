"""Models by name, and random weights for them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autotp.cli.random_weights import materialize, randomise, read_available_bytes
from autotp.errors import PlanError, WeightsError
from autotp.model_source import list_presets, load_model, load_with_inputs

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "dtype": "bfloat16",
}


def _directory(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2", 0.124), ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.1-405b", 406)],
)
def test_presets_have_the_size_that_their_names_promise(name: str, billions: float) -> None:
    model = load_model(name)
    counted = sum(parameter.numel() for parameter in model.parameters()) / 1e9

    assert billions == pytest.approx(counted, rel=0.005)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training


def test_all_presets_are_tested() -> None:
    assert ["gpt2", "llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"] == list_presets()


def test_a_directory_gives_its_model_in_its_dtype(tmp_path: Path) -> None:
    model = load_model(_directory(tmp_path, json.dumps(TINY)))

    assert "LlamaForCausalLM" == type(model).__name__
    assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}


def test_a_module_is_returned_as_it_is() -> None:
    model = nn.Linear(2, 2)

    assert load_model(model) is model


def test_a_configuration_gives_its_model(tmp_path: Path) -> None:
    fields = {k: v for k, v in TINY.items() if k != "model_type"}
    config = transformers.LlamaConfig(**fields)

    assert "LlamaForCausalLM" == type(load_model(config)).__name__


def test_factories_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nplain = lambda: nn.Linear(2, 3)\n"
    source += "pair = lambda: (plain(), {'x': 1})\nnumber = lambda: 3\nvalue = 4\n"
    (tmp_path / "a_factory.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert 3 == load_model("a_factory:plain").out_features
    assert {"x": 1} == load_with_inputs("a_factory:pair")[1]
    assert load_with_inputs("a_factory:plain")[1] is None
    for name, reason in {
        "a_factory:number": "returned int",
        "a_factory:value": "has 'value', which is not callable",
        "a_factory:none": "has no 'none'",
        "no_such_module:f": "No module named 'no_such_module'",
        ":f": "Empty module name",
    }.items():
        with pytest.raises(PlanError, match=reason):
            load_model(name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "llama",', r"config\.json: line 1 column 24: "),
        ("[]", "is a list, not an object"),
        ("{}", "the key 'model_type' is missing"),
        ('{"model_type": "llama"}', "the key 'architectures', .* is missing"),
        ('{"model_type": "lama", "architectures": ["A"]}', "Transformers rejects it .*'lama'"),
        ('{"model_type": "llama", "architectures": ["Nope"]}', "architecture 'Nope' is unknown"),
        (json.dumps({**TINY, "hidden_size": "big"}), "Transformers rejects it"),
    ],
)
def test_a_broken_configuration_is_named(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        load_model(_directory(tmp_path, text))

    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no config.json"):
        load_model(tmp_path)


def test_an_unknown_name_is_refused_with_the_closest_preset() -> None:
    with pytest.raises(PlanError, match="Did you mean 'llama-3.1-8b'.*gpt2, llama-3.1-405b"):
        load_model("llama-3-8b")


def test_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match="model: is of type int. Give a module"):
        load_model(3)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(PlanError, match=r"pip install 'autotp\[transformers\]'"):
        load_model("gpt2")


def test_random_weights_vary_around_the_constants_of_the_model(tmp_path: Path) -> None:
    fields = {**TINY, "hidden_size": 256, "dtype": "float32"}
    model = materialize(load_model(_directory(tmp_path, json.dumps(fields))))
    norm, matrix = model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight

    assert (1.0, 0.1) == pytest.approx((norm.mean().item(), norm.std().item()), abs=0.03)
    assert (0.0, 0.1) == pytest.approx((matrix.mean().item(), matrix.std().item()), abs=0.01)
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not model.training


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    meta = load_model(_directory(tmp_path, json.dumps(TINY)))
    first, again, other = materialize(meta, 1), materialize(meta, 1), materialize(meta, 2)

    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not any(map(torch.equal, first.parameters(), other.parameters()))


def test_weights_that_exist_are_kept() -> None:
    model = nn.Linear(2, 2)

    assert materialize(model) is model


def test_a_module_without_configuration_gets_the_usual_constants() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512))
    made = materialize(model)

    assert (1.0, 0.0) == pytest.approx(
        (made[1].weight.mean().item(), made[1].bias.mean().item()), abs=0.03
    )


def test_a_lost_buffer_is_named() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(2, device="meta"))

    with pytest.raises(WeightsError, match="buffer table of Linear has no values"):
        materialize(model)


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(PlanError, match=r"811,706,778,112 bytes \(copies: 1\)"):
        materialize(load_model("llama-3.1-405b"))


def test_free_memory_is_known() -> None:
    free = read_available_bytes()

    assert free is None or free > 2**20


def test_drawing_leaves_shapes_and_dtypes(tmp_path: Path) -> None:
    model = nn.Linear(3, 5, dtype=torch.bfloat16)

    assert (torch.bfloat16, (5, 3)) == (randomise(model, 0).weight.dtype, tuple(model.weight.shape))


def test_a_factory_gives_a_module_or_a_pair(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "three.py").write_text("def made():\n    return 1, 2, 3\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(PlanError, match="the factory returned 3 values"):
        load_model("three:made")
