"""Pairs of layers that are split column and row: found behind whatever happens between the two.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autotp
from tests.models import build, randomize
from tests.proven import Captured, proven
from tests.toys import MLP, Stack, vectors


def large(model: nn.Module, *sizes: int) -> Captured:
    """A model with large random weights, in eval mode, of vectors of such sizes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Captured(model.eval(), vectors(*sizes))


class Padded(MLP):
    """Pads the sequence, at its end, to a multiple of 4."""

    def inner(self, x: Tensor) -> Tensor:
        return functional.silu(functional.pad(x, (0, 0, 0, -x.shape[1] % 4)))[:, : x.shape[1]]


class Viewed(MLP):
    """Takes the shape of another tensor."""

    def inner(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 8)).relu()
        return (x.view_as(heads) * heads).flatten(2)


class Scanned(MLP):
    """Writes positions one by one."""

    def inner(self, x: Tensor) -> Tensor:
        states = torch.zeros_like(x[:, :2])
        states[:, 0] = x[:, 0]
        states[:, 1] = states[:, 0].clone() * 0.5 + x[:, 1]
        return x + states.sum(1, keepdim=True)


class Pooled(MLP):
    """Resizes and pools over positions, a channel at a time."""

    def inner(self, x: Tensor) -> Tensor:
        channels = functional.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear")
        return functional.max_pool1d(channels, 2).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Padded, Viewed, Scanned, Pooled])
def test_what_is_done_to_the_inner_values_leaves_the_pair_split(kind: type[MLP]) -> None:
    plan = large(kind(), 2, 6, 16).proven(2)

    layouts = [plan.parameters[f"{name}.weight"].layout for name in ("up", "down")]

    assert (["column", "row"], ()) == (layouts, plan.unruled)


class Normed(MLP):
    """Divides by the root of the mean square over the inner dim, spelled out."""

    def inner(self, x: Tensor) -> Tensor:
        x = x.relu()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Residual(nn.Module):
    """Two normed MLPs beside a residual, then a norm and a head: no pair but the MLPs' and it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(2))
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.scaled(x))
        return self.head(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.slow
def test_a_residual_whose_norms_are_sums_is_still_no_pair() -> None:
    plan = large(Residual(), 2, 6, 16).proven(2)

    pairs = {(pair.openers, pair.closers) for pair in plan.pairs}

    mlps = {((f"blocks.{k}.up.weight",), (f"blocks.{k}.down.weight",)) for k in range(2)}
    assert mlps | {(("head.weight",), ())} == pairs


class Images(nn.Module):
    """Two convolutions with a batch norm and a pooling between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return functional.adaptive_avg_pool2d(self.second(pooled), 1).flatten(1)


def test_convolutions_with_a_batch_norm_between_are_a_pair() -> None:
    plan = large(Images(), 2, 3, 8, 8).proven(2)

    layouts = {name: record.layout for name, record in plan.parameters.items()}

    assert () == plan.unruled
    assert ("column", "row") == (layouts["first.weight"], layouts["second.weight"])


class Chain(nn.Module):
    """Products one after another: between two of them is an axis that both could be cut along."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((16, 32, 24, 32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).relu()
        return x


@pytest.mark.slow
def test_a_chain_of_products_is_cut_in_pairs() -> None:
    plan = large(Chain(), 2, 6, 16).proven(2)

    layouts = [plan.parameters[f"parts.{k}.weight"].layout for k in range(4)]

    assert ["column", "row", "column", "row"] == layouts
    assert [("all_reduce", "forward")] * 2 + [("all_reduce", "backward")] == [
        (c.kind, c.phase) for c in plan.collectives
    ]


class Unnormed(nn.Module):
    """Two MLPs beside a residual that is put out as it is, no norm between nor after."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return x


def test_a_residual_that_is_put_out_leaves_the_pairs_beside_it() -> None:
    plan = large(Unnormed(), 2, 6, 16).proven(2)

    for part, layout in (("ups", "column"), ("downs", "row")):
        assert [layout] * 2 == [plan.parameters[f"{part}.{k}.weight"].layout for k in range(2)]


