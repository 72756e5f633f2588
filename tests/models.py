"""Tiny models with random weights: one a family that the issue names, and a GPT written by hand.

Sizes are written out, so that a test may count on them: hidden 64, 2 layers, 8 heads (4 key-value
heads where grouped), ffn 128, 512 words; 128 positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from autotp.capture.program import Program, name_leaves

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, WORDS, POSITIONS = 64, 2, 8, 4, 128, 512, 128
BATCH, SEQUENCE, DECODER_SEQUENCE = 2, 12, 8

LLAMA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
}
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
HEAD_SIZE = {"head_dim": HIDDEN // HEADS}
GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
BLOOM = {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
OPT = {
    "hidden_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_dim": FFN,
    "max_position_embeddings": POSITIONS,
}
T5 = {
    "d_model": HIDDEN,
    "d_kv": HIDDEN // HEADS,
    "d_ff": FFN,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
MIXTRAL = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}

# name: (class, its configuration)
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA | HEAD_SIZE),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA | HEAD_SIZE | {"sliding_window": 16}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
}
SPECIAL_WORDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HAND = "hand"
ONE_LAYER: Mapping[str, Mapping[str, int]] = {
    "bloom": {"n_layer": 1},
    "gpt2": {"n_layer": 1},
    "hand": {"layers": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}
"""The sizes of one layer where they are not `num_hidden_layers`."""


def names() -> tuple[str, ...]:
    """The names that `build` knows; the last one is the GPT written by hand."""
    return (*FAMILIES, HAND)


def build(
    name: str, *, seed: int = 0, attn: str = "sdpa", **config_overrides: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in eval mode with random weights, and keyword inputs of 2 × 12 tokens for it.

    Example: `model, inputs = build("llama", num_hidden_layers=1); model(**inputs)`.
    The hand-written GPT takes the fields of `HandShape` as overrides and has one attention only.
    """
    torch.manual_seed(seed)
    model = _hand(config_overrides) if name == HAND else _family(name, attn, config_overrides)
    randomize(model, seed)
    return model.eval(), _inputs(name, model, seed)


def randomize(model: nn.Module, seed: int) -> None:
    """Fills every parameter: deviation 0.1, around 1 for vectors of mean above 0.5 (norms)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            centre = 1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + centre)


def run_program(model: nn.Module, program: Program, inputs: Mapping[str, Any]) -> Any:
    """What the captured graph gives on the parameters of `model`, in the model's output type."""
    root = nn.Module()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            lifted = program.lifted.get(node.target)
            _put(root, node.target, _attribute(model, node.target) if lifted is None else lifted)
    leaves = name_leaves(inputs)
    outputs = fx.GraphModule(root, program.graph)(*(leaves[name] for name in program.inputs))
    return pytree.tree_unflatten(outputs, program.out_spec)


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    parent, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)


def _put(root: nn.Module, path: str, tensor: torch.Tensor) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    setattr(root, leaf, tensor)


def _family(name: str, attn: str, overrides: Mapping[str, Any]) -> nn.Module:
    model_class, config_class, sizes = FAMILIES[name]
    config = getattr(transformers, config_class)(**{**SPECIAL_WORDS, **sizes, **overrides})
    if attn != "sdpa":  # sdpa is the default of every class that has it; asking the others raises
        config._attn_implementation = attn
    return getattr(transformers, model_class)(config)


def _hand(overrides: Mapping[str, Any]) -> nn.Module:
    return HandGPT(HandShape(**overrides))


def _inputs(name: str, model: nn.Module, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {"input_ids": _words(SEQUENCE, generator)}
    if name == "t5":
        inputs["decoder_input_ids"] = _words(DECODER_SEQUENCE, generator)
    if name == HAND:
        inputs["ids"] = inputs.pop("input_ids")
    elif name != "bert":
        inputs["use_cache"] = False
    return inputs


def _words(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, WORDS - 12, (BATCH, length), generator=generator)


PLAIN_PARTS = ("attention", "query", "key", "value", "fused", "out", "up", "down", "blocks", "head")


@dataclass(frozen=True)
class HandShape:
    """Sizes and style of a `HandGPT`; `rename` maps attributes (`PLAIN_PARTS`) to other names."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = HEADS
    ffn: int = FFN
    words: int = WORDS
    positions: int = POSITIONS
    fused: bool = False
    rename: tuple[tuple[str, str], ...] = ()

    def name(self, plain: str) -> str:
        """The attribute that plays the part `plain`."""
        return dict(self.rename).get(plain, plain)


class HandGPT(nn.Module):
    """A GPT as a newcomer writes it: learned positions, no config, `forward(ids)` gives logits."""

    def __init__(self, shape: HandShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.hidden)
        self.places = nn.Embedding(shape.positions, shape.hidden)
        blocks = nn.ModuleList(HandBlock(shape) for _ in range(shape.layers))
        self.add_module(shape.name("blocks"), blocks)
        self.norm = nn.LayerNorm(shape.hidden)
        self.add_module(shape.name("head"), nn.Linear(shape.hidden, shape.words, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.get_submodule(self.shape.name("blocks")).children():
            x = block(x)
        return self.get_submodule(self.shape.name("head"))(self.norm(x))


class HandBlock(nn.Module):
    """A pre-norm block: attention and a gelu MLP, each added to the residual."""

    def __init__(self, shape: HandShape) -> None:
        super().__init__()
        self.shape = shape
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.add_module(shape.name("attention"), HandAttention(shape))
        self.add_module(shape.name("up"), nn.Linear(shape.hidden, shape.ffn))
        self.add_module(shape.name("down"), nn.Linear(shape.ffn, shape.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = {
            name: self.get_submodule(self.shape.name(name)) for name in ("attention", "up", "down")
        }
        x = x + part["attention"](self.norm1(x))
        return x + part["down"](functional.gelu(part["up"](self.norm2(x))))


class HandAttention(nn.Module):
    """Causal attention with one fused or three separate projections."""

    def __init__(self, shape: HandShape) -> None:
        super().__init__()
        self.shape = shape
        parts = ("fused",) if shape.fused else ("query", "key", "value")
        for part in parts:
            width = shape.hidden * (3 if shape.fused else 1)
            self.add_module(shape.name(part), nn.Linear(shape.hidden, width))
        self.add_module(shape.name("out"), nn.Linear(shape.hidden, shape.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        split = (batch, seq, self.shape.heads, hidden // self.shape.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self._projected(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._part("out")(mixed.transpose(1, 2).reshape(batch, seq, hidden))

    def _part(self, name: str) -> nn.Module:
        return self.get_submodule(self.shape.name(name))

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.shape.fused:
            return self._part("fused")(x).chunk(3, dim=-1)
        return tuple(self._part(name)(x) for name in ("query", "key", "value"))
