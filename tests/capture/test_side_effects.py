"""What forwards do beside computing: they keep what they made, assert, map over rows, cache."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.capture.capture import capture
from autotp.errors import CaptureError
from tests import models
from tests.toys import MLP, Bounded, batch


class Plain:
    """An object that is no module, and keeps a table for the next call."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}


class Keeps(nn.Module):
    """Its forward sets attributes: a size, a tensor in a list, one in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.pooled: Any = None
        self.history: list[Any] = ["made"]
        self.plain = Plain()
        self.names = {"a", "b"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pooled = self.length = x.shape[1]
        scale = torch.arange(x.shape[1])[:, None] / self.length
        self.history.append(scale)
        self.plain.known["scale"] = scale
        self.names.discard("a")
        self.linear.calls = x.shape[0]
        return self.linear(x) * scale


def test_what_a_forward_keeps_is_taken_back() -> None:
    model = Keeps().eval()
    before = [dict(vars(m)) for m in model.modules()]
    program = capture(model, {"x": torch.randn(2, 6, 8)})
    after = [dict(vars(m)) for m in model.modules()]
    x = torch.randn(4, 5, 8)
    copied = copy.deepcopy(model)

    assert [list(kept) for kept in before] == [list(kept) for kept in after]
    assert (None, ["made"], {}, {"a", "b"}) == (
        model.pooled, model.history, model.plain.known, model.names
    )  # fmt: skip
    assert torch.equal(copied(x), models.run_program(model, program, {"x": x}))


@pytest.mark.parametrize("how", ["assert", "raise"])
def test_what_is_asserted_of_values_is_asserted_by_the_ranks(how: str) -> None:
    model = Bounded(how).eval()
    ids = torch.randint(1, 512, (2, 6))
    evidence = autotp.verify(model, tp=2, example_inputs={"ids": ids})
    program = capture(model, {"ids": ids})
    short = torch.randint(1, 512, (4, 2))

    assert evidence.ok
    assert torch.equal(model(ids), models.run_program(model, program, {"ids": ids}))
    with pytest.raises(RuntimeError, match="assertion failed"):
        models.run_program(model, program, {"ids": short})


def test_a_branch_on_values_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"lengths.min\(\).item\(\) < 3"):
        capture(Bounded("branch").eval(), {"ids": torch.randint(1, 512, (2, 6))})


class Mapped(nn.Module):
    """A mask made row by row, by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        near = torch.vmap(torch.vmap(lambda q, k: (q - k).abs() < 3, (None, 0)), (0, None))
        y = self.linear(x)
        y[:, 0] = 1
        return near(places, places).to(y.dtype) @ y


def test_vmap_is_captured() -> None:
    model = Mapped().eval()
    program = capture(model, {"x": torch.randn(2, 6, 8)})
    x = torch.randn(3, 9, 8)

    assert program.dynamic
    assert torch.equal(model(x), models.run_program(model, program, {"x": x}))


class Fresh(MLP):
    """It joins its keys to a cache that is empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.tensor([], dtype=x.dtype, device=x.device)
        return self.down(torch.cat([kept, self.up(x)], dim=-2).relu())


def test_an_empty_cache_adds_nothing() -> None:
    plan = autotp.plan(Fresh(64, 256).eval(), tp=2, example_inputs={"x": torch.randn(2, 6, 64)})

    assert {"mlp"} == {pair.role for pair in plan.pairs if pair.split}
    assert () == plan.unruled


def test_what_a_call_left_on_a_module_is_no_hindrance() -> None:
    model, inputs = MLP(24, 48), {"x": batch()}
    vars(model)["last"] = [model(**inputs)]
    evidence = autotp.verify(model, 2, example_inputs=inputs, training=True)

    assert model.last[0].requires_grad
    assert evidence.ok
