"""What a stranger broke in real processes, each mended since."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import PlanError
from tests.models import build
from tests.spmd.pool import Pool

Pools = Callable[[int], Pool]


class Two(nn.Module):
    """A pair, and a mask that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y if mask is None else y * mask[..., [0, -1]].sum(-1, keepdim=True)


def compiled(rank: int, world: int) -> list[float]:
    """How far a compiled shard is off in a variant that was not captured before."""
    model, x = Two(), torch.randn(2, 5, 8)
    sharded = autotp.parallelize(model, world, example_inputs={"x": x}, training=False)
    run = torch.compile(sharded, backend="eager")
    calls = ({"x": x}, {"x": x, "mask": torch.rand(2, 5, 4)})
    return [(model(**call) - run(**call)).abs().max().item() for call in calls]


def test_a_compiled_model_meets_a_new_variant(pool: Pools) -> None:
    for errors in pool(2).run(compiled):
        assert all(error < 1e-5 for error in errors), errors


def resized(rank: int, world: int) -> str:
    """What asking a sharded model for another vocabulary says."""
    model, inputs = build("gpt2", n_layer=1)
    sharded = autotp.parallelize(model, world, example_inputs=inputs)
    with pytest.raises(PlanError) as caught:
        sharded.resize_token_embeddings(1024)
    return str(caught.value)


def test_tables_of_shards_are_not_resized(pool: Pools) -> None:
    for rank, message in enumerate(pool(2).run(resized)):
        assert message.startswith(f"GPT2LMHeadModel: rank {rank} of 2 holds shards")
