"""What checkpoints of many kinds hold, and what Transformers makes of it on load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertForSequenceClassification, BertModel, LlamaForCausalLM, LlamaModel

import autotp
from autotp.checkpoint.empty_model import build_empty_model
from autotp.checkpoint.read_shards import read_shard
from autotp.errors import PlanError, WeightsError
from autotp.loading import open_checkpoint, prepare_tensors
from tests.checkpoints import IDS, edited, model, saved
from tests.zoo import build

# whose experts are stored one by one, or merged, or under other names than the model's
EXPERTS = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "olmoe",
    "llama4_text",
    "ernie4_5_moe",
    "glm4_moe",
]


def read(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The full tensor that is read for each key of the model in `directory`."""
    checkpoint, _ = open_checkpoint(directory)
    with checkpoint:
        made = build_empty_model(directory)
        found: dict[str, torch.Tensor] = {}
        for name, stored in prepare_tensors(made, checkpoint, **options).items():
            found[name] = torch.empty(stored.shape, dtype=stored.dtype)
            read_shard(found[name], stored, None, 0)
    return found


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    whole: Any = build(kind, "causal-lm")[0]
    whole.save_pretrained(tmp_path)
    expected = type(whole).from_pretrained(tmp_path).state_dict()
    found = read(tmp_path)

    assert expected.keys() >= found.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    parameters = dict(whole.named_parameters())
    assert set() == parameters.keys() - found.keys() - set(whole.all_tied_weights_keys)


def configured(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_base_model_is_read_from_what_has_a_head(tmp_path: Path) -> None:
    """Names have a prefix more; the head is an unknown tensor, which may be left unread."""
    saved("llama", tmp_path)
    configured(tmp_path, architectures=["LlamaModel"])
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight .*LlamaModel has no such"):
        read(tmp_path)
    expected = LlamaModel.from_pretrained(tmp_path).state_dict()
    found = read(tmp_path, allow_extra=True)

    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def test_a_model_with_a_head_is_read_from_its_base(tmp_path: Path) -> None:
    """A tied head needs nothing more; one that would be drawn at random is missing."""
    base: Any = model("tied").model
    base.save_pretrained(tmp_path)
    configured(tmp_path, architectures=["LlamaForCausalLM"])
    expected = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    found = read(tmp_path)

    assert {"lm_head.weight"} == expected.keys() - found.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())

    configured(tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        read(tmp_path)


def test_a_head_of_another_task_is_refused(tmp_path: Path) -> None:
    base: Any = BertModel(model("bert").config)
    BertForSequenceClassification(base.config).save_pretrained(tmp_path)
    configured(tmp_path, architectures=["BertModel"])
    with pytest.raises(WeightsError, match=r"tensor classifier\.bias .* 2 of \d+ tensors are unkn"):
        read(tmp_path)


def test_what_transformers_leaves_unread_is_no_fault(tmp_path: Path) -> None:
    """Frequencies that old checkpoints hold a layer, and what a class says that it ignores."""
    saved("llama", tmp_path)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    edited(tmp_path / "model.safetensors", lambda t: t.update(old))

    assert not old.keys() & read(tmp_path).keys()

    whole: Any = build("deepseek_v3", "causal-lm")[0]
    whole.save_pretrained(tmp_path / "ignoring")
    path = tmp_path / "ignoring" / "model.safetensors"
    edited(path, lambda t: t.update({"model.layers.61.eh_proj.weight": torch.ones(4)}))

    assert "model.layers.61.eh_proj.weight" not in read(tmp_path / "ignoring")


def indexed(directory: Path, suffix: str, save: Callable[..., None]) -> None:
    """Splits a checkpoint's one file in two, with an index, in the format of `save`."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    where: dict[str, str] = {}
    for k, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"{stem}-{k:05d}-of-00002.{suffix}"
        save({name: tensors[name] for name in names}, directory / file)
        where |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {}, "weight_map": where})
    (directory / f"{stem}.{suffix}.index.json").write_text(text)


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_several_files_are_one_checkpoint(
    suffix: str, save: Callable[..., None], tmp_path: Path
) -> None:
    whole: Any = saved("mixtral", tmp_path)
    indexed(tmp_path, suffix, save)
    expected, found = whole.state_dict(), read(tmp_path)

    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=32, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(64, config.width)
        self.up = torch.nn.Linear(config.width, 128)
        self.down = torch.nn.Linear(128, config.width)
        self.post_init()

    def forward(self, input_ids):
        return self.down(torch.relu(self.up(self.embedding(input_ids))))
"""


@pytest.mark.slow
def test_a_class_of_the_directorys_own_is_read_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "modeling_own.py").write_text(CODE)
    entries = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    fields = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": entries, "width": 24}
    (directory / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(0)
    sizes = {"embedding.weight": (64, 24), "up.weight": (128, 24), "up.bias": (128,)}
    sizes |= {"down.weight": (24, 128), "down.bias": (24,)}
    tensors = {name: torch.randn(*size) for name, size in sizes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    found: Any = autotp.from_pretrained(directory, 1, trust_remote_code=True)
    hidden = tensors["embedding.weight"][IDS] @ tensors["up.weight"].T + tensors["up.bias"]
    expected = hidden.relu() @ tensors["down.weight"].T + tensors["down.bias"]

    torch.testing.assert_close(expected, found(input_ids=IDS))
    assert autotp.from_pretrained(directory, 2, rank=0, trust_remote_code=True).plan.pairs[0].split
    with pytest.raises(
        PlanError, match="Pass trust_remote_code=True if the directory has its own code"
    ):
        autotp.from_pretrained(directory, 1)


def test_a_name_of_the_hub_is_told_to_be_downloaded() -> None:
    with pytest.raises(PlanError, match="hf download someone/model --local-dir"):
        autotp.from_pretrained("someone/model", 1)


def test_what_a_trainer_asks_of_one_rank_is_refused(tmp_path: Path) -> None:
    inputs = {"input": torch.ones(2, 8)}
    sharded = autotp.parallelize(nn.Linear(8, 8), 1, example_inputs=inputs, training=False)
    with pytest.raises(PlanError, match="called with state_dict, is_main_process.*on every rank"):
        sharded.save_pretrained(tmp_path, state_dict={}, is_main_process=True)
    assert [] == list(tmp_path.iterdir())