class Reread(nn.Module):
    """Attention whose scores are scaled by (positions, heads), read as (heads, positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.scale = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (4, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        scale = self.scale(x).view(x.shape[0], 4, x.shape[1], 1)
        weights = (query @ key.transpose(2, 3) * scale).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_heads_that_a_view_mixes_with_positions_are_no_positions() -> None:
    plan = large(Reread(), 2, 6, 16).proven(2)

    layouts = [plan.parameters[f"{name}.weight"].layout for name in "qkv"]

    assert ["column"] * 3 == layouts
    assert plan.parameters["out.weight"].layout == "row"


class Channels(nn.Module):
    """Attention of 8 heads beside a residual of channels; its products take 4 groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(32, 32, 1, groups=4) for _ in range(3))
        self.out = nn.Conv1d(32, 32, 1)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        given = x.transpose(1, 2)
        query, key, value = (made(given).unflatten(1, (8, 4)) for made in (self.q, self.k, self.v))
        weights = (query.transpose(2, 3) @ key).softmax(-1)
        found = (weights @ value.transpose(2, 3)).transpose(2, 3).flatten(1, 2)
        return self.norm(x + self.out(found).transpose(1, 2))


@pytest.fixture(scope="module")
def channels() -> Captured:
    return large(Stack(Channels(), Channels()), 2, 6, 32)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_groups_of_channels_are_cut_where_each_has_fewer_heads_than_ranks(
    channels: Captured, tp: int
) -> None:
    plan = channels.proven(tp)

    names = [f"layers.{layer}.{part}.weight" for layer in range(2) for part in ("q", "v", "out")]

    assert ["column", "column", "row"] * 2 == [plan.parameters[name].layout for name in names]


class Gated(nn.Module):
    """A gated convolution of a sequence: the two halves of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 24, 1), nn.Conv1d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.glu(self.up(x), dim=1))


def test_the_halves_of_a_gate_are_split_together() -> None:
    evidence = autotp.verify(Gated(), 3, example_inputs={"x": torch.randn(2, 8, 5)}, training=True)

    assert evidence.ok
    assert 0.1 > evidence.replicated_fraction


class Biased(nn.Module):
    """Attention whose bias is built by head from another input: its heads are known by a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        slopes = torch.arange(1, 5)
        bias = (slopes[None, :, None] * mask[:, None, :].float()).reshape(mask.shape[0] * 4, 1, -1)
        size = (x.shape[0], x.shape[1], 4, 8)
        q, k, v = (t.reshape(size).transpose(1, 2) for t in self.fused(x).chunk(3, dim=-1))
        bias = bias.view(x.shape[0], -1, 1, x.shape[1])
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def test_a_size_that_a_guard_proves_is_a_number_of_heads() -> None:
    inputs = {"x": torch.randn(2, 5, 32), "mask": torch.ones(2, 5)}
    evidence = autotp.verify(Biased(), 4, example_inputs=inputs, training=True)

    assert evidence.ok
    assert 0.01 > evidence.replicated_fraction


class LinearAttention(nn.Module):
    """Attention of which the sum over positions is linear; `FullAttention` has a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 6 * 4) for _ in range(3))
        self.o = nn.Linear(6 * 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (6, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return x + self.o(self.mixed(q, k, v).transpose(1, 2).flatten(-2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = torch.einsum("bhsd,bhse->bhsde", k.sigmoid(), v).cumsum(2)
        return torch.einsum("bhsde,bhsd->bhse", states, q.sigmoid())


class FullAttention(LinearAttention):
    """Attention by a softmax."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.slow
def test_layers_of_two_kinds_are_both_cut() -> None:
    """Layers of the second kind were missing in a plan by hand (C028)."""
    torch.manual_seed(0)
    plan = proven(
        Stack(LinearAttention(), LinearAttention(), LinearAttention(), FullAttention()),
        vectors(2, 5, 16),
        3,
    )

    for layer in range(4):
        layouts = [plan.parameters[f"layers.{layer}.{n}.weight"].layout for n in "qkvo"]
        assert ["column", "column", "column", "row"] == layouts
    assert 4 == sum(c.phase == "forward" for c in plan.collectives)


