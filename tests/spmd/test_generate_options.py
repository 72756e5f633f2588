"""generate() in real processes, asked in further ways: caches of a fixed size, outputs, draws."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StaticCache, StoppingCriteriaList

import autotp
from autotp.errors import AutotpError
from tests import multimodal
from tests.attended import OPAQUE
from tests.spmd.beside import TOLERANCE
from tests.spmd.pool import Pool
from tests.spmd.test_generate import NEW, ONE, padded, prompt, whole

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
PLAIN = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
STATIC = {"cache_implementation": "static"}
QUANTISED = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}


def no_sevens(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor: no word that 7 divides."""
    return scores.masked_fill(torch.arange(scores.shape[1]) % 7 == 0, -torch.inf)


def ten_words(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
    """A stopping criterion."""
    return torch.full((ids.shape[0],), ids.shape[1] >= 10)


def embedded(model: Any) -> dict[str, Any]:
    """The prompt as vectors."""
    generator = torch.Generator().manual_seed(2)
    return {"inputs_embeds": torch.randn(2, 7, model.config.hidden_size, generator=generator)}


def drafted(model: Any) -> dict[str, Any]:
    """A draft by the whole model, of which the prompt lookup of the other way has none."""
    return {"input_ids": prompt(1, 7), "assistant_model": whole("llama", ONE)}


WAYS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    # keeps another tensor at the path where others keep their keys
    "quantised": lambda _: {"input_ids": prompt(2, 7)} | QUANTISED,
    "static": lambda _: {"input_ids": prompt(2, 7)} | STATIC,
    "static, left-padded": lambda _: padded() | STATIC,
    "static, beams": lambda _: {"input_ids": prompt(2, 7), "num_beams": 3} | STATIC,
    "static, allocated for all heads": lambda m: {
        "input_ids": prompt(2, 7), "cache": allocated(m),
    },
    "vectors": embedded,
    "several sequences": lambda _: {
        "input_ids": prompt(2, 7), "num_beams": 2, "num_return_sequences": 2, "do_sample": True,
    },
    "processed and stopped": lambda _: {
        "input_ids": prompt(2, 7),
        "logits_processor": LogitsProcessorList([no_sevens]),
        "stopping_criteria": StoppingCriteriaList([ten_words]),
    },
    "drafted": drafted,
    "looked up": lambda _: {"input_ids": prompt(1, 7), "prompt_lookup_num_tokens": 3},
}  # fmt: skip


def allocated(model: Any) -> StaticCache:
    """An empty cache at the whole model's sizes."""
    cache = StaticCache(config=model.config, max_cache_len=7 + NEW)
    cache.early_initialization(2, 4, 8, torch.float32, torch.device("cpu"))
    return cache


def words(model: Any, way: str) -> list[list[int]]:
    torch.manual_seed(5)
    return model.generate(**{**PLAIN, **WAYS[way](model)}).tolist()


def told_words(rank: int, world: int) -> tuple[list[list[list[int]]], list[str]]:
    model = autotp.parallelize(whole("llama", ONE), example_inputs={"input_ids": prompt(2, 7)})
    return [words(model, way) for way in WAYS], list(model.plans)


def test_the_words_are_the_whole_models(pool: Pools) -> None:
    expected = [words(whole("llama", ONE), way) for way in WAYS]
    for mine, kinds in pool(2).run(told_words):
        assert dict(zip(WAYS, expected, strict=True)) == dict(zip(WAYS, mine, strict=True))
        # a draft's lengths differ from step to step, and are one graph
        assert not [kind for kind in kinds if "logits_to_keep=" in kind.replace("=1", "")]


def windowed(model: Any) -> list[list[int]]:
    """Words that begin before a fixed window is full, fill it, and go on: a graph each."""
    return model.generate(prompt(2, 4), **{**PLAIN, **STATIC}).tolist()


def told_windowed(rank: int, world: int) -> list[list[int]]:
    model: Any = autotp.parallelize(
        whole("window", ONE), example_inputs={"input_ids": prompt(2, 7)}
    )
    return windowed(model)


def test_a_window_of_a_fixed_size_fills_and_goes_on(pool: Pools) -> None:
    expected = windowed(whole("window", ONE))
    assert [expected, expected] == pool(2).run(told_windowed)


def outputs(model: Any) -> dict[str, list[Tensor]]:
    """All that generate() can be asked to give beside the words."""
    asked = ("return_dict_in_generate", "output_scores", "output_logits")
    inner = ("output_attentions", "output_hidden_states")
    made = model.generate(prompt(2, 7), **PLAIN, **dict.fromkeys((*asked, *inner), True))
    names = ("scores", "logits", "attentions", "hidden_states")
    return {name: list(flat(made[name])) for name in names}


def flat(nest: Any) -> Any:
    for item in nest:
        yield from [item] if isinstance(item, Tensor) else flat(item)


