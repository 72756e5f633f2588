"""What a capture leaves in the place of what would be slow, or would tie what is free."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.capture.capture import capture

aten = torch.ops.aten
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "type_as": lambda x, y: x.type_as(y),
    "to": lambda x, y: x.to(y),
    "aten.to.other": lambda x, y: aten.to.other(x, y, copy=True),
    "new_zeros": lambda x, y: x + y.new_zeros(x.shape),
    "new_empty": lambda x, y: x + y.new_empty(x.shape).fill_(2),
    "new_ones": lambda x, y: x + y.new_ones(x.shape, dtype=torch.int64),
    "new_full": lambda x, y: x + y.new_full(x.shape[1:], 0.5),
}
"""Functions that read a dtype and a device of their second argument, and no value and no size."""


class Last(nn.Module):
    """Logits of the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden[:, -1:])


class Reading(nn.Module):
    """A function of the input and of a layer's result."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=dtype)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        y = self.layer(hidden.to(self.layer.weight.dtype))
        return self.function(hidden, y)


class HeadNorm(nn.Module):
    """A norm of each head, computed in float32, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.up(hidden).unflatten(-1, (8, 8))
        wide = heads.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.down(normed.type_as(heads).flatten(-2))


def test_a_linear_layer_of_a_slice_takes_it_in_one_piece() -> None:
    nodes = list(capture(Last(), {"hidden": torch.randn(4, 6, 8)}).graph.nodes)
    linear = next(n for n in nodes if n.target is torch.ops.aten.linear.default)
    taken = linear.all_input_nodes[0]

    assert torch.ops.aten.contiguous.default is taken.target
    assert torch.ops.aten.slice.Tensor is taken.all_input_nodes[0].target


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", READ.values(), ids=READ)
def test_what_gives_a_dtype_only_is_not_read(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model, hidden = Reading(function, dtype), torch.randn(4, 6, 8)
    expected = model(hidden)
    sharded = autotp.parallelize(model, 1, example_inputs={"hidden": hidden}, training=False)
    found = sharded(hidden=hidden)
    graph = capture(model, {"hidden": hidden}).graph

    assert [] == graph.find_nodes(op="get_attr")  # the layer is dead
    assert expected.dtype == found.dtype
    assert torch.equal(expected, found)


@pytest.mark.parametrize("training", [False, True])
def test_a_sharded_value_is_not_gathered_for_its_dtype(training: bool) -> None:
    plans = [
        autotp.plan(
            HeadNorm().to(dtype),
            2,
            example_inputs={"hidden": torch.randn(4, 6, 16, dtype=dtype)},
            training=training,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    layouts = [{n: (p.layout, p.dim) for n, p in plan.parameters.items()} for plan in plans]
    kinds = [[(c.kind, c.phase) for c in plan.collectives] for plan in plans]

    assert ("column", 0) == layouts[0]["up.weight"]
    assert [layouts[0]] * 2 == layouts
    assert [[("all_reduce", "forward")]] * 2 == kinds
