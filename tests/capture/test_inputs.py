"""Example inputs from configs, and the sizes at which a model is traced."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autotp.capture.cache import flatten_cache, learn_dims
from autotp.capture.capture import capture
from autotp.capture.inputs import (
    choose_inputs,
    find_data_axes,
    find_longest_input,
    make_example_inputs,
    order_inputs,
    resize_for_trace,
)
from autotp.errors import CaptureError, PlanError
from tests import models

ALL = frozenset({"batch", "sequence", "decoder"})


def shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(v.shape) if torch.is_tensor(v) else v for n, v in inputs.items()}


def on_meta(name: str) -> nn.Module:
    return models.build(name)[0].to("meta")


EXAMPLES = {
    "llama": {"input_ids": (1, 128), "attention_mask": (1, 128), "use_cache": False},
    "bert": {"input_ids": (1, 128), "attention_mask": (1, 128)},
    "t5": {
        "input_ids": (1, 4096),
        "attention_mask": (1, 4096),
        "decoder_input_ids": (1, 4096),
        "use_cache": False,
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_follow_the_config(name: str) -> None:
    inputs = make_example_inputs(on_meta(name), training=False)
    labelled = make_example_inputs(on_meta(name), training=True)

    assert EXAMPLES[name] == shapes(inputs)
    assert inputs["input_ids"].is_meta
    assert {*inputs, "labels"} == set(labelled)


def test_examples_hold_legal_words_and_are_the_same_every_time() -> None:
    model, _ = models.build("gpt2")
    inputs, again = (
        make_example_inputs(model, training=True, batch=3, sequence=9) for _ in range(2)
    )

    assert (3, 9) == tuple(inputs["labels"].shape)
    assert 0 <= int(inputs["input_ids"].min()) <= int(inputs["input_ids"].max()) < models.WORDS
    assert torch.equal(inputs["input_ids"], again["input_ids"])


def test_more_words_than_positions_are_refused() -> None:
    model, _ = models.build("gpt2")

    assert (1, 128) == tuple(
        make_example_inputs(model, training=False, sequence=128)["input_ids"].shape
    )
    with pytest.raises(PlanError, match=r"sequence 129, but its config has 128 positions\. Give"):
        make_example_inputs(model, training=False, sequence=129)


def test_examples_of_images_and_classes() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)

    assert {"pixel_values": (1, 3, 32, 32), "labels": (1,)} == shapes(
        make_example_inputs(model, True)
    )


def test_rows_kept_for_padding_are_no_positions() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(**sizes, max_position_embeddings=66, pad_token_id=1)
    model = transformers.RobertaForMaskedLM(config)

    assert 64 == find_longest_input(model)
    assert model(**make_example_inputs(model, training=False)).logits.shape == (1, 64, 64)


def test_a_module_without_a_config_must_be_given_inputs() -> None:
    model, _ = models.build("hand")
    with pytest.raises(PlanError, match="HandGPT: has no config.*takes 'ids'.*example_inputs="):
        make_example_inputs(model, training=False)


class Takes(nn.Module):
    def forward(self, ids: torch.Tensor, mask: Any = None, cache: Any = True, **more: Any) -> Any:
        return ids, mask, cache, more


def test_inputs_come_in_the_order_of_the_signature() -> None:
    given = {"zeta": 1, "mask": None, "cache": None, "alpha": 2, "ids": torch.ones(2, 3)}

    assert ["ids", "cache", "alpha", "zeta"] == list(order_inputs(Takes(), given))


def test_a_missing_input_is_named() -> None:
    with pytest.raises(
        CaptureError, match="Takes: its forward needs 'ids', but the inputs are 'mask'"
    ):
        order_inputs(Takes(), {"mask": 1})


def ids(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


AXES = [
    ({"ids": ids(2, 12)}, {"ids": (0, 1)}),
    ({"x": torch.ones(16, 64)}, {"x": (0,)}),
    ({"x": torch.ones(2, 12, 64)}, {"x": (0, 1)}),
    ({"pixels": torch.ones(2, 3, 32, 32)}, {"pixels": (0,)}),
    ({"ids": ids(2, 12), "mask": torch.ones(2, 12)}, {"ids": (0, 1), "mask": (0, 1)}),
    ({"ids": ids(2, 12), "mask": ids(2, 1, 12, 12)}, {"ids": (0, 1), "mask": (0, 2, 3)}),
    ({"ids": ids(2, 12), "places": ids(1, 12)}, {"ids": (0, 1), "places": (1,)}),
    (
        {"ids": ids(2, 12), "labels": ids(2), "rows": ids(12)},
        {"ids": (0, 1), "labels": (0,), "rows": (0,)},
    ),
    ({"pair": (ids(2, 12), torch.ones(()))}, {"pair.0": (0, 1), "pair.1": ()}),
    ({"ids": ids(2, 12), "grid": ids(4, 2, 12)}, {"ids": (0, 1), "grid": (1, 2)}),
    ({"ids": ids(2, 12), "logits_to_keep": ids(3)}, {"ids": (0, 1), "logits_to_keep": (0,)}),
]


@pytest.mark.parametrize(("inputs", "dims"), AXES)
def test_dims_of_the_data(inputs: dict[str, Any], dims: dict[str, tuple[int, ...]]) -> None:
    found = find_data_axes(nn.Identity(), inputs)

    assert dims == {n: tuple(axes) for n, axes in found.items()}


class Kept:
    """A cache: of `past` words, and of `read` words of an encoder."""

    def __init__(self, past: int, read: int) -> None:
        self.own, self.cross = torch.ones(2, 4, past, 8), torch.ones(2, 4, read, 8)

    def update(self) -> None: ...


def test_beside_a_cache_lengths_are_those_of_its_words() -> None:
    state = flatten_cache(Kept(5, 9))
    learn_dims(state.spec, [{0: "batch", 2: "past"}] * 2)
    inputs = {
        "attention_mask": ids(2, 9),
        "decoder_input_ids": ids(2, 1),
        "decoder_attention_mask": ids(2, 6),
        "grid": ids(2, 3),
        "cache": state,
    }

    assert {
        "attention_mask": {0: ("batch", 2), 1: ("past", 9)},
        "decoder_input_ids": {0: ("batch", 2), 1: ("decoder", 1)},
        "decoder_attention_mask": {0: ("batch", 2), 1: ("past", 6)},
        "grid": {0: ("batch", 2)},
        "cache.0": {0: ("batch", 2), 2: ("past", 5)},
        "cache.1": {0: ("batch", 2), 2: ("past", 9)},
    } == find_data_axes(nn.Identity(), inputs)


class Reader(nn.Module):
    """Reads words, one by one or all at once."""

    def __init__(self, *, one_by_one: bool) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(vocab_size=16, max_position_embeddings=64)
        self.table, self.one_by_one = nn.Embedding(16, 4), one_by_one

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        if not self.one_by_one:
            return x.cumsum(1)
        state = x.new_zeros(x.shape[0], 4)
        for i in range(int(x.shape[1])):
            state = (state + x[:, i]).tanh()
        return state


@pytest.mark.parametrize(("one_by_one", "length"), [(True, 8), (False, 64)])
def test_made_up_words_are_few_where_each_is_a_step_of_the_graph(
    one_by_one: bool, length: int
) -> None:
    model = Reader(one_by_one=one_by_one).eval()
    given, program = choose_inputs(
        model, training=False, capture=lambda inputs: capture(model, inputs)
    )

    assert (1, length) == given["input_ids"].shape
    assert program.dynamic is not one_by_one


TRACED = [
    ({"ids": ids(1, 1)}, None, {"ids": (3, 11)}),
    ({"ids": ids(11, 11)}, None, {"ids": (3, 11)}),
    ({"ids": ids(2, 12)}, 8, {"ids": (3, 7)}),
    ({"ids": ids(2, 2)}, 3, {"ids": (3, 2)}),
    ({"a": ids(2, 12), "decoder_a": ids(2, 12)}, None, {"a": (3, 11), "decoder_a": (3, 7)}),
    (
        {"a": ids(4, 12), "b": ids(4, 20), "c": ids(1, 12)},
        None,
        {"a": (3, 11), "b": (3, 13), "c": (1, 11)},
    ),
    ({"x": torch.ones(2, 3, 32, 32)}, None, {"x": (3, 3, 32, 32)}),
]


@pytest.mark.parametrize(("inputs", "limit", "expected"), TRACED)
def test_sizes_traced_are_distinct_and_at_least_two(
    inputs: dict[str, Any], limit: int | None, expected: dict[str, Any]
) -> None:
    traced = resize_for_trace(inputs, find_data_axes(nn.Identity(), inputs), ALL, limit)

    assert expected == shapes(traced)


def test_traced_values_are_the_given_ones_in_new_memory() -> None:
    given = {"ids": ids(2, 3)}
    traced = resize_for_trace(
        given, find_data_axes(nn.Identity(), given), frozenset({"batch"}), None
    )

    assert [[0, 1, 2], [3, 4, 5], [0, 1, 2]] == traced["ids"].tolist()
    fixed = resize_for_trace(given, find_data_axes(nn.Identity(), given), frozenset(), None)
    assert torch.equal(given["ids"], fixed["ids"])
    assert given["ids"].data_ptr() != fixed["ids"].data_ptr()
