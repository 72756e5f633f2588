"""The dtype in which ranks' parts are summed: never narrower than the values, and paid for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.api import parallelize
from autotp.dtypes import choose_sum_dtype
from autotp.errors import PlanError
from autotp.records.plan import BUCKET, Plan
from autotp.verification.simulate import simulate
from tests.models import build
from tests.toys import MLP

NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.int64, torch.float32, torch.int64),
    ],
)
def test_sums_are_made_in_the_wider(
    own: torch.dtype, wanted: torch.dtype | None, expected: torch.dtype
) -> None:
    assert expected == choose_sum_dtype(own, wanted)


class Layers(MLP):
    """A pair with sums forward and backward; `wide` computes the norm in float32, as many do."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__(16, 32, torch.tanh)
        self.norm = nn.Parameter(torch.rand(16))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype) * self.norm
        return x + self.body(y)


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)}


def ledger(plan: Plan) -> list[tuple[str, str, int]]:
    return [(c.kind, c.where, c.payload_bytes) for c in plan.collectives]


def payloads(plan: Plan) -> list[tuple[str, str, int]]:
    return [(c.kind, c.phase, c.payload_bytes) for c in plan.collectives]


def test_the_plan_counts_the_bytes_that_are_summed() -> None:
    """A sum in float32 whose parts are gathered in bfloat16 moves less than an all-reduce."""
    asked: dict[str, Any] = {"example_inputs": inputs(torch.bfloat16), "training": False}
    own = autotp.plan(Layers(torch.bfloat16), 2, **asked)
    wide = autotp.plan(Layers(torch.bfloat16), 2, reduce_dtype="float32", **asked)
    size = 2 * 5 * 16 * 2

    assert [("all_reduce", "forward", size)] == payloads(own)
    assert [
        ("reduce_scatter", "forward", 2 * size),
        ("all_gather", "forward", size),
    ] == payloads(wide)
    assert [size, 3 * size // 2] == [sum(c.wire_bytes for c in p.collectives) for p in (own, wide)]
    assert sum(c.time_ps for c in wide.collectives) == wide.cost["time_ps"] > own.cost["time_ps"]


def test_the_bucket_of_gradients_is_counted_as_it_is_summed() -> None:
    asked: dict[str, Any] = {"example_inputs": inputs(torch.bfloat16), "training": True}
    own = autotp.plan(Layers(torch.bfloat16), 2, overrides={"norm": "replicated"}, **asked)
    again = {"plan": own, "reduce_dtype": "float32"}
    wide = autotp.plan(Layers(torch.bfloat16), 2, **again, **asked)
    buckets = [sum(n for _, where, n in ledger(p) if where == BUCKET) for p in (own, wide)]

    assert 0 < buckets[0] == buckets[1] / 2


def test_a_narrower_dtype_than_the_parameters_is_refused() -> None:
    asked: dict[str, Any] = {"example_inputs": inputs(torch.float16), "reduce_dtype": "bfloat16"}
    with pytest.raises(PlanError) as caught:
        autotp.plan(Layers(torch.float16), 2, training=False, **asked)

    refused = "reduce_dtype: bfloat16 cannot represent all values of float16, the dtype of norm"
    assert refused in str(caught.value)
    assert "such as 'float32'" in str(caught.value)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
def test_narrow_models_are_proved(dtype: torch.dtype, reduce_dtype: str | None) -> None:
    asked = {"example_inputs": inputs(dtype), "reduce_dtype": reduce_dtype}
    found = autotp.verify(Layers(dtype), 4, dtype=dtype, gradients=True, **asked)

    assert found.ok, found


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_parts_are_rounded_once_and_not_at_every_step(training: bool) -> None:
    """Of eight ranks' parts in bfloat16: added in float32 they round once, to the nearest."""
    model, given = Layers(torch.bfloat16), inputs(torch.bfloat16)
    seen: dict[str | None, list[Tensor]] = {}
    for reduce_dtype in (None, "float32"):
        asked = {"example_inputs": given, "training": training, "reduce_dtype": reduce_dtype}
        ranks = [parallelize(model, 8, rank=rank, **asked) for rank in range(8)]
        parts: list[list[Tensor]] = []
        simulate(ranks, given, observe=lambda n, v, to=parts: to.append(v) if _is_part(v) else None)
        seen[reduce_dtype] = [simulate(ranks, given).outputs[0].detach(), *parts[0]]
    narrow, *parts_narrow = seen[None]
    wide, *parts_wide = seen["float32"]
    total = torch.stack([p.double() for p in parts_wide]).sum(0).to(torch.bfloat16)
    expected = given["x"] + total

    assert all(torch.equal(a, b) for a, b in zip(parts_narrow, parts_wide, strict=True))
    assert torch.equal(expected, wide)
    assert not torch.equal(narrow, wide)


def _is_part(values: list[Tensor]) -> bool:
    """Whether ranks hold different summands of one value."""
    return values[0].shape == (2, 5, 16) and not torch.equal(values[0], values[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2"])
def test_models_of_transformers_run_narrow(name: str) -> None:
    model, given = build(name)
    found = autotp.verify(
        model.bfloat16(),
        2,
        dtype=torch.bfloat16,
        gradients=False,
        example_inputs=given,
        reduce_dtype="float32",
    )

    assert found.ok, found
