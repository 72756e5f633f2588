"""Narrow models in real processes: what is summed, in what, as the plan says and the simulator."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autotp
from autotp.api import parallelize
from autotp.records.plan import Plan
from autotp.verification.simulate import simulate
from tests.models import build
from tests.spmd.beside import Traffic
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
Payloads = Counter[tuple[str, int]]
Ran = tuple[Tensor, dict[str, Tensor], str, Payloads, set[torch.dtype]]


def options(reduce_dtype: str | None, training: bool, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"reduce_dtype": reduce_dtype, "training": training, "example_inputs": inputs}


def ran(rank: int, world: int, dtype: torch.dtype, asked: str | None, training: bool) -> Ran:
    """Output, gradients, plan, and the bytes and dtypes that this process's collectives carried."""
    model, inputs = build("hand", layers=1)
    own = parallelize(model.to(dtype), world, **options(asked, training, inputs))
    with Traffic() as tally:
        output = own(**inputs)
        if training:
            output.square().sum().backward()
    gradients = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    told = own.plan.to_json()
    return output.detach(), gradients, told, Counter(tally.ran), set(tally.dtypes)


@pytest.mark.parametrize(
    ("world", "dtype", "asked", "training"),
    [
        (2, torch.bfloat16, None, True),
        (2, torch.float16, "float32", True),
        (4, torch.bfloat16, "float32", False),
    ],
)
def test_processes_sum_what_the_plan_says_and_as_the_simulator_does(
    pool: Pools, world: int, dtype: torch.dtype, asked: str | None, training: bool
) -> None:
    """Bit for bit: the order of summands does not matter to two, nor where sums are exact."""
    found = pool(world).run(ran, dtype, asked, training)
    model, inputs = build("hand", layers=1)
    told = options(asked, training, inputs)
    ranks = [parallelize(model.to(dtype), world, rank=rank, **told) for rank in range(world)]
    simulated = simulate(ranks, inputs).outputs
    if training:
        torch.autograd.backward([output.square().sum() for output in simulated])

    for (output, gradients, plan, carried, dtypes), own, here in zip(
        found, ranks, simulated, strict=True
    ):
        assert predicted(Plan.from_json(plan)) == carried
        assert ({dtype} if asked is None else {dtype, torch.float32}) == dtypes
        assert torch.equal(here, output)
        for name, parameter in own.named_parameters():
            assert not training or torch.equal(parameter.grad, gradients[name]), name


def predicted(plan: Plan) -> Payloads:
    return Counter((c.kind, c.payload_bytes) for c in plan.collectives)


def generated(rank: int, world: int) -> tuple[list[int], list[int]]:
    """What a sharded model in bfloat16 says, and the whole one."""
    model: Any = build("llama", num_hidden_layers=1)[0].to(torch.bfloat16).eval()
    own: Any = autotp.parallelize(model, world, reduce_dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    asked["attention_mask"] = torch.ones_like(ids)
    return own.generate(ids, **asked)[0].tolist(), model.generate(ids, **asked)[0].tolist()


def test_a_narrow_model_generates(pool: Pools) -> None:
    for own, whole in pool(2).run(generated):
        assert whole == own
