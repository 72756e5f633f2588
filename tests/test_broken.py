"""What a stranger broke: wrong numbers, crashes, plans that could be better; each mended since."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.capture.capture import capture
from autotp.capture.program import broken_guard
from autotp.capture.source_model import skeleton
from autotp.errors import CaptureError


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


def refusal(**inputs: object) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Fussy(), inputs)
    return str(caught.value)


def test_a_refusal_of_the_model_itself_is_told_as_such() -> None:
    message = refusal(x=torch.ones(3, 9))

    assert "ValueError: x has 9 columns, not 8. The model's own code raises that" in message


def test_an_output_that_is_no_tensor_is_told_as_such() -> None:
    assert "Ask the model for such outputs" in refusal(x=torch.ones(3, 8), boxed=True)


class Table(nn.Module):
    """Reads its table by indexing, from both ends, and writes with the same or another."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, 8))
        self.head = self.table if tied else nn.Parameter(torch.randn(24, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return functional.layer_norm(self.table[ids], [8]) @ self.head.T


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_read_by_indexing_is_a_lookup(tied: bool) -> None:
    inputs = {"ids": torch.tensor([[0, 11, 12, 23], [-1, -24, -12, -13]])}
    evidence = autotp.verify(Table(tied=tied), 3, example_inputs=inputs, training=True)

    assert evidence.ok
    assert 0.0 == evidence.replicated_fraction


class Gated(nn.Module):
    """A gated convolution of a sequence: the two halves of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 24, 1), nn.Conv1d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.glu(self.up(x), dim=1))


def test_the_halves_of_a_gate_are_split_together() -> None:
    evidence = autotp.verify(Gated(), 3, example_inputs={"x": torch.randn(2, 8, 5)}, training=True)

    assert evidence.ok
    assert 0.1 > evidence.replicated_fraction


class Classifier(nn.Module):
    """A loss by hand: logarithms of probabilities, and the right class of each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 24)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        picked = self.head(x).log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return -picked.mean()


def test_an_axis_that_reaches_logarithms_of_probabilities_is_a_vocabulary() -> None:
    inputs = {"x": torch.randn(2, 5, 8), "labels": torch.randint(0, 24, (2, 5))}
    plan = autotp.plan(Classifier(), 2, example_inputs=inputs, training=True)

    assert "vocabulary" == plan.parameters["head.weight"].layout


class Biased(nn.Module):
    """Attention whose bias is built by head from another input: its heads are known by a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        slopes = torch.arange(1, 5)
        bias = (slopes[None, :, None] * mask[:, None, :].float()).reshape(mask.shape[0] * 4, 1, -1)
        size = (x.shape[0], x.shape[1], 4, 8)
        q, k, v = (t.reshape(size).transpose(1, 2) for t in self.fused(x).chunk(3, dim=-1))
        bias = bias.view(x.shape[0], -1, 1, x.shape[1])
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def test_a_size_that_a_guard_proves_is_a_number_of_heads() -> None:
    inputs = {"x": torch.randn(2, 5, 32), "mask": torch.ones(2, 5)}
    evidence = autotp.verify(Biased(), 4, example_inputs=inputs, training=True)

    assert evidence.ok
    assert 0.01 > evidence.replicated_fraction


class Joined(nn.Module):
    """One product of two streams beside each other, with a bias that is added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(20, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x).cumsum(-2), functional.gelu(self.two(x))
        return functional.linear(torch.cat([one, two], -1), self.out.weight) + self.bias


def test_what_stays_whole_is_told_the_right_reason() -> None:
    plan = autotp.plan(Joined(), 8, example_inputs={"x": torch.randn(2, 5, 8)}, training=True)
    reason = plan.parameters["out.weight"].reason

    assert "along dim 1 (16): aten.linear.default at linear_2 (test_broken.py:" in reason
    assert "sums over it beside pieces that are not cut with it" in reason
    assert "norm" != plan.parameters["bias"].layout


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

    assert broken_guard(program, inputs) is None
    assert program.dynamic or "takes no sizes but" in program.reason
