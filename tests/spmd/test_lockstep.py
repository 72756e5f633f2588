"""The simulator computes what real processes do: the same modules, in one process and in two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autotp.api import parallelize
from autotp.verification.simulate import simulate
from tests.models import build
from tests.spmd.pool import Pool
from tests.spmd.tally import Tally

Pools = Callable[[int], Pool]
SIZES = {"layers": 1}


def run_alone(rank: int, world: int, training: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """What this process gets for outputs and gradients, and how many collectives it ran."""
    model, inputs = build("hand", **SIZES)
    own = parallelize(model, world, training=training, example_inputs=inputs)
    with Tally() as tally:
        output = own(**inputs)
        if training:
            output.square().sum().backward()
    gradients = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    return output.detach(), gradients, sum(tally.kinds.values())


def run_together(world: int, training: bool) -> list[tuple[Tensor, dict[str, Tensor], int]]:
    model, inputs = build("hand", **SIZES)
    options: dict[str, Any] = {"training": training, "example_inputs": inputs}
    ranks = [parallelize(model, world, rank=rank, **options) for rank in range(world)]
    found = simulate(ranks, inputs)
    if training:
        torch.autograd.backward([output.square().sum() for output in found.outputs])
    return [
        (
            output.detach(),
            {n: p.grad for n, p in own.named_parameters() if p.grad is not None},
            sum(found.collectives.values()),
        )
        for output, own in zip(found.outputs, ranks, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_and_counts_are_those_of_processes(pool: Pools, training: bool) -> None:
    """Bit for bit: of two summands the order does not matter."""
    expected = pool(2).run(run_alone, training)
    found = run_together(2, training)

    for (output, gradients, count), (real, real_gradients, real_count) in zip(
        found, expected, strict=True
    ):
        assert torch.equal(real, output)
        assert real_gradients.keys() == gradients.keys()
        assert all(torch.equal(real_gradients[name], gradients[name]) for name in gradients)
        assert bool(gradients) == training
        assert real_count == count > 0
