"""Tiny models of every architecture that the installed Transformers knows, with random weights.

Nothing is written down an architecture: the sizes in a configuration, also in those nested in it,
are replaced by small ones that keep the ratios which architectures insist on. `SPECIAL` has the
few that cannot be guessed. `exportable()` lists the 253 pairs of task and type that can be built
so, and exported: the denominator of the coverage.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import randomize

BATCH, SEQUENCE, DECODER_SEQUENCE, LARGEST = 2, 12, 8, 30_000_000
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
TASKS = tuple(CLASSES)


def _all(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SIZES: Mapping[str, int] = {
    **_all(64, "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim embedding_size"),
    **_all(64, "model_dim shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_all(128, "intermediate_size d_ff ffn_dim n_inner ffn_hidden_size hidden_dim"),
    **_all(128, "encoder_ffn_dim decoder_ffn_dim dense_intermediate_size"),
    **_all(128, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length"),
    **_all(2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"),
    **_all(2, "num_decoder_layers num_encoder_layers"),
    **_all(8, "num_attention_heads n_head n_heads num_heads"),
    **_all(8, "encoder_attention_heads decoder_attention_heads"),
    **_all(8, "head_dim d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    **_all(4, "num_key_value_heads rotary_dim index_n_heads"),
    **_all(512, "vocab_size vocab_size_per_layer_input"),
    **_all(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_all(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k moe_top_k"),
    **_all(1, "n_group topk_group n_shared_experts first_k_dense_replace num_hidden_groups"),
    **_all(16, "kv_lora_rank qk_head_dim index_head_dim"),
    **_all(16, "sliding_window window_size attention_window"),
    **_all(8, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    **_all(16, "mamba_d_head mamba_head_dim mamba_headdim"),
    **_all(16, "mamba_d_state ssm_state_size state_size"),
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
    **_all(8, "hidden_size_per_layer_input index_topk patch_size"),
    **_all(32, "moe_intermediate_size image_size"),
    "q_lora_rank": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
OPTIONAL = ("head_dim", "n_inner", "num_key_value_heads", "sliding_window", "q_lora_rank")
"""Sizes of which None means something: they stay None."""
KINDS = ("layer_types", "layers_block_type", "attn_types", "attention_types", "mlp_layer_types")
"""Lists with a kind a layer: of fewer layers each kind should be among them."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4},
    "lfm2": {"block_ff_dim": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 4},
    "recurrent_gemma": {"lru_width": 64, "num_hidden_layers": 3},
    "reformer": {"is_decoder": True},
}


def exportable() -> list[tuple[str, str]]:
    """The pairs of task and model type that can be built and exported, task by task."""
    lines = Path(__file__).with_suffix(".tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return sorted(((task, kind) for task, kind, *_ in rows), key=lambda r: (TASKS.index(r[0]), r))


def build(
    model_type: str, task: str, seed: int = 0, **settings: object
) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model in eval mode, and keyword inputs for its forward.

    `settings` replace those of its configuration that it has, such as `is_decoder`.

    Raises MemoryError for a type that stays large.
    """
    named = CLASSES[task][model_type]
    model_class = getattr(transformers, named if isinstance(named, str) else named[0])
    config = _config(model_type)
    if not isinstance(config, model_class.config_class):  # a text model of a type with more parts
        config = config.get_text_config()
    for key in (k for k in settings if hasattr(config, k)):
        _set(config, key, settings[key])
    torch.manual_seed(seed)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > LARGEST:
        raise MemoryError(f"{model_type} still has {count:,} parameters when shrunk")
    model = model_class(config).eval()
    randomize(model, seed)
    return model, _inputs(config, task, torch.Generator().manual_seed(seed))


def _config(model_type: str) -> Any:
    """The configuration of a type, shrunk."""
    config_class, special = CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {})
    config = config_class()
    known = {k: v for k, v in SIZES.items() if isinstance(getattr(config, k, None), int)}
    with contextlib.suppress(Exception):  # what is built from sizes, as lists of layers are
        config = config_class(**known | special)
    _shrink(config, special)
    return config


def _shrink(config: Any, special: Mapping[str, Any]) -> None:
    small: dict[str, Any] = {}
    for key in list(vars(config)):
        value = getattr(config, key, None)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, {})
        elif key in SIZES and (isinstance(value, int) or (value is None and key not in OPTIONAL)):
            small[key] = SIZES[key]
        elif key == "image_size" and isinstance(value, list | tuple):
            small[key] = [SIZES[key]] * len(value)
    for key, value in {**small, **special}.items():
        _set(config, key, value)
    if getattr(config, "kv_lora_rank", None):  # latent attention has a key for each query head
        _set(config, "num_key_value_heads", getattr(config, "num_attention_heads", None))
    _shorten(config)


def _shorten(config: Any) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    for key in KINDS:
        kinds = getattr(config, key, None)
        if isinstance(kinds, list | tuple) and layers and len(kinds) > layers:
            _set(config, key, [*dict.fromkeys(kinds), *kinds][:layers])


def _set(config: Any, key: str, value: object) -> None:
    with contextlib.suppress(Exception):  # read-only, or refused: it stays as it is
        setattr(config, key, value)


def _inputs(config: Any, task: str, generator: torch.Generator) -> dict[str, Any]:
    def words(length: int) -> torch.Tensor:
        return torch.randint(3, 500, (BATCH, length), generator=generator)

    if task == "image-classification":
        size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(BATCH, channels, size, size, generator=generator)}
    inputs: dict[str, Any] = {"input_ids": words(SEQUENCE)}
    if task == "seq2seq":
        inputs["decoder_input_ids"] = words(DECODER_SEQUENCE)
    return inputs if task == "masked-lm" else inputs | {"use_cache": False}
