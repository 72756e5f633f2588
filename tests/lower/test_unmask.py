"""Masks are taken out of graphs where running them proves what they say, and only there."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.capture.capture import capture
from autotp.capture.conditions import Plain
from autotp.lower.unmask import ATTENTION, remove_masks
from tests.models import build

Mask = Callable[..., Tensor]
LEAST = torch.finfo(torch.float32).min
SOME = {"mask": torch.ones(2, 11, dtype=torch.long)}


class Attention(nn.Module):
    """An attention of two heads with a mask that `make` makes."""

    def __init__(self, make: Mask) -> None:
        super().__init__()
        self.make, self.inner, self.outer = make, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.inner(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = self.make(x, **given)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.outer(out.transpose(1, 2).reshape(batch, length, 16))


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of a mask, as numbers."""
    at = torch.arange(x.shape[1])
    return at[:, None], at[None, :]


def causal(x: Tensor) -> Tensor:
    row, column = places(x)
    return column <= row


def lower(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def add_masks(x: Tensor) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), LEAST).triu(1)


def infinite(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(~lower(x), float("-inf"))


def everything(x: Tensor) -> Tensor:
    row, column = places(x)
    return (row >= 0) & (column >= 0)


def window(width: int) -> Mask:
    def make(x: Tensor) -> Tensor:
        row, column = places(x)
        return (column <= row) & (column > row - width)

    return make


def chunks(size: int) -> Mask:
    def make(x: Tensor) -> Tensor:
        row, column = places(x)
        return causal(x) & (row // size == column // size)

    return make


def nested_chunks(x: Tensor) -> Tensor:
    row, column = places(x)
    return causal(x) & (row // 32 // 32 == column // 32 // 32)


def square_window(x: Tensor) -> Tensor:
    row, column = places(x)
    return causal(x) & ((row - column) ** 2 < 40000)


def long_ago(x: Tensor) -> Tensor:
    _row, column = places(x)
    return causal(x) & ((x.shape[1] < 100) | (column > 0))


def round_mask(dtype: torch.dtype) -> Mask:
    def make(x: Tensor) -> Tensor:
        row, column = places(x)
        return column.to(dtype) <= row.to(dtype)

    return make


def prefix(x: Tensor) -> Tensor:
    return causal(x) | (places(x)[1] < 4)


def strict(x: Tensor) -> Tensor:
    row, column = places(x)
    return (column < row) | (row == 0)


def slope(x: Tensor) -> Tensor:
    row, column = places(x)
    return torch.where(column <= row, (column - row) * 0.5, float("-inf"))


def soft(x: Tensor) -> Tensor:
    return torch.where(causal(x), 0.0, -10000.0)


def sample_mask(x: Tensor) -> Tensor:
    return causal(x) & (torch.rand(x.shape[1], x.shape[1]) > -1)


def of_values(x: Tensor) -> Tensor:
    return causal(x) & (x[:, None, :, :1] < 1e9)


def pad_mask(x: Tensor, mask: Tensor) -> Tensor:
    return causal(x) & (mask > 0)[:, None, None]


def both_ways(x: Tensor, mask: Tensor) -> Tensor:
    return (mask > 0)[:, None, None].expand(-1, 1, x.shape[1], -1)


def add_padding(x: Tensor, mask: Tensor) -> Tensor:
    hidden = (1 - mask[:, None, None].to(x.dtype)) * LEAST
    return torch.where(causal(x), 0.0, LEAST) + hidden


def pack_mask(x: Tensor, mask: Tensor) -> Tensor:
    first = torch.cat([mask[:, :1] - 1, mask], 1)
    number = (first.diff() != 1).cumsum(-1)
    return causal(x) & (number[:, None, :, None] == number[:, None, None])


# what the attention becomes, and under which conditions
KINDS: Mapping[str, tuple[Mask, Mapping[str, Tensor], str, set[str]]] = {
    "causal": (causal, {}, "causal", set()),
    "lower": (lower, {}, "causal", set()),
    "added": (add_masks, {}, "causal", set()),
    "infinite": (infinite, {}, "causal", set()),
    "everything": (everything, {}, "none", set()),
    "window of 200": (window(200), {}, "causal", {"x.size(1) <= 200"}),
    "chunks of 300": (chunks(300), {}, "causal", {"x.size(1) <= 300"}),
    "square window": (square_window, {}, "causal", {"x.size(1) <= 128"}),
    "sizes": (long_ago, {}, "causal", {"x.size(1) <= 99"}),
    "padded": (pad_mask, SOME, "causal", {"mask is ones"}),
    "added padding": (add_padding, SOME, "causal", {"mask is ones"}),
    "both ways": (both_ways, SOME, "none", {"mask is ones"}),
    "packed": (pack_mask, SOME, "causal", {"mask is counting"}),
    "window of 5": (window(5), {}, "kept", set()),
    "chunks of 8": (chunks(8), {}, "kept", set()),
    "bfloat16": (round_mask(torch.bfloat16), {}, "kept", set()),
    "int8": (round_mask(torch.int8), {}, "kept", set()),
    "prefix": (prefix, {}, "kept", set()),
    "strict": (strict, {}, "kept", set()),
    "slope": (slope, {}, "kept", set()),
    "soft": (soft, {}, "kept", set()),
    "drawn": (sample_mask, {}, "kept", set()),
    "of values": (of_values, {}, "kept", set()),
}  # fmt: skip


def list_masks(graph: torch.fx.Graph) -> list[str]:
    """What each attention of a graph says."""
    words: list[str] = []
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        kept = (len(node.args) > 3 and node.args[3] is not None) or node.kwargs.get("attn_mask")
        words.append("kept" if kept else "causal" if node.kwargs.get("is_causal") else "none")
    return words


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_goes_where_it_is_proven(kind: str) -> None:
    make, given, says, conditions = KINDS[kind]
    program = capture(Attention(make).eval(), {"x": torch.randn(2, 11, 16), **given})
    graphs = remove_masks(program.graph, program.inputs, program.lifted)

    assert conditions == {str(c) for c in graphs[-1].conditions}
    assert [says] == list_masks(graphs[-1].graph)
    assert (["kept"] if conditions else [says]) == list_masks(graphs[0].graph)


@pytest.mark.slow
@pytest.mark.parametrize("length", [150, 200, 201, 260])
def test_a_window_is_kept_where_it_hides(length: int) -> None:
    torch.manual_seed(0)
    model, x = Attention(window(200)).eval(), torch.randn(2, length, 16)
    sharded = autotp.parallelize(model, tp=1, example_inputs={"x": x[:, :11]})
    (variant,) = sharded.variants.values()
    with torch.no_grad():
        torch.testing.assert_close(model(x), sharded(x))

    assert int(length <= 200) == variant.find_shorter({"x": x})


@pytest.mark.slow
def test_padding_is_seen_call_by_call() -> None:
    model, inputs = build("llama", num_hidden_layers=1)
    ids = inputs["input_ids"]
    ones = torch.ones_like(ids)
    left, right = ones.clone(), ones.clone()
    left[0, :5], right[1, 7:] = 0, 0
    given = {"input_ids": ids, "attention_mask": ones}
    sharded = autotp.parallelize(model, tp=1, example_inputs=given)
    (variant,) = sharded.variants.values()
    for mask, shorter in [(ones, 1), (left, 0), (right, 0), (ones[:, :1], 1)]:
        given = {"input_ids": ids[:, : mask.shape[1]], "attention_mask": mask}
        with torch.no_grad():
            expected, actual = model(**given).logits, sharded(**given).logits

        torch.testing.assert_close(expected[mask.bool()], actual[mask.bool()])
        assert shorter == variant.find_shorter(given)


@pytest.mark.slow
def test_calls_of_a_prompt_and_of_new_words_make_no_masks() -> None:
    model, inputs = build("llama", num_hidden_layers=1)
    ids = inputs["input_ids"]
    sharded = autotp.parallelize(model, tp=1, example_inputs={"input_ids": ids, "use_cache": True})
    with torch.no_grad():
        for given in ({}, {"past": 1}):
            mine: Any = sharded(input_ids=ids, use_cache=True)
            own: Any = model(input_ids=ids, use_cache=True)
            if given:
                mine = sharded(input_ids=ids[:, :1], cache=mine["cache"], use_cache=True)
                own = model(input_ids=ids[:, :1], cache=own["cache"], use_cache=True)
            torch.testing.assert_close(own.logits, mine.logits)
    said = [
        [word for graph in variant.outlined.layers.values() for word in list_masks(graph)]
        for variant in sharded.variants.values()
    ]

    assert [["causal"], ["none"]] == said


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (torch.ones(2, 3, dtype=torch.long), True),
        (torch.tensor([[True, True]]), True),
        (torch.tensor([[2, 1]]), False),
        (torch.tensor([[1, 0]]), False),
        (torch.ones(2, 3, dtype=torch.long, device="meta"), False),
        (torch.ones(2, 3, requires_grad=True), False),
        (nn.Parameter(torch.ones(2), requires_grad=False), False),
    ],
)
def test_only_what_can_be_read_is_plain(value: Tensor, holds: bool) -> None:
    assert holds == Plain("mask", "ones").holds({"mask": value})
