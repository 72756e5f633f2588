"""What capture refuses: the message says whose doing it is, and what to do."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import CaptureError
from tests.toys import MLP, Tokens


class Fussy(nn.Module):
    """Refuses some inputs, and returns what is no tensor for others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, boxed: bool = False) -> object:
        if x.shape[-1] != 8:
            raise ValueError(f"x has {x.shape[-1]} columns, not 8")
        return Box(self.linear(x)) if boxed else self.linear(x)


@dataclass
class Box:
    """What torch.export does not know."""

    inside: Tensor


def refusal(model: nn.Module, inputs: dict[str, Any], **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        autotp.plan(model, 2, example_inputs=inputs, **options)
    return str(caught.value)


def test_a_refusal_of_the_model_itself_is_told_as_such() -> None:
    message = refusal(Fussy(), {"x": torch.ones(3, 9)})

    assert "ValueError: x has 9 columns, not 8. The model's own code raises this error" in message


def test_an_output_that_is_no_tensor_is_told_as_such() -> None:
    message = refusal(Fussy(), {"x": torch.ones(3, 8), "boxed": True})

    assert "Make the model return only those" in message


X = {"x": torch.ones(2, 5, 24)}


class Starred(MLP):
    """Takes inputs without names."""

    def forward(self, *xs: Tensor) -> Tensor:
        return super().forward(xs[0])


@pytest.mark.parametrize("name", ["x", "xs"])
def test_inputs_without_names_are_told(name: str) -> None:
    message = refusal(Starred(24, 48), {name: X["x"]})

    assert "takes *xs, and inputs without names are not supported" in message


class Capped(nn.Module):
    """An embedding that is written to where it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16, max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_a_table_that_is_written_to_gets_true_advice() -> None:
    message = refusal(Capped().eval(), {"ids": torch.zeros(2, 3, dtype=torch.int64)})

    assert "max_norm" in message
    assert "eval()" not in message


class Recurrent(MLP):
    """Keeps the last tokens' values on itself, as recurrent models without a cache object do."""

    def __init__(self) -> None:
        super().__init__(24, 48)
        self.last = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        y = self.up(x)
        if use_cache:
            y = y + self.last if self.last is not None else y
            self.last = y[:, -1:]
        return self.down(y)


def test_state_that_a_module_keeps_by_itself_is_refused_and_not_lost() -> None:
    said = refusal(Recurrent(), X | {"use_cache": True})

    assert "the model stores last, a tensor of shape" in said
    assert "use_cache=False" in said
    assert autotp.plan(Recurrent(), 2, example_inputs=X | {"use_cache": False}).tp == 2


def test_sparse_gradients_are_refused() -> None:
    inputs = {"ids": torch.tensor([[0, 1, 2]])}
    message = refusal(Tokens(sparse=True), inputs, training=True)

    assert "sparse=True" in message
    assert autotp.verify(Tokens(sparse=True).eval(), 2, example_inputs=inputs).ok
