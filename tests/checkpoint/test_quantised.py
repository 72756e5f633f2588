"""Quantised checkpoints: refused up front, or made plain while they are read, slice by slice."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Mxfp4Config

import autotp
from autotp.algebra.split import Split
from autotp.checkpoint.empty_model import build_empty_model
from autotp.checkpoint.quantized import find_quantiser
from autotp.checkpoint.read_shards import read_shard
from autotp.cli import shard_merge
from autotp.errors import WeightsError
from autotp.loading import open_checkpoint, prepare_tensors
from tests.checkpoints import model, saved
from tests.multimodal import llava
from tests.zoo import build

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: all."""


def coded(weight: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in eight bits, its scales, and what both stand for."""
    rows, columns = weight.shape
    down, along = block or (rows, columns)
    grid = weight.view(rows // down, down, columns // along, along)
    scales = grid.abs().amax((1, 3)) / 448
    codes = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = (codes.float() * scales[:, None, :, None]).view(rows, columns)
    return codes.view(rows, columns), scales if block else scales.reshape(()), plain


def quantised(directory: Path, plain: Path, block: Block, which: Callable[[str], bool]) -> None:
    """Quantises a checkpoint where it is; `plain` becomes one of what its weights stand for."""
    tensors = load_file(directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(fields))
    stands, packed = dict(tensors), dict(tensors)
    for name in filter(which, tensors):
        packed[name], packed[f"{name}_scale_inv"], stands[name] = coded(tensors[name], block)
    for folder, held in ((directory, packed), (plain, stands)):
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    fields["quantization_config"] = told
    (directory / "config.json").write_text(json.dumps(fields))


def in_layers(name: str) -> bool:
    kept = "norm" in name or name.endswith(".gate.weight")  # routers are rarely quantised
    return ".layers." in name and name.endswith(".weight") and not kept


def read(directory: Path) -> dict[str, Tensor]:
    """The full, dequantised tensor that is read for each key of the model in `directory`."""
    checkpoint, quantiser = open_checkpoint(directory, dequantize=True)
    with checkpoint:
        found: dict[str, Tensor] = {}
        for name, stored in prepare_tensors(
            build_empty_model(directory), checkpoint, quantiser=quantiser
        ).items():
            found[name] = torch.empty(stored.shape, dtype=stored.dtype)
            read_shard(found[name], stored, None, 0)
    return found


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("llama", (8, 8)),  # blocks, as most are published
        ("llama", None),  # one scale a tensor
        ("phi3", (1, 32)),  # one scale per row, with a fused QKV and a fused MLP
        ("mixtral", (8, 16)),  # experts one by one, each with scales of its own
    ],
)
def test_codes_become_what_they_stand_for(kind: str, block: Block, tmp_path: Path) -> None:
    whole: Any = saved(kind, tmp_path / "codes")
    quantised(tmp_path / "codes", tmp_path / "plain", block, in_layers)
    expected = type(whole).from_pretrained(tmp_path / "plain").state_dict()
    found = read(tmp_path / "codes")

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.slow
def test_codes_and_scales_are_cut_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its slices of the dequantised weights, and reads only its own codes."""
    saved("phi3", codes := tmp_path / "codes")
    quantised(codes, tmp_path / "plain", (1, 32), in_layers)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    read = 0
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        read += (got := preadv(*arguments))
        return got

    monkeypatch.setattr("os.preadv", counted)
    for rank in range(2):
        part = autotp.from_pretrained(codes, 2, rank=rank, dequantize=True)
        for name, record in part.plan.parameters.items():
            pieces = [plain[name]]
            if record.dim is not None:
                ranges = Split.decode(record.split).ranges(rank, 2)
                pieces = [plain[name].narrow(record.dim, a, b - a) for a, b in ranges]
            whole = torch.cat(pieces, record.dim or 0)
            assert torch.equal(whole, part.get_parameter(name)), name
    assert part.plan.parameters["model.layers.0.self_attn.qkv_proj.weight"].dim == 0
    assert read < 1.1 * (codes / "model.safetensors").stat().st_size


def test_codes_of_four_bits_are_dequantised_in_full(tmp_path: Path) -> None:
    """Their converter fills a table, so it is run as it is, one parameter at a time."""
    whole: Any = build("gpt_oss", "causal-lm")[0]
    whole.save_pretrained(tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        for key, shape, span in (("blocks", (columns // 32, 16), (0, 256)),
                                 ("scales", (columns // 32,), (120, 130))):  # fmt: skip
            drawn = torch.randint(*span, (experts, rows, *shape), generator=generator)
            tensors[f"{name}_{key}"] = drawn.to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    undone = Mxfp4Config(dequantize=True)
    expected = type(whole).from_pretrained(tmp_path, quantization_config=undone).state_dict()
    found = read(tmp_path)

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.slow
def test_what_was_quantised_is_saved_plainly(tmp_path: Path) -> None:
    codes, plain, again = (tmp_path / name for name in ("codes", "plain", "again"))
    saved("mixtral", codes)
    quantised(codes, plain, (8, 16), in_layers)
    autotp.from_pretrained(codes, 1, dequantize=True).save_pretrained(again)
    expected, found = (load_file(d / "model.safetensors") for d in (plain, again))

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((again / "config.json").read_text())


@pytest.mark.slow
def test_cut_offline_it_is_plain(tmp_path: Path) -> None:
    codes, plain, parts, whole = (tmp_path / n for n in ("codes", "plain", "parts", "whole"))
    saved("mixtral", codes)
    quantised(codes, plain, (8, 16), in_layers)
    shard_merge.shard_checkpoint(codes, parts, 2, dequantize=True)
    shard_merge.merge_checkpoint(parts, whole)
    expected, found = (load_file(d / "model.safetensors") for d in (plain, whole))

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((whole / "config.json").read_text())


@pytest.mark.slow
def test_a_model_of_several_is_quantised_in_one_of_its_parts(tmp_path: Path) -> None:
    """The configuration of the quantisation is the language model's alone."""
    made: Any = llava()[0]
    codes, plain = tmp_path / "codes", tmp_path / "plain"
    made.save_pretrained(codes)
    quantised(codes, plain, (8, 8), lambda n: "language_model" in n and in_layers(n))
    fields = json.loads((codes / "config.json").read_text())
    fields["text_config"]["quantization_config"] = fields.pop("quantization_config")
    (codes / "config.json").write_text(json.dumps(fields))
    with pytest.raises(WeightsError, match=r"is quantised \(fp8\).*Pass dequantize=True"):
        autotp.from_pretrained(codes, 2, rank=0)
    whole: Any = type(made).from_pretrained(plain)
    expected, found = whole.state_dict(), read(codes)

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, r"\(bitsandbytes\)"),
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\)"),
        ({"quant_method": "nobodys"}, r"rejects it: ValueError: Unknown quantization type"),
    ],
)
def test_what_cannot_be_dequantised_is_refused(config: dict[str, Any], said: str) -> None:
    fields = {"model_type": "llama", "quantization_config": config}
    with pytest.raises(
        WeightsError, match="none of its layers can run tensor-parallel. Pass dequantize=True"
    ):
        find_quantiser("here", fields)
    with pytest.raises(WeightsError, match=said) as caught:
        find_quantiser("here", fields, dequantise=True)

    assert "Use the checkpoint before quantisation" in str(caught.value)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    saved("llama", codes)
    quantised(codes, tmp_path / "plain", (8, 8), in_layers)
    tensors = load_file(codes / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[f"{name}_scale_inv"] = torch.ones(5, 3)
    save_file(tensors, codes / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=rf"{name} is made of 2 tensors .* do not fit together"):
        autotp.from_pretrained(codes, 1, dequantize=True)


def test_a_model_loaded_with_packed_weights_is_refused() -> None:
    """As Transformers leaves one: modules of eight bits, and a mark on the model."""
    packed: Any = model("llama")
    packed.is_quantized, packed.quantization_method = True, "fp8"
    linear: nn.Linear = packed.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    for call in (autotp.plan, autotp.verify):
        with pytest.raises(WeightsError, match=r"quantised weights \(fp8; 1 modules, Linear\)"):
            call(packed, 2)
