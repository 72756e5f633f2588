"""A copy of a model without values: captured like the model, and no memory is taken for it."""

import pytest
import torch
from torch import Tensor, nn

from autotp.capture.capture import capture
from autotp.capture.source_model import copy_without_memory


class Picky(nn.Module):
    """Its forward makes a constant and asks for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kind = torch.float32 if x.device.type == "cpu" else torch.float64
        return self.linear(x)[..., [3, 5]].to(kind)


def test_a_copy_without_values_is_captured_as_the_model_itself() -> None:
    model, x = Picky(), {"x": torch.randn(3, 4, 8)}
    bare = copy_without_memory(model)
    whole, hollow = capture(model, x), capture(bare, x)

    assert str(whole.graph) == str(hollow.graph)
    assert [[3, 5]] == [t.tolist() for t in hollow.lifted.values()]
    assert [0, 0] == [p.untyped_storage().nbytes() for p in bare.parameters()]


def test_a_model_without_values_is_given_none_to_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Size] = []
    zeros = torch.zeros_like
    monkeypatch.setattr(
        torch, "zeros_like", lambda x, **how: made.append(x.shape) or zeros(x, **how)
    )
    with torch.device("meta"):
        model = nn.Linear(4, 8)
        model.held = torch.ones(3)
    copy = copy_without_memory(model)

    assert [torch.Size([3])] == made
    assert {0} == {p.untyped_storage().nbytes() for p in copy.parameters()}
