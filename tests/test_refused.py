"""What a second stranger broke: numbers that were wrong in silence; each right or refused since."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import CaptureError


class Mlp(nn.Module):
    """Two products; what is around them is up to the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def body(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batch(size: int = 2, length: int = 5) -> Tensor:
    torch.manual_seed(size * 100 + length)
    return torch.randn(size, length, 24)


class OneSentence(Mlp):
    """Treats a batch of 1 otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 3 if x.shape[0] == 1 else y


class OneWord(Mlp):
    """Treats a sequence of 1 otherwise, in other words."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.shape[1] - 1 else self.body(x) + 1


class OneInAll(Mlp):
    """Treats a single vector otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y - 1 if x.shape[0] * x.shape[1] in (1, 3) else y


class Squeezed(Mlp):
    """Drops dims of size 1, whichever they are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze()


@pytest.mark.parametrize("first", [(2, 5), (1, 5), (1, 1)])
@pytest.mark.parametrize("kind", [OneSentence, OneWord, OneInAll, Squeezed])
def test_a_size_of_1_takes_its_own_way(kind: type[Mlp], first: tuple[int, int]) -> None:
    model = kind().eval()
    sharded = autotp.parallelize(model, 1, example_inputs={"x": batch(*first)})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1), (4, 3), (1, 3)]:
        x = batch(*sizes)
        torch.testing.assert_close(sharded(x), model(x))


def test_a_model_that_does_not_ask_has_one_graph_for_all_sizes() -> None:
    sharded = autotp.parallelize(Mlp().eval(), 1, example_inputs={"x": batch()})

    for sizes in [(2, 5), (1, 5), (2, 1), (1, 1)]:
        sharded(batch(*sizes))
    assert 1 == len(sharded.variants)


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it had not."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(Mlp):
    """A quantised model in training."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Straight.apply(self.up(x)))


def test_a_backward_written_by_hand_is_refused_where_gradients_are_wanted() -> None:
    inputs = {"x": batch()}
    with pytest.raises(CaptureError, match=r"Straight .*Straight\.apply\(self\.up\(x\)\)"):
        autotp.plan(Rounded(), 2, example_inputs=inputs, training=True)

    assert autotp.verify(Rounded().eval(), 2, example_inputs=inputs).ok


class Words(nn.Module):
    """A table whose gradient depends on all words, or is sparse."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(24, 16, **options), nn.Linear(16, 24, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(functional.gelu(self.table(ids)))


def test_a_gradient_scaled_by_frequency_keeps_the_rows_whole() -> None:
    inputs = {"ids": torch.tensor([[0, 0, 1, 2], [2, 2, 13, 13]])}
    model = Words(scale_grad_by_freq=True)
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert evidence.ok
    rows = {"table.weight": "vocabulary"}
    with pytest.raises(autotp.PlanError, match="Possible for it are column"):
        autotp.plan(model, 2, example_inputs=inputs, training=True, overrides=rows)


def test_sparse_gradients_are_refused() -> None:
    inputs = {"ids": torch.tensor([[0, 1, 2]])}
    with pytest.raises(CaptureError, match="sparse=True"):
        autotp.plan(Words(sparse=True), 2, example_inputs=inputs, training=True)

    assert autotp.verify(Words(sparse=True).eval(), 2, example_inputs=inputs).ok
