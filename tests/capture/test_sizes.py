"""Sizes that decide what a model does: each graph is used for the sizes that it is right for."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.capture.capture import capture
from autotp.capture.program import find_broken_guard
from tests.toys import MLP, batch


class OneSentence(MLP):
    """Treats a batch of 1 otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 3 if x.shape[0] == 1 else y


class OneWord(MLP):
    """Treats a sequence of 1 otherwise, in other words."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.shape[1] - 1 else self.body(x) + 1


class OneInAll(MLP):
    """Treats a single vector otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y - 1 if x.shape[0] * x.shape[1] in (1, 3) else y


class Squeezed(MLP):
    """Drops dims of size 1, whichever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


@pytest.mark.slow
@pytest.mark.parametrize("first", [(2, 5), (1, 1)])
@pytest.mark.parametrize("kind", [OneSentence, OneWord, OneInAll, Squeezed])
def test_a_size_of_1_takes_its_own_way(kind: type[MLP], first: tuple[int, int]) -> None:
    model = kind(24, 48).eval()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch(*first)})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1), (4, 3), (1, 3)]:
        x = batch(*sizes)
        torch.testing.assert_close(sharded(x), model(x))


def test_a_model_that_does_not_ask_has_one_graph_for_all_sizes() -> None:
    sharded = autotp.parallelize(MLP(24, 48).eval(), 1, example_inputs={"x": batch()})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1)]:
        sharded(batch(*sizes))
    assert 1 == len(sharded.variants)


class Chunked(nn.Module):
    """Pads the sequence to chunks of 8 and asks, in Python, whether it had to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % 8
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
        return self.linear(padded)[:, : x.shape[1]].cumsum(1)


@pytest.mark.parametrize("length", [7, 8, 12, 16])
def test_sizes_that_a_free_graph_does_not_take_get_one_of_their_own(length: int) -> None:
    inputs = {"x": torch.randn(2, length, 8)}
    program = capture(Chunked(), inputs)

    assert find_broken_guard(program, inputs) is None
    assert program.dynamic or "its free graph requires" in program.reason
