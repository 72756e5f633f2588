"""Layouts of parameters: one for all uses of each, by dataflow alone.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import autotp
from tests.models import build, randomize
from tests.proven import Captured
from tests.toys import MLP, batch, vectors


class Gathered(nn.Module):
    """Its input and what two layers made of it, one of the other, are closed side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 64)
        self.close = nn.Linear(16 + 32 + 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.relu(self.first(x))
        two = torch.relu(self.second(one))
        return x + self.close(torch.cat([x, one, two], -1))


@pytest.fixture(scope="module")
def gathered() -> Captured:
    model = Gathered()
    randomize(model, 0)
    return Captured(model, {"x": vectors(2, 6, 16)["x"].requires_grad_()})


@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_of_a_sum_that_no_layer_made_are_cut_beside_those_that_one_did(
    gathered: Captured, tp: int
) -> None:
    plan = gathered.proven(tp)
    weight = plan.parameters["close.weight"]

    assert 1 == weight.dim
    assert [(16, 16 * 112 // tp * 4)] == sorted({(s.shape[0], s.bytes) for s in weight.shards})
    assert 0.03 > plan.replicated_fraction


class LowRanks(nn.Module):
    """Two low ranks that open one pair; one of them is also scored, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.low, self.other = nn.Linear(32, 12), nn.Linear(32, 12)
        self.norm, self.norm_other = nn.LayerNorm(12), nn.LayerNorm(12)
        self.up, self.gate, self.down = nn.Linear(12, 64), nn.Linear(12, 64), nn.Linear(64, 32)
        self.index, self.last = nn.Linear(12, 8), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        low, other = self.norm(self.low(x)), self.norm_other(self.other(x))
        with torch.no_grad():
            best = self.index(low).argmax(-1, keepdim=True)
        return self.last(x + self.down(torch.relu(self.up(low)) * self.gate(other)) * best)


def test_a_reader_without_gradients_takes_what_splitting_readers_take() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 6, 32)}
    evidence = autotp.verify(LowRanks(), 2, training=True, example_inputs=inputs)

    assert evidence.ok
    # one gather, of what both low ranks and the residual read; none of the norm's result
    assert {
        "forward all_reduce": 1,
        "forward all_gather": 1,
        "backward all_reduce": 1,
    } == evidence.collectives_seen


@pytest.mark.slow
def test_what_an_override_keeps_whole_keeps_its_sizes() -> None:
    """Attention whole beside a split MLP: its code has the sizes of the whole model (C018)."""
    model, inputs = build("phi3", num_hidden_layers=1)
    one, two = (
        Captured(model, inputs, overrides={"*self_attn*": "replicated"}).proof(tp) for tp in (1, 2)
    )
    cut = [n for n, p in two.plan.parameters.items() if p.dim is not None]

    assert two.evidence.ok
    assert {"model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= {
        *cut
    }
    assert sizes_in(one.ranks[0].code()) == sizes_in(two.ranks[1].code())


def sizes_in(code: str) -> list[str]:
    """The lines of a graph's code that cut or fold a tensor at sizes written in them."""
    return [
        line.partition("  #")[0].strip()
        for line in code.splitlines()
        if any(f"aten.{op}" in line for op in ("slice", "view", "reshape", "split_with_sizes"))
    ]


@pytest.mark.slow
def test_plans_in_a_configuration_are_not_read() -> None:
    """Words of another library's plan, known or not, mean nothing here (C039)."""
    model, inputs = build("llama", num_hidden_layers=1)
    expected = autotp.plan(model, 2, example_inputs=inputs)
    anything = cast("Any", model)
    anything.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "embedding_rowwise"}
    anything._tp_plan = {"lm_head": "colwise_rep"}

    assert expected == autotp.plan(model, 2, example_inputs=inputs)


class Shared(MLP):
    """One weight of two products, and once more transposed, where it is a closer."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.up(x).relu())
        z = y + functional.linear(self.up(y).tanh(), self.up.weight.T)
        return z + self.down(self.up(z).sigmoid())


@pytest.fixture(scope="module")
def shared() -> Captured:
    torch.manual_seed(0)
    return Captured(Shared(16, 24), vectors(2, 5, 16))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_weight_of_several_products_has_one_layout(shared: Captured, tp: int) -> None:
    """The first use of a weight decided, and the others failed (C040)."""
    plan = shared.proven(tp)

    assert ["column", "row"] == [plan.parameters[f"{n}.weight"].layout for n in ("up", "down")]
    assert 3 == sum(c.phase == "forward" for c in plan.collectives)


class Viewed(MLP):
    """Folds and turns a product at random, scales it, and turns it back."""

    def __init__(self, seed: int) -> None:
        super().__init__(16, 48)
        draw = torch.Generator().manual_seed(seed)
        folds = [(2, 3, 8), (12, 4), (4, 12), (2, 2, 2, 6), (6, 8), (3, 16), (48,)]
        self.fold = folds[seed % len(folds)]
        self.turn = torch.randperm(len(self.fold), generator=draw).tolist()
        self.scale = nn.Parameter(torch.randn([self.fold[k] for k in self.turn], generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        folded = self.up(x).view(batch, length, *self.fold)
        turned = folded.permute(0, 1, *[2 + k for k in self.turn]) * self.scale
        mixed = turned.reshape(batch, length, 48).relu()
        return self.down(mixed)


@pytest.mark.parametrize("seed", range(7))
def test_random_views_of_a_cut_value(seed: int) -> None:
    """Views of split values failed, or gave wrong numbers (C096)."""
    captured = Captured(Viewed(seed), vectors(2, 5, 16))
    for tp in (2, 3, 5):
        proof = captured.proof(tp)
        assert proof.evidence.ok, proof.evidence.first_divergence
        assert proof.plan.pairs[0].split or tp > max(proof.plan.pairs[0].size, 2)


class Patches(nn.Module):
    """Patches of video (3-D) and of an image (2-D), in one sequence before an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.video = nn.Conv3d(3, 12, (2, 4, 4), (2, 4, 4))
        self.image = nn.Conv2d(3, 12, 4, 4, bias=False)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 6)

    def forward(self, video: Tensor, image: Tensor) -> Tensor:
        parts = (self.video(video).flatten(2), self.image(image).flatten(2))
        x = torch.cat(parts, -1).transpose(1, 2)
        return self.down(functional.gelu(self.up(x))).mean(1)


@pytest.fixture(scope="module")
def patches() -> Captured:
    torch.manual_seed(0)
    inputs = {"video": torch.randn(2, 3, 4, 8, 8), "image": torch.randn(2, 3, 8, 8)}
    return Captured(Patches(), inputs)


@pytest.mark.parametrize("tp", [2, 3])
def test_patches_of_video_and_images(patches: Captured, tp: int) -> None:
    """Convolutions over 3 dims failed (C097)."""
    plan = patches.proven(tp)

    assert all(plan.parameters[f"{n}.weight"].dim is not None for n in ("up", "down"))
    assert () == plan.unruled


@pytest.mark.parametrize("path", ["up", "down"])
@pytest.mark.parametrize("name", ["weight_norm", "orthogonal"])
def test_a_weight_that_is_computed_from_others_is_planned(name: str, path: str) -> None:
    model = MLP(24, 48)
    getattr(parametrizations, name)(model.get_submodule(path))

    assert autotp.verify(model, 2, example_inputs={"x": batch()}, training=True).ok
