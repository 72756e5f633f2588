"""What a stranger broke: inputs that gave wrong numbers, crashes or a wrong plan, mended since."""

import torch
from torch import Tensor, nn

from autotp.passes.capture import capture
from autotp.whole import skeleton


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
    bare = skeleton(model)
    whole, hollow = capture(model, x), capture(bare, x)

    assert str(whole.graph) == str(hollow.graph)
    assert [[3, 5]] == [t.tolist() for t in hollow.lifted.values()]
    assert [0, 0] == [p.untyped_storage().nbytes() for p in bare.parameters()]
