"""Plans of further kinds of Transformers, a layer each: all ops have rules, pairs are found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

import autotp
from autotp.records.plan import Plan

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 4}
OLD = {"n_embd": 64, "n_layer": 1, "n_head": 8, "n_positions": 64}
HALVES = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
LATENTS = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WORDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Kind:
    """A model class, its sizes, and how many openers and closers its pairs have, by role."""

    model: str
    sizes: Mapping[str, Any]
    pairs: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"attention": (3, 1), "mlp": (1, 1)}
    )


GATED = {"attention": (3, 1), "mlp": (2, 1)}
FUSED = {"attention": (1, 1), "mlp": (1, 1)}
KINDS = {
    "interleaved rotary, parallel residual": Kind("GPTJForCausalLM", {**OLD, "rotary_dim": 4}),
    "query, value, key fused in blocks": Kind(
        "CodeGenForCausalLM", {**OLD, "rotary_dim": 4}, FUSED
    ),
    "one key head, fused": Kind("GPTBigCodeForCausalLM", OLD, FUSED),
    "groups of fused heads": Kind(
        "FalconForCausalLM",
        {
            **{k: v for k, v in SIZES.items() if k.startswith(("hidden", "num"))},
            "num_kv_heads": 4,
            "new_decoder_architecture": True,
        },
        FUSED,
    ),
    "linear biases, fused": Kind(
        "MptForCausalLM", {"d_model": 64, "n_layers": 1, "n_heads": 8, "max_seq_len": 64}, FUSED
    ),
    "partial rotary, gated": Kind("StableLmForCausalLM", GROUPED, GATED),
    "interleaved rotary, one norm a layer": Kind("CohereForCausalLM", GROUPED, GATED),
    "norms over all heads": Kind("Olmo2ForCausalLM", GROUPED, GATED),
    "complex rotary": Kind(
        "Llama4ForCausalLM",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "interleave_moe_layer_step": 2},
        GATED,
    ),
    "experts and a shared one": Kind(
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"attention": (3, 1), "mlp": (2, 1), "experts": (1, 1)},
    ),
    "latent attention": Kind(
        "DeepseekV2ForCausalLM",
        {**SIZES, **LATENTS, "first_k_dense_replace": 1},
        {"attention": (2, 1), "mlp": (2, 1)},
    ),
    "einsum, relative positions": Kind(
        "XLNetLMHeadModel",
        {"d_model": 64, "n_layer": 1, "n_head": 8, "d_inner": 128},
        {"attention": (4, 1), "mlp": (1, 1)},
    ),
    "encoder and decoder": Kind(
        "BartForConditionalGeneration",
        HALVES,
        {"attention": (3, 1), "mlp": (1, 1)},
    ),
    "images": Kind(
        "ViTForImageClassification",
        {
            **{k: v for k, v in SIZES.items() if k != "max_position_embeddings"},
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 6,
        },
    ),
    "sound": Kind(
        "WhisperForConditionalGeneration",
        {
            **HALVES,
            "num_mel_bins": 16,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
    ),
    "scan": Kind(
        "MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 1, "state_size": 4}, {}
    ),
}


def planned(kind: Kind) -> Plan:
    model_class = getattr(transformers, kind.model)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**WORDS, **kind.sizes})).eval()
    return autotp.plan(model, 2, example_inputs=inputs(model))


def inputs(model: Any) -> dict[str, Any]:
    ids = torch.randint(3, 256, (2, 6))
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    given: dict[str, Any] = {model.main_input_name: ids}
    if model.main_input_name == "input_features":
        given = {"input_features": torch.randn(2, 16, 16)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return given | ({"use_cache": False} if hasattr(model.config, "use_cache") else {})


@pytest.mark.parametrize("name", KINDS)
def test_every_op_has_a_rule_and_every_pair_is_found(name: str) -> None:
    plan = planned(KINDS[name])
    found: dict[str, set[tuple[int, int]]] = {}
    for pair in plan.pairs:
        weights = [[n for n in names if "bias" not in n] for names in (pair.openers, pair.closers)]
        found.setdefault(pair.role, set()).add((len(weights[0]), len(weights[1])))

    assert () == tuple(plan.unruled)
    assert {role: {sizes} for role, sizes in KINDS[name].pairs.items()}.items() <= found.items()
