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

import autotp
from autotp import offline
from autotp.checkpoint.quantised import quantiser_of
from autotp.errors import WeightsError
from tests.checkpoints import IDS, model, saved
from tests.multimodal import llava

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


CASES = [
    ("llama", (8, 8)),  # blocks, as most are published
    ("llama", None),  # one scale a tensor
    ("phi3", (1, 32)),  # one scale a row, beside a fused QKV and a fused MLP
    ("mixtral", (8, 16)),  # experts one by one, each with scales of its own
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} {case[1]}")
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of what it stands for."""
    kind, block = request.param
    folder = tmp_path_factory.mktemp("quantised")
    saved(kind, folder / "codes")
    quantised(folder / "codes", folder / "plain", block, in_layers)
    return folder / "codes", folder / "plain"


def test_codes_and_scales_are_cut_together(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's slices are those of the plain checkpoint, and it reads its own codes alone."""
    codes, plain = both
    read = 0
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        read += (got := preadv(*arguments))
        return got

    expected = [autotp.from_pretrained(plain, 2, rank=rank) for rank in range(2)]
    monkeypatch.setattr("os.preadv", counted)
    found = [autotp.from_pretrained(codes, 2, rank=rank, dequantize=True) for rank in range(2)]

    for ours, theirs in zip(expected, found, strict=True):
        same = {name: torch.equal(p, theirs.get_parameter(name)) for name, p in
                ours.named_parameters()}  # fmt: skip
        assert dict.fromkeys(same, True) == same
    assert read < 1.35 * (codes / "model.safetensors").stat().st_size  # norms and scales twice


def test_what_was_quantised_is_computed_and_saved_plainly(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    codes, plain = both
    ours = autotp.from_pretrained(codes, 1, dequantize=True)
    theirs: Any = autotp.from_pretrained(plain, 1)
    ours.save_pretrained(tmp_path)

    assert torch.equal(theirs(input_ids=IDS).logits, ours(input_ids=IDS).logits)
    assert load_file(plain / "model.safetensors").keys() == (
        load_file(tmp_path / "model.safetensors").keys()
    )
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_cut_offline_it_is_plain(tmp_path: Path) -> None:
    codes, plain, parts, whole = (tmp_path / n for n in ("codes", "plain", "parts", "whole"))
    saved("mixtral", codes)
    quantised(codes, plain, (8, 16), in_layers)
    offline.shard(codes, parts, 2, dequantize=True)
    offline.merge(parts, whole)
    expected, found = (load_file(d / "model.safetensors") for d in (plain, whole))

    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((whole / "config.json").read_text())


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
    for rank in range(2):
        ours = autotp.from_pretrained(plain, 2, rank=rank)
        theirs = autotp.from_pretrained(codes, 2, rank=rank, dequantize=True)
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name)), name


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, r"\(bitsandbytes\)"),
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\)"),
        ({"quant_method": "nobodys"}, r"refuses it: ValueError: Unknown quantization type"),
    ],
)
def test_what_cannot_be_made_plain_is_refused(told: dict[str, Any], said: str) -> None:
    fields = {"model_type": "llama", "quantization_config": told}
    with pytest.raises(WeightsError, match="0 of its layers could be cut. Pass dequantize=True"):
        quantiser_of("here", fields)
    with pytest.raises(WeightsError, match=said) as caught:
        quantiser_of("here", fields, dequantise=True)

    assert "Take the checkpoint before quantisation" in str(caught.value)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    saved("llama", codes)
    quantised(codes, tmp_path / "plain", (8, 8), in_layers)
    tensors = load_file(codes / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[f"{name}_scale_inv"] = torch.ones(5, 3)
    save_file(tensors, codes / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=rf"{name} is made of 2 tensors .* do not go together"):
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
