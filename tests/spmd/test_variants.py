"""Variants in real processes: one call unlike the last, and each what the whole model gives."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.records.plan import Plan
from tests.models import build
from tests.spmd.beside import (
    TOLERANCE,
    Call,
    Ran,
    differences,
    inputs_of,
    loss_of,
    run,
    wrong_gradients,
)
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

NAME = "gpt_neox"
SIZES = {"num_hidden_layers": 1, "attention_dropout": 0.2, "hidden_dropout": 0.2}
PRICED = Call(2, 12)
# each unlike the one before; the first is the one planned for, and comes again
CALLS = (
    PRICED,
    Call(2, 9, labels=False, seed=1),
    Call(2, 9, labels=False, mask=False, seed=2),
    Call(1, 7, padded=True, seed=3),
    Call(2, 9, labels=False, seed=4, more={"logits_to_keep": 1}),
    PRICED,
)


@dataclass
class Story:
    """What one model, whole or one rank's, gave in the course of the same calls.

    - `runs`: of `CALLS`. `embedded`: of a call with embeddings, whose gradient is `inward`.
    - `interleaved`: gradients after two calls whose backward passes ran in the other order.
    - `dropped`: outputs in training mode, under one seed, the same again, and another.
    - `after`: the first call once more, back in evaluation mode.
    """

    runs: list[Ran]
    embedded: Ran
    inward: Tensor
    interleaved: dict[str, Tensor]
    dropped: list[Tensor]
    after: Ran


def story(model: nn.Module) -> Story:
    """The calls in their order."""
    runs = [run(model, inputs_of(NAME, call), backward=True) for call in CALLS]
    inputs = with_embeddings(inputs_of(NAME, Call(2, 6)))
    embedded = run(model, inputs, backward=True)
    interleaved = interleaved_gradients(model)
    model.train()
    dropped = [outputs_under(model, seed) for seed in (1, 1, 2)]
    model.eval()
    after = run(model, inputs_of(NAME, PRICED), backward=True)
    return Story(runs, embedded, inputs["inputs_embeds"].grad, interleaved, dropped, after)


def with_embeddings(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same call with random embeddings in the place of words."""
    shape = (*inputs.pop("input_ids").shape, 64)
    generator = torch.Generator().manual_seed(7)
    return inputs | {"inputs_embeds": torch.randn(shape, generator=generator).requires_grad_()}


def interleaved_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of two variants whose forward passes both ran before either's backward."""
    model.zero_grad()
    first, second = (model(**inputs_of(NAME, call)) for call in CALLS[:2])
    loss_of(second).backward()
    loss_of(first).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def outputs_under(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return model(**inputs_of(NAME, PRICED)).logits.detach()


def shards_story(rank: int, world: int) -> tuple[str, list[str], Story]:
    """The plan, the variants captured, and what this rank gave, the whole model being gone."""
    model, _ = build(NAME, **SIZES)
    sharded: Any = autotp.parallelize(
        model, world, example_inputs=inputs_of(NAME, PRICED), training=True
    )
    del model
    gc.collect()
    found = story(sharded)
    return sharded.plan.to_json(), list(sharded.plans), found


@dataclass
class Both:
    """The whole model's story, the ranks', their plan and variants."""

    whole: Story
    ranks: list[Story]
    plan: Plan
    variants: list[list[str]]


@pytest.fixture(scope="module")
def both(pool: Callable[[int], Pool]) -> Both:
    whole, _ = build(NAME, **SIZES)
    texts, variants, ranks = zip(*pool(2).run(shards_story), strict=True)
    return Both(story(whole), list(ranks), Plan.from_json(texts[0]), list(variants))


def same(both: Both, take: Callable[[Story], Ran]) -> None:
    """Asserts that outputs and gradients of one call are the whole model's."""
    expected, runs = take(both.whole), [take(rank) for rank in both.ranks]
    for found in runs:
        assert all(d <= TOLERANCE for d in differences(expected.outputs, found.outputs))
    gradients = [found.gradients for found in runs]
    assert {} == wrong_gradients(both.plan, expected.gradients, gradients, TOLERANCE)


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_each_variant_right_after_the_other(both: Both, number: int) -> None:
    same(both, lambda story: story.runs[number])


def test_variants_are_captured_once_each(both: Both) -> None:
    words = [
        "attention_mask, input_ids, labels · eval",
        "attention_mask, input_ids · eval",
        "input_ids · eval",
        "attention_mask, input_ids, logits_to_keep=1 · eval",
        "attention_mask, inputs_embeds with gradient, labels · eval",
        "attention_mask, input_ids, labels · train",
    ]

    assert [words, words] == both.variants


def test_embeddings_as_inputs_get_their_gradient(both: Both) -> None:
    same(both, lambda story: story.embedded)
    inward = [rank.inward for rank in both.ranks]

    assert torch.equal(*inward)
    assert differences([both.whole.inward], inward[:1])[0] <= TOLERANCE


def test_backward_passes_in_the_other_order(both: Both) -> None:
    gradients = [rank.interleaved for rank in both.ranks]

    assert {} == wrong_gradients(both.plan, both.whole.interleaved, gradients, TOLERANCE)


def test_dropout_is_on_in_training_mode_and_equal_on_all_ranks(both: Both) -> None:
    first, second = (rank.dropped for rank in both.ranks)

    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    assert torch.equal(first[0], first[1])
    assert differences(first[:1], first[2:])[0] > 0.01
    assert differences(both.whole.runs[0].outputs[1:2], first[:1])[0] > 0.01


def test_dropout_is_off_again_in_evaluation(both: Both) -> None:
    same(both, lambda story: story.after)
    for rank in both.ranks:
        assert all(
            torch.equal(*pair)
            for pair in zip(rank.runs[0].outputs, rank.after.outputs, strict=True)
        )
