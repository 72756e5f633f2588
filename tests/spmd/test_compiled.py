"""Compiled calls in real processes: the whole model's words and gradients, one graph each, once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import autotp
from tests.models import build
from tests.spmd.pool import Pool

Pools = Callable[[int], Pool]
IDS = torch.arange(3, 17).reshape(2, 7)
ASKED = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def whole() -> Any:
    return build("llama", num_hidden_layers=1)[0]


def words(model: Any, count: int) -> list[list[int]]:
    """What follows IDS, greedily."""
    return model.generate(IDS, max_new_tokens=count, **ASKED).tolist()


def stepped(model: Any, compiled: Any, count: int) -> list[int]:
    """The same of the first row, call by call, and the logits' rows that it came from."""
    call: Any = compiled(input_ids=IDS, use_cache=True)
    found: list[Tensor] = []
    for _ in range(count):
        found.append(call.logits[:, -1].argmax(-1))
        call = compiled(input_ids=found[-1][:, None], cache=call["cache"], use_cache=True)
    return torch.cat([IDS, torch.stack(found, 1)], 1).tolist()


def generated(rank: int, world: int) -> tuple[list[Any], list[int]]:
    """Words by `compile()` and by torch.compile around the model, and graphs compiled so far."""
    sharded = autotp.parallelize(whole(), example_inputs={"input_ids": IDS})
    ways, counts = CompileCounterWithBackend("aot_eager"), []
    sharded.compile(fullgraph=True, backend=ways)
    made = [words(sharded, 3)]
    counts.append(ways.frame_count)
    made.append(words(sharded, 14))
    counts.append(ways.frame_count)
    sharded.prepare(input_ids=IDS, use_cache=True)
    ways = CompileCounterWithBackend("eager")
    with torch.no_grad():
        first = sharded(input_ids=IDS, use_cache=True)
        sharded.prepare(input_ids=IDS[:, :1], cache=first["cache"], use_cache=True)
        outside = torch.compile(sharded, fullgraph=True, backend=ways)
        made.append(stepped(sharded, outside, 3))
        counts.append(ways.frame_count)
        made.append(stepped(sharded, outside, 14))
        counts.append(ways.frame_count)
    return made, counts


def test_compiled_calls_with_a_cache_give_the_words_of_the_whole_model(pool: Pools) -> None:
    few, many = words(whole(), 3), words(whole(), 14)
    for made, counts in pool(2).run(generated):
        assert [few, many, few, many] == made
        assert counts[0] == counts[1] <= 3  # no step compiles anew
        assert counts[2] == counts[3] <= 3


def trained(rank: int, world: int) -> tuple[float, dict[str, Tensor]]:
    sharded = autotp.parallelize(whole(), training=True)
    sharded.compile(fullgraph=True, backend="aot_eager")
    loss = sharded(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in sharded.named_parameters() if "norm" in n}


def test_a_compiled_training_step_gives_the_gradients_of_the_whole_model(pool: Pools) -> None:
    model = whole()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    for mine, gradients in pool(2).run(trained):
        torch.testing.assert_close(loss.item(), mine)
        for name, gradient in gradients.items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient)