class Raw(nn.Module):
    """A block of no module that a library has: parameters, einsum, a softmax spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(3, 16, 6, 4) * 0.3)
        self.back = nn.Parameter(torch.randn(6, 4, 16) * 0.3)
        self.wide, self.narrow = (nn.Parameter(torch.randn(16, 40) * 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,zdhe->zbhse", x, self.into)
        scores = (q @ k.mT / 4**0.5).exp()
        mixed = (scores / scores.sum(-1, keepdim=True)) @ v
        x = x + torch.einsum("bhse,hed->bsd", mixed, self.back)
        return x + (x @ self.wide).square() @ self.narrow.T


@pytest.fixture(scope="module")
def raw() -> Captured:
    torch.manual_seed(0)
    return Captured(Stack(Raw(), Raw()), vectors(2, 5, 16))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_class_that_nobody_knows_is_cut(raw: Captured, tp: int) -> None:
    """Tools refused classes outside of their lists (C058, C102)."""
    plan = raw.proven(tp)

    assert 0 == plan.replicated_fraction
    assert 4 == sum(c.phase == "forward" for c in plan.collectives)


@pytest.mark.slow
def test_a_norm_over_all_heads_costs_one_small_sum() -> None:
    """Queries and keys are normed by the sum of their squares over the ranks: no gather (C059).

    Priced at the sizes of a real model, where bytes count and not the number of messages.
    """
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.Olmo2Config(num_hidden_layers=1, eos_token_id=2, **sizes)
    with torch.device("meta"):
        model = transformers.Olmo2ForCausalLM(config).eval()
    words = torch.ones(1, 2048, dtype=torch.int64)
    plan = autotp.plan(model, 4, example_inputs={"input_ids": words})
    moved = [(c.kind, c.where, c.payload_bytes) for c in plan.collectives if "attn" in c.where]
    attention, whole = "model.layers.0.self_attn.", 2048 * 4096 * 4

    assert [
        ("all_reduce", f"{attention}q_norm", whole // 4096),
        ("all_reduce", f"{attention}k_norm", whole // 4096),
        ("all_reduce", f"{attention}o_proj", whole),
    ] == moved


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "sums"), [(True, 1), (False, 2)])
def test_parallel_and_sequential_blocks_are_told_apart(parallel: bool, sums: int) -> None:
    """A heuristic picked the wrong layers in parallel blocks (C100)."""
    model, inputs = build("gpt_neox", num_hidden_layers=1, use_parallel_residual=parallel)
    plan = autotp.plan(model, 2, example_inputs=inputs)

    assert ["all_reduce"] * sums == [c.kind for c in plan.collectives if "layers.0" in c.where]


class PostNorm(MLP):
    """A residual of two linear layers, its sum normalised at once (C081)."""

    def __init__(self) -> None:
        super().__init__(16, 128, torch.relu)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.body(x))


@pytest.mark.parametrize("shape", [(10, 16), (2, 5, 16), (2, 2, 5, 16)])
def test_a_sum_before_a_norm_takes_rows_of_any_rank(shape: tuple[int, ...]) -> None:
    plan = proven(PostNorm(), vectors(*shape), 2)

    assert ["all_reduce"] == [c.kind for c in plan.collectives if c.phase == "forward"]
    assert {"up.weight": 0, "down.weight": 1} == {
        name: plan.parameters[name].dim for name in ("up.weight", "down.weight")
    }


class Grouped(nn.Module):
    """A bottleneck block: channels are made, mixed within 4 groups, normed, and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Conv2d(8, 32, 1, bias=False)
        self.mix = nn.Conv2d(32, 64, 3, padding=1, groups=4)
        self.norm = nn.BatchNorm2d(64)
        self.close = nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.mix(torch.relu(self.open(x)))))
        return x + self.close(y)


@pytest.fixture(scope="module")
def grouped() -> Captured:
    model = Grouped().eval()
    randomize(model, 0)
    return Captured(model, vectors(2, 8, 4, 4))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_grouped_convolution_hands_its_groups_on(grouped: Captured, tp: int) -> None:
    plan = grouped.proven(tp)

    assert [("mlp", 4)] == [(p.role, p.size) for p in plan.pairs]
    assert ["all_reduce"] == [c.kind for c in plan.collectives if c.phase == "forward"]
    assert 0.01 > plan.replicated_fraction
