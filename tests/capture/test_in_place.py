"""What writes to memory is right, or refused with its name: never wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import CaptureError
from autotp.records.evidence import Evidence
from tests.toys import MLP, vectors

WIDTH, INNER = 16, 24


class Written(MLP):
    """Two layers, and between them a function that writes to memory."""

    def __init__(self, write: Callable[["Written", Tensor], Tensor]) -> None:
        super().__init__(WIDTH, INNER)
        self.other, self.write = nn.Linear(WIDTH, INNER), write
        self.norm = nn.BatchNorm1d(INNER)
        self.register_buffer("seen", torch.zeros(INNER))
        self.register_buffer("table", torch.ones(5, INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.write(self, x))


def added(m: Written, x: Tensor) -> Tensor:
    y = m.up(x)
    y.add_(m.other(x)).mul_(2)
    return y


def activated(m: Written, x: Tensor) -> Tensor:
    return functional.relu(m.up(x), inplace=True)


def read_before(m: Written, x: Tensor) -> Tensor:
    y = m.up(x)
    before = y * 3
    y.mul_(0.5)
    return before + y


def through_a_view(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).clone()
    y[..., : INNER // 2].add_(1.5)
    y.view(-1, INNER)[:, INNER // 2 :].mul_(3)
    return y


def read_through_a_view(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).clone()
    half = y[..., : INNER // 2]
    y.mul_(2)
    return torch.cat([half, half], -1)


def masked(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).clone()
    return y.masked_fill_(m.other(x) > 0, 0.25)


def indexed(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).clone()
    y[:, torch.tensor([0, 2])] = 0.5
    y.index_put_((torch.tensor([1]),), m.other(x)[1:2])
    return y


def accumulated(m: Written, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], x.shape[1], INNER)
    for layer in (m.up, m.other):
        y += layer(x)
    return y


def filled(m: Written, x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[1], INNER)
    y.copy_(m.up(x))
    y[:, 0].copy_(m.other(x)[:, 0])
    return y


def filled_by_piece(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).new_zeros(x.shape[0], x.shape[1], INNER)
    y[..., : INNER // 2] = m.up(x)[..., : INNER // 2]
    y[..., INNER // 2 :] = m.other(x)[..., INNER // 2 :]
    return y


def given_out(m: Written, x: Tensor) -> Tensor:
    y = m.up(x).detach()
    torch.mul(y, 2, out=y)
    return y + m.other(x)


def written_input(m: Written, x: Tensor) -> Tensor:
    x.mul_(2)
    return m.up(x)


def written_data(m: Written, x: Tensor) -> Tensor:
    y = m.up(x)
    y.data.mul_(2)
    return y


def written_parameter(m: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.up.weight.mul_(1.01)
    return m.up(x)


def counted(m: Written, x: Tensor) -> Tensor:
    y = m.up(x)
    m.seen.add_(y.detach().mean((0, 1)))
    return y + m.seen


def normalised(m: Written, x: Tensor) -> Tensor:
    return m.norm(m.up(x).flatten(0, 1)).view(x.shape[0], x.shape[1], INNER)


def remembered(m: Written, x: Tensor) -> Tensor:
    m.table[1:3] = m.up(x)[0, :2].detach()
    return m.other(x) + m.table[2]


RIGHT = (
    added, activated, read_before, through_a_view, read_through_a_view, masked, indexed,
    accumulated, filled, filled_by_piece, given_out,
)  # fmt: skip
REFUSED = {
    written_input: "writes to 'x', which outlives the call",
    written_data: "cannot capture it",
    written_parameter: "writes to 'up.weight', which outlives the call",
    counted: "writes to 'seen', which outlives the call",
    normalised: "writes to 'norm.running_mean', which outlives the call.*Call eval",
    remembered: "writes to 'table', which outlives the call",
}


def proven(write: Callable[[Written, Tensor], Tensor], *, mode: bool) -> Evidence:
    torch.manual_seed(0)
    model, inputs = Written(write).train(mode), {"x": torch.randn(3, 4, WIDTH)}
    return autotp.verify(model, 2, example_inputs=inputs, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("write", RIGHT)
def test_what_writes_to_memory_of_its_own_equals_the_whole_model(
    write: Callable[[Written, Tensor], Tensor],
) -> None:
    evidence = proven(write, mode=True)

    assert evidence.ok, evidence


@pytest.mark.slow
@pytest.mark.parametrize("write", REFUSED)
def test_what_outlives_the_call_is_refused_by_name(
    write: Callable[[Written, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match=REFUSED[write]):
        proven(write, mode=True)


def test_statistics_that_are_only_read_are_no_hindrance() -> None:
    evidence = proven(normalised, mode=False)

    assert evidence.ok, evidence


class Mapped(MLP):
    """Counts with vmap, as masks are made, and writes in place."""

    def inner(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        seen = torch.vmap(lambda i: torch.vmap(lambda j: i >= j)(places))(places)
        x = x.clone()
        x[:, 0] = 0
        return x * seen.sum(-1, keepdim=True)


@pytest.mark.slow
def test_a_value_inside_vmap_is_no_obstacle_to_writing_in_place() -> None:
    evidence = autotp.verify(Mapped(), 2, example_inputs=vectors(2, 6, 16), training=True)

    assert evidence.ok, evidence.first_divergence