def told_outputs(rank: int, world: int) -> tuple[dict[str, list[Tensor]], list[str]]:
    model = whole("llama", ONE)
    model.set_attn_implementation("eager")
    sharded: Any = autotp.parallelize(model, example_inputs={"input_ids": prompt(2, 7)})
    refusals: list[str] = []
    for ask in (
        lambda: sharded.generate(prompt(2, 7), cache_implementation="paged", **PLAIN),
        lambda: sharded.set_attn_implementation("sdpa"),
    ):
        with pytest.raises(AutotpError) as caught:
            ask()
        refusals.append(str(caught.value))
    return outputs(sharded), refusals


def test_outputs_asked_for_are_the_whole_models(pool: Pools) -> None:
    model = whole("llama", ONE)
    model.set_attn_implementation("eager")
    expected = outputs(model)

    assert {n: len(of) for n, of in expected.items()} == {
        "scores": NEW, "logits": NEW, "attentions": NEW, "hidden_states": 2 * NEW,
    }  # fmt: skip
    for given, refusals in pool(2).run(told_outputs):
        for name, tensors in expected.items():
            for whole_one, mine in zip(tensors, given[name], strict=True):
                assert whole_one.shape == mine.shape
                torch.testing.assert_close(mine, whole_one, rtol=TOLERANCE, atol=TOLERANCE)
        assert "continuous batching" in refusals[0]
        assert "captured with 'eager'" in refusals[1]


def told_draws(rank: int, world: int) -> tuple[list[list[int]], float]:
    """What ranks with seeds of their own draw, and the next number of each."""
    model: Any = autotp.parallelize(whole("llama", ONE), example_inputs={"input_ids": prompt(2, 7)})
    torch.manual_seed(5 + rank)
    return model.generate(prompt(2, 7), **{**PLAIN, "do_sample": True}).tolist(), drawn()


def drawn() -> float:
    return torch.rand(()).item()


def test_ranks_with_seeds_of_their_own_draw_what_rank_0_would(pool: Pools) -> None:
    model: Any = whole("llama", ONE)
    torch.manual_seed(5)
    expected = model.generate(prompt(2, 7), **{**PLAIN, "do_sample": True}).tolist(), drawn()

    assert [expected, expected] == pool(2).run(told_draws)


def told_ends(rank: int, world: int) -> int:
    """How many words there are where ranks would end at other ones, as by clocks of their own."""
    model: Any = autotp.parallelize(whole("llama", ONE), example_inputs={"input_ids": prompt(2, 7)})

    def ended(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] >= 9 + 3 * rank)

    ends = StoppingCriteriaList([ended])
    return model.generate(prompt(2, 7), stopping_criteria=ends, max_time=600.0, **PLAIN).shape[1]


def test_what_looks_at_a_clock_ends_all_ranks_as_it_ends_rank_0(pool: Pools) -> None:
    assert [9, 9] == pool(2).run(told_ends)


def opaque() -> Any:
    """C082: attention is a custom op, which knows of nothing but plain tensors."""
    model: Any = whole("llama", ONE)
    model.set_attn_implementation(OPAQUE)
    return model


def told_opaque(rank: int, world: int) -> tuple[list[list[int]], str | None]:
    model: Any = autotp.parallelize(opaque(), example_inputs={"input_ids": prompt(2, 7)})
    layout = model.plan.parameters["model.layers.0.self_attn.q_proj.weight"].layout
    return model.generate(**padded(), **PLAIN).tolist(), layout


def test_an_opaque_attention_has_a_cache_of_its_heads(pool: Pools) -> None:
    expected = opaque().generate(**padded(), **PLAIN).tolist()

    assert expected == whole_words()
    assert [(expected, "column")] * 2 == pool(2).run(told_opaque)


def whole_words() -> list[list[int]]:
    model: Any = whole("llama", ONE)
    return model.generate(**padded(), **PLAIN).tolist()


def heard() -> tuple[Any, dict[str, Tensor]]:
    """A model of sound, and sounds."""
    model, inputs = multimodal.build("whisper")
    return model, {"input_features": inputs["input_features"]}


def told_heard(rank: int, world: int) -> tuple[list[list[int]], int]:
    model, inputs = heard()
    words = torch.full((2, 1), 1)
    sharded: Any = autotp.parallelize(
        model, example_inputs={**inputs, "decoder_input_ids": words, "use_cache": False}
    )
    return sharded.generate(**inputs, **PLAIN).tolist(), len(sharded.plans)


def test_sound_is_written_down_with_one_graph_for_all_words(pool: Pools) -> None:
    model, inputs = heard()
    expected = model.generate(**inputs, **PLAIN).tolist()

    # the forward planned for, the prompt, a further word; the encoder has a plan of its own
    assert [(expected, 3)] * 2 == pool(2).run(told_heard)
