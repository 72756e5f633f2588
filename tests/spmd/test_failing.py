"""Ranks that are killed, that hang or fail alone: the others say so, in time, and end."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp import loading
from tests.models import build
from tests.spmd.failing import End, ends
from tests.toys import MLP

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 6, 7, 8]])
CALL = {"do_sample": False, "max_new_tokens": 6, "attention_mask": torch.ones_like(IDS)}


class Pair(MLP):
    """A pair, and sums both ways."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 16, torch.relu)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sharded(world: int, **options: Any) -> nn.Module:
    x = {"x": torch.ones(2, 3, 8)}
    return autotp.parallelize(Pair(), world, example_inputs=x, **options)


def dying_in_a_call(rank: int, world: int) -> None:
    model = sharded(world, training=False)
    if rank == world - 1:
        model.register_forward_pre_hook(die)
    model(torch.ones(2, 3, 8))


def dying_in_the_backward_pass(rank: int, world: int) -> None:
    model = sharded(world, training=True)
    x = torch.ones(2, 3, 8, requires_grad=True)
    loss = model(x).sum()
    if rank == 1:
        die()
    loss.backward()


def late(rank: int, world: int) -> None:
    model = sharded(world, training=False, timeout=2)
    if rank == 1:
        time.sleep(4)
    model(torch.ones(2, 3, 8))


def failing_alone(rank: int, world: int) -> str:
    model = sharded(world, training=False, timeout=3.0)
    if rank == 0:
        model(torch.ones(2, 3, 8))
    try:
        model(torch.ones(2, 3, 9))
    except Exception as error:  # noqa: BLE001  whatever it is, it is kept from the others
        time.sleep(5)
        return type(error).__name__
    return ""


def first_line(end: End) -> str:
    return end.raised.partition("\n")[0]


def test_of_three_ranks_one_is_killed_in_a_call() -> None:
    *others, killed = ends(3, dying_in_a_call)

    assert -signal.SIGKILL == killed.code
    for rank, end in enumerate(others):
        assert 1 == end.code
        whom = [r for r in range(3) if r != rank]
        assert first_line(end).startswith("GroupError: Pair, the model: down")
        assert f"rank {rank} of 3 waited for one of ranks {whom}, which closed" in end.raised
        assert "s after this began (torch: " in end.raised
        assert "Look for the first error in the other ranks' output" in end.raised
        assert "The above exception was the direct cause" in end.raised


def test_a_rank_is_killed_in_the_backward_pass() -> None:
    left, killed = ends(2, dying_in_the_backward_pass)

    assert (1, -signal.SIGKILL) == (left.code, killed.code)
    assert first_line(left).startswith("GroupError: the backward pass, ")
    assert "rank 0 of 2 waited for rank 1, which closed its connection" in left.raised


def test_a_late_rank_is_given_up_after_the_timeout() -> None:
    """The limit given to autotp, not the minute with which the group was made."""
    left, behind = ends(2, late)

    assert 1 == left.code
    assert "waited for rank 1, which did not arrive within 2 s, the group's timeout" in left.raised
    assert "a longer timeout=" in left.raised
    assert "GroupError" in behind.raised
    assert "waited for rank 0, which closed its connection" in behind.raised


def test_what_fails_on_one_rank_alone_is_told_to_those_who_waited() -> None:
    waited, failed = ends(2, failing_alone)

    assert (1, 0) == (waited.code, failed.code)
    assert "did not arrive within 3 s" in waited.raised
    assert f"s ago: {failed.returned}: " in waited.raised
    assert failed.returned


class Killer:
    """A streamer that kills its process at the third word."""

    def __init__(self, last: int) -> None:
        self.left = last

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            die()

    def end(self) -> None:
        pass


def dying(rank: int, world: int, directory: Path, when: str) -> None:
    if rank == 1 and when == "reading weights":
        loading.read_shards = die
    model: Any = autotp.from_pretrained(directory, world)
    model.generate(IDS, **CALL, streamer=Killer(4) if rank == 1 else None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    build("llama", num_hidden_layers=1)[0].save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("when", "where"),
    [
        ("reading weights", "reading weights: rank 0 of 2 waited for rank 1"),
        ("generating", "LlamaForCausalLM, "),
    ],
)
def test_a_rank_is_killed(directory: Path, when: str, where: str) -> None:
    left, killed = ends(2, dying, directory, when)

    assert (1, -signal.SIGKILL) == (left.code, killed.code)
    assert first_line(left).startswith(f"GroupError: {where}")
    assert "rank 0 of 2 waited for rank 1, which closed its connection" in left.raised
