"""Checkpoints of tiny models, as Transformers writes them, and planted faults."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

__all__ = ["FAULTS", "IDS", "Fault", "edited", "model", "saved"]

IDS = torch.arange(14).view(2, 7)
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}


def model(kind: str) -> nn.Module:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    builders: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
        "tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4)),
        "qwen2_moe": lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **_SIZES,
                num_experts=4,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        ),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, pad_token_id=0)),
        "bert": lambda: BertModel(BertConfig(**_SIZES)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=64, **_TOKENS)
        ),
    }
    return builders[kind]().eval()


def saved(kind: str, directory: Path, max_shard_size: str = "50GB") -> Any:
    """Save a model into `directory`, and load it as Transformers does."""
    original: Any = model(kind)
    original.save_pretrained(directory, max_shard_size=max_shard_size)
    return type(original).from_pretrained(directory).eval()


def edited(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors in a safetensors file."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


Fault = tuple[Callable[[Path], object], str]
_Q = "model.layers.1.self_attn.q_proj.weight"


def _single(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda directory: edited(directory / "model.safetensors", edit)


def _truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _no_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)


def _absent_file(directory: Path) -> None:
    where = dict.fromkeys(["model.norm.weight", _Q], "model-00002-of-00002.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    where["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))


def _configured(**fields: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return edit


FAULTS: Mapping[str, Fault] = {
    "missing": (
        _single(lambda t: t.pop(_Q)),
        rf"model\.safetensors: tensor {_Q} is missing, 1 of the 21 tensors",
    ),
    "extra": (
        _single(lambda t: t.update({"model.odd": torch.ones(3)})),
        r"tensor model\.odd of .*model\.safetensors: LlamaForCausalLM has no such parameter",
    ),
    "shape": (
        _single(lambda t: t.update({_Q: torch.ones(16, 32)})),
        rf"tensor {_Q} of .*: has shape \[16, 32\], but {_Q} has \[32, 32\]",
    ),
    "dtype": (
        _single(lambda t: t.update({_Q: torch.ones(32, 32, dtype=torch.int64)})),
        rf"tensor {_Q} of .*: has dtype torch.int64, but {_Q} has torch.float32",
    ),
    "eight bits": (
        _single(lambda t: t.update({_Q: t[_Q].to(torch.float8_e4m3fn)})),
        rf"tensor {_Q} of .*: has dtype torch.float8_e4m3fn, whose 8 bits need a scale",
    ),
    "nan": (
        # in the last row: only the last rank reads it
        _single(lambda t: t[_Q][-1].fill_(torch.nan)),
        rf"tensor {_Q} of .*: 32 of the 512 values in \[16:32, 0:32\] are NaN",
    ),
    "truncated": (
        _truncated,
        r"model\.safetensors: has \d+ bytes, but \d+ according to its header",
    ),
    "no header": (_no_header, r"model\.safetensors: is truncated: its header should have \d+"),
    "absent file": (_absent_file, r"names the file model-00002-of-00002\.safetensors with 2 ten"),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"has no weights: none of model\.safetensors, .* exists",
    ),
    "packed": (
        _single(lambda t: t.update({f"{_Q[:-6]}qweight": t.pop(_Q).to(torch.int32)})),
        r"is part of a quantised weight",
    ),
    "quantised": (
        _configured(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"is quantised \(gptq\).*Use the checkpoint before quantisation",
    ),
}
