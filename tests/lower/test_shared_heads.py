"""Attentions that share heads instead of having them repeated: the same, bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import autotp
from autotp.lower.shared_heads import share_heads
from tests.models import build

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Repeat = Callable[[Tensor], Tensor]


def expand_heads(x: Tensor, dim: int = 2) -> Tensor:
    """Each head twice, one after the other; with another `dim`, something else."""
    batch, heads, length, size = x.shape
    sizes = [batch, heads, length, size]
    sizes.insert(dim, 2)
    return x.unsqueeze(dim).expand(sizes).reshape(batch, 2 * heads, length, size)


def interleave_heads(x: Tensor) -> Tensor:
    """The same by one op."""
    return torch.ops.aten.repeat_interleave.self_int(x, 2, 1)


def attention(keys: Repeat, values: Repeat, **more: Any) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        given = {"attn_mask": mask[0]} if mask else {}
        return functional.scaled_dot_product_attention(q, keys(k), values(v), **given, **more)

    return forward


def inputs(new: int, dtype: torch.dtype = torch.float32, *, masked: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, new, 8, dtype=dtype)
    k, v = (torch.randn(2, 2, 9, 8, dtype=dtype) for _ in range(2))
    return [q, k, v, *([torch.ones(new, 9).tril(9 - new).bool()] if masked else [])]


def graph_of(forward: Callable[..., Tensor], given: list[Tensor]) -> fx.Graph:
    return make_fx(forward, pre_dispatch=True, tracing_mode="fake")(*given).graph


def run(graph: fx.Graph, given: list[Tensor]) -> Tensor:
    return fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*given)


@pytest.mark.parametrize("repeat", [expand_heads, interleave_heads])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_the_values_are_the_same_and_no_copy_is_made(
    repeat: Repeat, dtype: torch.dtype, masked: bool
) -> None:
    for new in (1, 9):
        given = inputs(new, dtype, masked=masked)
        graph = graph_of(attention(repeat, repeat, scale=0.3), given)
        shared = share_heads(graph, CPU)

        assert torch.equal(run(graph, given), run(shared, given))
        names = [str(node.target) for node in shared.nodes]
        assert not [n for n in names if "expand" in n or "repeat" in n]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (expand_heads, lambda x: x.repeat(1, 2, 1, 1)),
        (lambda x: expand_heads(x, 1), lambda x: expand_heads(x, 1)),
        (lambda x: x.repeat(1, 2, 1, 1), lambda x: x.repeat(1, 2, 1, 1)),
    ],
    ids=["in two ways", "in turn", "by another op"],
)
def test_what_is_not_each_head_repeated_is_left(keys: Repeat, values: Repeat) -> None:
    given = inputs(9)
    graph = graph_of(attention(keys, values), given)

    assert share_heads(graph, CPU) is graph


def test_on_a_gpu_only_attentions_without_a_mask_share() -> None:
    masked, plain = (inputs(9, masked=m) for m in (True, False))
    left = graph_of(attention(expand_heads, expand_heads), masked)
    graph = graph_of(attention(expand_heads, expand_heads, is_causal=True), plain)

    assert share_heads(left, GPU) is left
    assert torch.equal(run(graph, plain), run(share_heads(graph, GPU), plain))


@pytest.mark.slow
def test_a_model_shares_heads_unless_it_trains() -> None:
    model, _ = build("llama")
    ids = torch.randint(3, 500, (2, 5))
    for training in (False, True):
        sharded = autotp.parallelize(
            model, tp=2, rank=0, training=training, example_inputs={"input_ids": ids}
        )

        assert training is not ("enable_gqa" in sharded.code())
