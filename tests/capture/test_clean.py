"""What a capture's clean-up leaves in the place of what would be slow."""

import torch
from torch import Tensor, nn

from autotp.capture.capture import capture


class Last(nn.Module):
    """Logits of the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden[:, -1:])


def test_a_linear_layer_of_a_slice_takes_it_in_one_piece() -> None:
    nodes = list(capture(Last(), {"hidden": torch.randn(4, 6, 8)}).graph.nodes)
    linear = next(n for n in nodes if n.target is torch.ops.aten.linear.default)
    taken = linear.all_input_nodes[0]

    assert torch.ops.aten.contiguous.default is taken.target
    assert torch.ops.aten.slice.Tensor is taken.all_input_nodes[0].target
