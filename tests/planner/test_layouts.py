"""What stays whole, and what need not: tables beside tables, unused parameters."""

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import randomize
from tests.planner.test_any_tp import proven


class Tables(nn.Module):
    """Words, kinds and places, added up and normed, as encoders begin; words are the head too."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(64, 32), nn.Embedding(2, 32)
        self.places = nn.Embedding(places, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        kinds = places % 2
        x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
        x = x + self.down(torch.relu(self.up(x)))
        return nn.functional.linear(x, self.words.weight)


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("places", [16, 18])
def test_a_table_too_short_to_cut_keeps_no_other_whole(places: int, tp: int) -> None:
    reasons = {
        3: "it is in no pair, and tp 3 divides none of its axes (2, 32)",
        4: "it is in no pair: along dim 1 (32): aten.add.Tensor at add (",
    }
    model = Tables(places)
    randomize(model, 0)
    plan = proven(model, {"ids": torch.randint(0, 64, (2, 12))}, tp)

    assert plan.parameters["kinds.weight"].dim is None
    assert plan.parameters["kinds.weight"].reason.startswith(reasons[tp])
    assert 0 == plan.parameters["places.weight"].dim
    assert 0 == plan.parameters["words.weight"].dim
    kinds = [c.kind for c in plan.collectives if c.phase == "forward"]
    assert ["all_reduce", "all_reduce", "all_gather"] == kinds


class Tower(nn.Module):
    """Words, and a tower for images that words alone do not climb."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.tower = nn.Linear(32, 128, bias=False)

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        return self.head(x if images is None else x + self.tower(images).sum())


def test_what_the_inputs_do_not_use_is_told_apart_from_what_stays_whole() -> None:
    model, ids = Tower(), torch.randint(0, 64, (2, 12))
    plan = autotp.plan(model, 2, example_inputs={"ids": ids})
    both = autotp.plan(model, 2, example_inputs={"ids": ids, "images": torch.randn(2, 32)})

    assert 0.5 == plan.unused_fraction == plan.replicated_fraction
    assert "50 % of the parameter bytes are in parameters that these" in plan.warnings[1]
    assert "50.0 % of the parameters whole, 50.0 % unused" in str(plan)
    assert 0 == both.unused_fraction
    assert "unused" not in str(both)


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


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_grouped_convolution_hands_its_groups_on(tp: int) -> None:
    model = Grouped().eval()
    randomize(model, 0)
    plan = proven(model, {"x": torch.randn(2, 8, 4, 4)}, tp)

    assert [("mlp", 4)] == [(p.role, p.size) for p in plan.pairs]
    assert ["all_reduce"] == [c.kind for c in plan.collectives if c.phase == "forward"]
    assert 0.01 > plan.replicated_fraction


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


@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_of_a_sum_that_no_layer_made_are_cut_beside_those_that_one_did(tp: int) -> None:
    model = Gathered()
    randomize(model, 0)
    x = torch.randn(2, 6, 16, requires_grad=True)
    plan = proven(model, {"x": x}, tp)
    weight = plan.parameters["close.weight"]

    assert 1 == weight.dim
    assert [(16, 16 * 112 // tp * 4)] == sorted({(s.shape[0], s.bytes) for s in weight.shards})
    assert 0.03 > plan.replicated_fraction


class Optional(nn.Module):
    """Words beside shapes, of which none may be given; both are brought to one size together."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.shapes = nn.Embedding(64, 16), nn.Embedding(256, 48)
        self.join, self.norm = nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor, shapes: Tensor | None = None) -> Tensor:
        if shapes is None:
            shapes = torch.zeros(ids.shape, dtype=torch.int64)
        return self.norm(self.join(torch.cat([self.words(ids), self.shapes(shapes)], -1)))


def test_a_table_is_cut_whether_its_input_is_given_or_not() -> None:
    model, ids = Optional(), torch.randint(0, 64, (2, 12))
    randomize(model, 0)
    without = proven(model, {"ids": ids}, 4)
    given = proven(model, {"ids": ids, "shapes": ids + 7}, 4)

    for plan in (without, given):
        assert all(
            plan.parameters[f"{name}.weight"].dim is not None for name in ("words", "shapes")
        )


class Indexed(nn.Module):
    """Queries, key and value of each key-value head fused, and taken apart by lists of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(32, 2 * 6 * 8), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x).view(*x.shape[:2], 2, 6, 8)
        parts = fused[:, :, :, :-2], fused[:, :, :, [-2]], fused[:, :, :, [-1]]
        shape = parts[0].shape
        q, k, v = (p.expand(shape).flatten(2, 3).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tp", [2, 4])
def test_segments_taken_by_a_list_of_numbers_are_segments(tp: int) -> None:
    model = Indexed()
    randomize(model, 0)
    plan = proven(model, {"x": torch.randn(2, 6, 32)}, tp)

    assert ["kv_heads*(heads_per_kv + 1 + 1)*8"] == [p.expression for p in plan.pairs]
    assert 0.05 > plan.replicated_fraction
