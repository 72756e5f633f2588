"""What a sharded model cannot do, it refuses before anything runs; its message says what to do."""

import pytest
from torch import nn

import autotp
from autotp.errors import PlanError
from tests.models import build


@pytest.fixture(scope="module")
def sharded() -> nn.Module:
    model, inputs = build("llama", num_hidden_layers=1)
    return autotp.parallelize(model, 2, rank=0, example_inputs=inputs)


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("save_pretrained", ("directory",), "the shards of the other ranks cannot be gathered"),
        ("resize_token_embeddings", (600,), "before"),
        ("set_attn_implementation", ("eager",), "before"),
        ("init_continuous_batching", (), "Use generate"),
        ("push_to_hub", ("somebody/model",), "then upload the directory"),
        ("add_adapter", (None,), "would have no effect"),
        ("half", (), "torch.float32 on cpu, like the generated code"),
    ],
)
def test_what_does_not_work_yet_is_refused_before_anything_runs(
    method: str, arguments: tuple[object, ...], said: str, sharded: nn.Module
) -> None:
    """Reported by users of other tools (C108)."""
    with pytest.raises(PlanError, match=said):
        getattr(sharded, method)(*arguments)


def test_whole_weights_are_not_loaded_into_parts(sharded: nn.Module) -> None:
    whole, own = build("llama", num_hidden_layers=1)[0].state_dict(), sharded.state_dict()

    with pytest.raises(PlanError, match="the full .* rank 0 of 2 has a shard of .*from_pretrained"):
        sharded.load_state_dict(whole)
    assert "<All keys matched successfully>" == str(sharded.load_state_dict(own))
