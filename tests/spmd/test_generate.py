"""generate() in real processes: the words of the whole model, whatever asks for them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError, PlanError
from tests.models import LLAMA, SPECIAL_WORDS, build, randomize
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
NEW = 8
ONE = {"num_hidden_layers": 1}
"""Two layers are in the models whose layers differ: gemma2, convolutions."""
MLA = {
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
}
SCAN = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}
# name: class and configuration, for kinds of cache that tests.models has not
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "window": ("Mistral", LLAMA | {"sliding_window": 6}),
    "latent": ("DeepseekV3", LLAMA | MLA),
    "states": ("Mamba2", SCAN),
    "convolutions": ("Lfm2", LLAMA | {"layer_types": ["conv", "full_attention"]}),
}


def whole(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    """The model of that name, with random weights."""
    if name not in KINDS:
        return build(name, **sizes)[0]
    family, config = KINDS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**{**config, **SPECIAL_WORDS, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    randomize(model, 0)
    return model


def prompt(rows: int, length: int) -> Tensor:
    return torch.randint(3, 512, (rows, length), generator=torch.Generator().manual_seed(1))


def padded() -> dict[str, Tensor]:
    """Two prompts, the first of which is shorter."""
    ids = prompt(2, 7)
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "greedy": lambda: {"input_ids": prompt(2, 7)},
    "left-padded": padded,
    "beams": lambda: {"input_ids": prompt(2, 7), "num_beams": 3},
    "sampling": lambda: {"input_ids": prompt(2, 7), "do_sample": True, "top_k": 20},
    "one word": lambda: {"input_ids": prompt(1, 1)},
    "no cache": lambda: {"input_ids": prompt(2, 7), "use_cache": False},
    "looked up": lambda: {"input_ids": prompt(1, 7), "prompt_lookup_num_tokens": 3},
    "scores": lambda: {
        "input_ids": prompt(1, 7), "output_scores": True, "return_dict_in_generate": True,
    },
}  # fmt: skip


def words(model: Any, way: str) -> list[list[int]]:
    """What `model` generates that way."""
    torch.manual_seed(5)
    asked = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(**{**asked, **WAYS[way]()})
    return (made if isinstance(made, Tensor) else made.sequences).tolist()


def told(
    rank: int, world: int, name: str, sizes: Mapping[str, Any], ways: tuple[str, ...]
) -> list[list[list[int]]]:
    model = autotp.parallelize(whole(name, sizes), example_inputs={"input_ids": prompt(2, 7)})
    return [words(model, way) for way in ways]


@pytest.mark.parametrize(
    ("name", "tp", "sizes", "ways"),
    [
        ("llama", 2, ONE, tuple(WAYS)),
        ("llama", 4, ONE | {"num_key_value_heads": 2}, ("greedy", "beams")),
        ("gpt2", 2, {"n_layer": 1}, ("greedy",)),
        ("gemma2", 2, {"sliding_window": 6}, ("left-padded",)),
        ("window", 3, ONE, ("greedy", "beams")),
        ("mixtral", 2, ONE, ("greedy",)),
        ("latent", 2, {}, ("greedy",)),
        ("states", 2, {}, ("greedy",)),
        ("convolutions", 2, {}, ("greedy",)),
    ],
)
def test_the_words_are_the_whole_models(
    name: str, tp: int, sizes: dict[str, Any], ways: tuple[str, ...], pool: Pools
) -> None:
    expected = [words(whole(name, sizes), way) for way in ways]
    for mine in pool(tp).run(told, name, sizes, ways):
        assert dict(zip(ways, expected, strict=True)) == dict(zip(ways, mine, strict=True))


def chat(model: Any) -> list[list[int]]:
    """Two turns: the second continues from the cache of the first."""
    asked = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    first = model.generate(prompt(1, 5), return_dict_in_generate=True, **asked)
    cache = first.get("cache", first.get("past_key_values"))
    name = "cache" if "cache" in first else "past_key_values"
    longer = torch.cat([first.sequences, prompt(1, 3)], dim=1)
    second = model.generate(longer, **{name: cache}, **asked)
    return [first.sequences[0].tolist(), second[0].tolist()]


def told_chat(rank: int, world: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    sharded = autotp.parallelize(whole("llama", ONE), example_inputs={"input_ids": prompt(2, 7)})
    kept = sharded(input_ids=prompt(2, 7), use_cache=True)
    cache = kept.get("cache", kept.get("past_key_values"))
    return chat(sharded), [tuple(layer.keys.shape) for layer in cache.layers]


def test_a_cache_is_continued_from_and_each_rank_holds_its_heads(pool: Pools) -> None:
    expected = chat(whole("llama", ONE))
    for turns, shapes in pool(2).run(told_chat):
        assert expected == turns
        assert [(2, 2, 7, 8)] == shapes  # two of four key-value heads


def told_foreign(rank: int, world: int) -> tuple[list[list[int]], list[str]]:
    """What a rank makes of the whole model's cache, and how it refuses others."""
    model = whole("llama", ONE)
    sharded = autotp.parallelize(whole("llama", ONE), example_inputs={"input_ids": prompt(2, 7)})
    with torch.no_grad():
        longer = continued(sharded, kept_by(model))
    refused: list[str] = []
    for graded, heads in ((False, 3), (True, 4)):
        with torch.set_grad_enabled(graded):
            cache = kept_by(model)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :heads], layer.values[:, :heads]
        with pytest.raises((CaptureError, PlanError)) as caught, torch.set_grad_enabled(graded):
            sharded(input_ids=prompt(1, 3), use_cache=True, cache=cache)
        refused.append(str(caught.value))
    return longer, refused


def kept_by(model: Any) -> Any:
    kept = model(input_ids=prompt(1, 5), use_cache=True)
    return kept.get("cache", kept.get("past_key_values"))


@torch.no_grad()
def continued(model: Any, cache: Any) -> list[list[int]]:
    asked = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    longer = torch.cat([prompt(1, 5), prompt(1, 3)], dim=1)
    return model.generate(longer, cache=cache, **asked).tolist()


def test_of_the_whole_models_cache_each_rank_takes_its_part(pool: Pools) -> None:
    model = whole("llama", ONE)
    with torch.no_grad():
        expected = continued(model, kept_by(model))
    for rank, (longer, (odd, graded)) in enumerate(pool(2).run(told_foreign)):
        assert expected == longer
        assert "layers.0.keys has size 3 at dim 1; the full size is 4" in odd
        assert f"rank {rank} of 2 has 2" in odd
        assert "requires a gradient" in graded
