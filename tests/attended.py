"""Attention as one opaque op on plain tensors, as kernels of others are, for transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

__all__ = ["OPAQUE"]

OPAQUE = "autotp_opaque_attention"


@torch.library.custom_op("autotp_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What attention gives, (batch, length, heads, size), of (batch, heads, length, size)."""
    assert type(query) is Tensor
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(2, 3) * scale + mask
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, length, size = query.shape
    return query.new_empty(batch, length, heads, size)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The op as Transformers calls attention."""
    return torch.ops.autotp_tests.attend(query, key, value, attention_mask, scaling), None


AttentionInterface.register(OPAQUE, attention)
AttentionMaskInterface.register(OPAQUE, eager_mask)
