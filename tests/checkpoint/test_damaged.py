"""Checkpoints that are damaged, old, or next to other files: read, or refused with the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autotp
from autotp.checkpoint.directory import Checkpoint
from autotp.checkpoint.empty_model import fill_buffers
from autotp.cli import shard_merge
from autotp.errors import AutotpError, PlanError, WeightsError
from tests.checkpoints import IDS, saved

_NORM = "model.norm.weight"
Rows = dict[str, dict[str, Any]]


def rewritten(directory: Path, edit: Callable[[Rows], object]) -> None:
    """Changes the header of a safetensors file, and leaves its bytes."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    rows: Rows = json.loads(data[8 : 8 + size])
    edit(rows)
    text = json.dumps(rows).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _on_another(rows: Rows) -> None:
    rows[_NORM]["data_offsets"] = rows["model.layers.0.input_layernorm.weight"]["data_offsets"]


def _with_a_hole(rows: Rows) -> None:
    del rows["model.layers.0.input_layernorm.weight"]


def _changed(**fields: object) -> Callable[[Rows], None]:
    return lambda rows: rows[_NORM].update(fields)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_on_another, r"its bytes begin at \d+, but those of .* end at \d+"),
        (_with_a_hole, "its bytes begin at"),
        (
            _changed(data_offsets=["0", "128"]),
            ".* a dtype, a shape and two offsets, all of them integers",
        ),
        (_changed(shape=[-4, -8]), ".* a dtype, a shape and two offsets, all of them integers"),
    ],
)
def test_a_header_that_tells_of_other_bytes_is_refused(
    edit: Callable[[Rows], object], said: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    rewritten(tmp_path, edit)
    with pytest.raises(WeightsError, match=rf"model\.safetensors: tensor \S+: {said}"):
        Checkpoint.open(tmp_path)


def test_an_index_that_names_no_file_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {_NORM: 3}}))
    with pytest.raises(WeightsError, match=rf"index\.json: names 3 as the file of {_NORM}"):
        Checkpoint.open(tmp_path)


def pickled(directory: Path, tensors: object, **options: Any) -> None:
    """Puts a file of torch.save in the place of a checkpoint's own."""
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin", **options)


@pytest.mark.slow
def test_a_pickled_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    """It cannot be mapped, and its tensors may be parameters."""
    whole = saved("llama", tmp_path)
    parameters = {name: torch.nn.Parameter(t) for name, t in whole.state_dict().items()}
    pickled(tmp_path, parameters, _use_new_zipfile_serialization=False)
    found = autotp.from_pretrained(tmp_path, 1)

    assert torch.equal(whole(input_ids=IDS).logits, found(input_ids=IDS).logits)


def test_a_pickled_file_that_is_not_plain_weights_is_refused(tmp_path: Path) -> None:
    whole = saved("llama", tmp_path)
    state = whole.state_dict()
    pickled(tmp_path, whole)
    with pytest.raises(WeightsError, match=r"Unsupported global: GLOBAL \S+LlamaForCausalLM"):
        Checkpoint.open(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({**state, _NORM: state[_NORM].to_sparse()}, path)
    with pytest.raises(WeightsError, match=rf"tensor {_NORM} of .*: is of layout torch.sparse_coo"):
        Checkpoint.open(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="EOFError: it ends too early"):
        Checkpoint.open(tmp_path)


def configured(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": "LlamaModel"}, "'architectures' is 'LlamaModel', but must be a list"),
        ({"architectures": ["AutoModel"]}, "'AutoModel' is not a model class of Transformers"),
        ({"architectures": ["BertModel"]}, "BertModel cannot be built from config.json, of model"),
        ({"rope_parameters": {"rope_type": "odd"}}, "cannot be built .*: KeyError: 'odd'"),
        ({"model_type": "odd"}, r"model_type 'odd' is none of the [1-9]\d+"),
    ],
)
def test_a_configuration_of_no_model_is_refused(
    fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    configured(tmp_path, **fields)
    with pytest.raises(PlanError, match=said):
        autotp.from_pretrained(tmp_path, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"torch_dtype": "bfloat16"},
            "option 'torch_dtype': only Transformers has it. Write dtype=",
        ),
        ({"subfolder": "part"}, "option 'subfolder': only Transformers has it. Give the directory"),
        ({"device": "nowhere"}, "device='nowhere': weights cannot be placed there"),
        ({"attn_implementation": "odd"}, "cannot be built .* with attn_implementation='odd'"),
    ],
)
def test_an_option_of_transformers_is_refused_with_its_replacement(
    options: Any, said: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    with pytest.raises(PlanError, match=said):
        autotp.from_pretrained(tmp_path, 1, **options)


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(PlanError, match=r"generation_config\.json: Transformers rejects it"):
        autotp.from_pretrained(tmp_path, 1)


def test_an_adapter_is_not_left_out_in_silence(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    with pytest.raises(PlanError, match=r"has an adapter .*someone/base.*merge_and_unload"):
        autotp.from_pretrained(tmp_path, 1)


class Marked(torch.nn.Module):
    """A mask that no initialisation fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool, device="meta"))

    def initialize_weights(self) -> None:
        """Sets nothing."""


def test_a_mask_without_values_is_named() -> None:
    with pytest.raises(WeightsError, match=r"buffer mask \[3, 3\] of Marked"):
        fill_buffers(Marked(), {})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was sharded for three ranks."""
    directory = tmp_path_factory.mktemp("sharded")
    saved("llama", directory / "source")
    shard_merge.shard_checkpoint(directory / "source", directory / "sharded", 3)
    return directory / "sharded"


def _truncated(directory: Path) -> None:
    path = directory / "shards.json"
    path.write_text(path.read_text()[:-9])


def _configured(**fields: object) -> Callable[[Path], None]:
    return lambda directory: configured(directory, **fields)


def _noted(**fields: object) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / "shards.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_configured(num_hidden_layers=1), "parameters are not the 12 of Llama"),
        (_configured(intermediate_size=32), "parameters are not the 21 of Lla"),
        (
            _noted(dtype="odd"),
            r"is not a manifest of shards \(ValueError\('odd'\)\). Run `autotp shard` again",
        ),
        (
            _truncated,
            r"shards\.json: cannot be read: .*\. Run `autotp shard` again",
        ),
    ],
)
def test_shards_are_merged_as_they_were_written_or_not_at_all(
    edit: Callable[[Path], object], said: str, sharded: Path, tmp_path: Path
) -> None:
    """With a changed configuration, layers would be left out silently."""
    shutil.copytree(sharded, tmp_path / "sharded")
    edit(tmp_path / "sharded")
    with pytest.raises(AutotpError, match=said):
        shard_merge.merge_checkpoint(tmp_path / "sharded", tmp_path / "merged")
    assert not (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_shards_are_of_one_dtype_and_in_another_directory(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="was sharded in float32, but dtype is 'bfloat16'"):
        autotp.from_pretrained(sharded, 3, rank=0, dtype="bfloat16")
    pickled_at = tmp_path / "pickled"
    pickled_at.mkdir()
    shutil.copytree(sharded.parent / "source", pickled_at, dirs_exist_ok=True)
    pickled(pickled_at, load_file(pickled_at / "model.safetensors"))
    before = sorted(pickled_at.iterdir())
    with pytest.raises(PlanError, match="files of weights already"):
        shard_merge.shard_checkpoint(pickled_at, pickled_at, 2)
    assert before == sorted(pickled_at.iterdir())
