"""Kinds of code that once were captured wrong, ran wrong, or stayed whole: small, by hand."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan


def checked(model: nn.Module, inputs: dict[str, Any], tp: int = 2) -> tuple[Plan, Evidence]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.eval()
    options = {"training": True, "example_inputs": inputs}
    return autotp.plan(model, tp, **options), autotp.verify(model, tp, **options)


class MLP(nn.Module):
    """An MLP over 16, whose inner values, of 32, subclasses do something with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x)))

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError


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


@pytest.mark.parametrize("kind", [Padded, Viewed, Scanned, Pooled])
def test_what_is_done_to_the_inner_values_leaves_the_pair_split(kind: type[MLP]) -> None:
    plan, evidence = checked(kind(), {"x": torch.randn(2, 6, 16)})

    layouts = [plan.parameters[f"{name}.weight"].layout for name in ("up", "down")]

    assert (["column", "row"], ()) == (layouts, plan.unruled)
    assert evidence.ok, evidence.first_divergence


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


def test_a_residual_whose_norms_are_sums_is_still_no_pair() -> None:
    plan, evidence = checked(Residual(), {"x": torch.randn(2, 6, 16)})

    pairs = {(pair.openers, pair.closers) for pair in plan.pairs}

    mlps = {((f"blocks.{k}.up.weight",), (f"blocks.{k}.down.weight",)) for k in range(2)}
    assert mlps | {(("head.weight",), ())} == pairs
    assert evidence.ok, evidence.first_divergence


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
    plan, evidence = checked(Images(), {"x": torch.randn(2, 3, 8, 8)})

    layouts = {name: record.layout for name, record in plan.parameters.items()}

    assert () == plan.unruled
    assert ("column", "row") == (layouts["first.weight"], layouts["second.weight"])
    assert evidence.ok, evidence.first_divergence


class Sorted(nn.Module):
    """Words in the order of their ids, back in their own order: both orders come of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        _, order = torch.sort(ids.reshape(-1))
        x = self.head(self.words(ids).flatten(0, 1)[order])
        return torch.zeros_like(x).index_add(0, order, x)


def test_one_of_several_results_of_an_op_on_inputs_is_read_as_that_one() -> None:
    _, evidence = checked(Sorted(), {"ids": torch.randint(0, 32, (2, 5))})

    assert evidence.ok, evidence.first_divergence


class Mapped(MLP):
    """Counts with vmap, as masks are made, and writes in place."""

    def inner(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        seen = torch.vmap(lambda i: torch.vmap(lambda j: i >= j)(places))(places)
        x = x.clone()
        x[:, 0] = 0
        return x * seen.sum(-1, keepdim=True)


def test_a_value_inside_vmap_is_no_obstacle_to_writing_in_place() -> None:
    _, evidence = checked(Mapped(), {"x": torch.randn(2, 6, 16)})

    assert evidence.ok, evidence.first_divergence


class Chain(nn.Module):
    """Products one after another: between two of them is an axis that both could be cut along."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((16, 32, 24, 32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).relu()
        return x


def test_a_chain_of_products_is_cut_in_pairs() -> None:
    plan, evidence = checked(Chain(), {"x": torch.randn(2, 6, 16)})

    layouts = [plan.parameters[f"parts.{k}.weight"].layout for k in range(4)]

    assert ["column", "row", "column", "row"] == layouts
    assert [("all_reduce", "forward")] * 2 + [("all_reduce", "backward")] == [
        (c.kind, c.phase) for c in plan.collectives
    ]
    assert evidence.ok, evidence.first_divergence


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
    plan, evidence = checked(Unnormed(), {"x": torch.randn(2, 6, 16)})

    for part, layout in (("ups", "column"), ("downs", "row")):
        assert [layout] * 2 == [plan.parameters[f"{part}.{k}.weight"].layout for k in range(2)]
    assert evidence.ok, evidence.first_divergence


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


def test_heads_that_a_view_mixes_with_positions_are_no_positions() -> None:
    plan, evidence = checked(Reread(), {"x": torch.randn(2, 6, 16)})

    layouts = [plan.parameters[f"{name}.weight"].layout for name in "qkv"]

    assert ["column"] * 3 == layouts
    assert plan.parameters["out.weight"].layout == "row"
    assert evidence.ok, evidence.first_divergence


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


class Towers(nn.Module):
    """Two layers of attention, whose residual has the groups of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Channels() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("tp", [2, 4])
def test_groups_of_channels_are_cut_where_each_has_fewer_heads_than_ranks(tp: int) -> None:
    plan, evidence = checked(Towers(), {"x": torch.randn(2, 6, 32)}, tp)

    names = [f"layers.{layer}.{part}.weight" for layer in range(2) for part in ("q", "v", "out")]

    assert ["column", "column", "row"] * 2 == [plan.parameters[name].layout for name in names]
    assert evidence.ok, evidence.first_divergence
