"""Tiny models that take words and images, or sound, with random weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from tests.models import randomize

BATCH, WORDS, IMAGE = 2, 10, 500
"""Sequences have `WORDS` words and before them a token `IMAGE` a feature of their image."""
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def llava() -> tuple[nn.Module, dict[str, Any]]:
    """A CLIP tower, two linear layers, a text model; an image is 16 tokens."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config), _read(16) | _seen()


def gemma3() -> tuple[nn.Module, dict[str, Any]]:
    """A SigLIP tower, its 16 features pooled to 4 tokens; images look at themselves both ways."""
    config = transformers.Gemma3Config(
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        text_config={
            **TEXT,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": KINDS,
        },
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )
    inputs = _read(4) | _seen()
    kinds = (inputs["input_ids"] == IMAGE).long()
    return transformers.Gemma3ForConditionalGeneration(config), inputs | {"token_type_ids": kinds}


KINDS = ["sliding_attention", "full_attention"]


def idefics3() -> tuple[nn.Module, dict[str, Any]]:
    """A tower for images in tiles, its features shuffled from 16 to 4; two tiles a sequence."""
    config = transformers.Idefics3Config(
        vision_config={
            **VISION,
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
        },
        text_config={**TEXT, "model_type": "llama"},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    tiles = torch.randn(BATCH, 2, 3, 32, 32, generator=_random())
    return transformers.Idefics3ForConditionalGeneration(config), _read(8) | {"pixel_values": tiles}


def qwen2_vl() -> tuple[nn.Module, dict[str, Any]]:
    """A tower over the patches of all images in one sequence; 16 of one are 4 tokens."""
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 8}
    config = transformers.Qwen2VLConfig(**_grid(tower))
    return transformers.Qwen2VLForConditionalGeneration(config), _patched()


def qwen3_vl() -> tuple[nn.Module, dict[str, Any]]:
    """As `qwen2_vl`, with features of the tower's layers added in the text model's."""
    tower = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4,
        "out_hidden_size": 64, "patch_size": 8, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(**_grid(tower, head_dim=8))
    return transformers.Qwen3VLForConditionalGeneration(config), _patched()


def _grid(tower: dict[str, Any], **text: Any) -> dict[str, Any]:
    """A configuration of positions in a grid, around a tower."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return {
        "vision_config": tower,
        "text_config": {**TEXT, **text, "rope_parameters": rope},
        "image_token_id": IMAGE,
        "vision_start_token_id": 498,
        "vision_end_token_id": 499,
        "video_token_id": 501,
    }


def _patched() -> dict[str, Any]:
    return _kinds(_read(4)) | _patches(3 * 2 * 8 * 8)


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    """Sound in, words out: convolutions before an encoder, a decoder with cross attention."""
    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=512,
        max_source_positions=20,
        max_target_positions=32,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    words = torch.randint(3, 490, (BATCH, WORDS), generator=_random())
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(BATCH, 16, 40, generator=_random()),
        "decoder_input_ids": words,
        "labels": words,
        "use_cache": False,
    }


BUILDS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    f.__name__: f for f in (llava, gemma3, idefics3, qwen2_vl, qwen3_vl, whisper)
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model in eval mode, and keyword inputs for its forward."""
    model, inputs = BUILDS[name]()
    randomize(model.eval(), seed)
    return model, inputs


def _read(features: int) -> dict[str, Any]:
    """Words after the tokens of an image, as labels too."""
    words = torch.randint(3, 490, (BATCH, WORDS), generator=_random())
    ids = torch.cat([torch.full((BATCH, features), IMAGE), words], dim=1)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False,
    }  # fmt: skip


def _seen() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=_random())}


def _patches(numbers: int) -> dict[str, Any]:
    """Four by four patches an image, all images in one sequence."""
    return {
        "pixel_values": torch.randn(16 * BATCH, numbers, generator=_random()),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


def _kinds(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)
