"""A Llama of Transformers cut over a group by hand, as Megatron-LM cuts one: no compiler at all.

The modules are Transformers' own. Their linear layers hold a rank's part; those that close a block
sum over the group in place. The embedding is cut along hidden and the head along the vocabulary,
and both are gathered: where and how autotp's plan has them, so that what goes over the wire is the
same. `embedding_whole=True` leaves the embedding whole instead, as other hand-written models do.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["cut_by_hand"]

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


class _Summed(nn.Linear):
    """A linear layer cut along its inputs: partial sums are added up in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y


class _Gathered(nn.Linear):
    """A linear layer cut along its outputs, which are put together."""

    def forward(self, x: Tensor) -> Tensor:
        return _whole(functional.linear(x, self.weight))


class _GatheredTable(nn.Embedding):
    """A table of embeddings cut along hidden, which is put together."""

    def forward(self, x: Tensor) -> Tensor:
        return _whole(functional.embedding(x, self.weight))


def _whole(x: Tensor) -> Tensor:
    """All ranks' parts side by side in the last dim."""
    ranks = dist.get_world_size()
    rows = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(rows, x)
    return torch.cat(rows.chunk(ranks), dim=-1)


def cut_by_hand(model: nn.Module, embedding_whole: bool = False) -> nn.Module:
    """The `model`, a LlamaForCausalLM, with this rank's part of its weights: for inference."""
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if name in COLUMN:
            _cut(module, 0)
        elif name in ROW:
            _cut(module, 1)
            module.__class__ = _Summed
        elif name == "lm_head":
            _cut(module, 0)
            module.__class__ = _Gathered
        elif name == "embed_tokens" and not embedding_whole:
            _cut(module, 1)
            module.__class__ = _GatheredTable
    return model.eval()


def _cut(module: nn.Module, dim: int) -> None:
    weight = module.get_parameter("weight")
    mine = weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
    module.weight = nn.Parameter(mine.clone(memory_format=torch.contiguous_format))
