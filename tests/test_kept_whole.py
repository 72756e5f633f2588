"""What stays whole, and what need not: tables beside tables, parameters that a graph does not use."""

import pytest
import torch
from torch import Tensor, nn

import autotp
from tests.models import randomize
from tests.test_any_tp import proven


class Tables(nn.Module):
    """Words, kinds and places, added up and normed, as encoders begin; the words are the head too."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(64, 32), nn.Embedding(2, 32)
        self.places = nn.Embedding(places, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        kinds = torch.zeros_like(ids)
        x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
        x = x + self.down(torch.relu(self.up(x)))
        return nn.functional.linear(x, self.words.weight)


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("places", [16, 18])
def test_a_table_too_short_to_cut_keeps_no_other_whole(places: int, tp: int) -> None:
    model = Tables(places)
    randomize(model, 0)
    plan = proven(model, {"ids": torch.randint(0, 64, (2, 12))}, tp)

    assert plan.parameters["kinds.weight"].dim is None
    assert 0 == plan.parameters["places.weight"].dim
    assert 0 == plan.parameters["words.weight"].dim
    kinds = [c.kind for c in plan.collectives if c.phase == "forward"]
    assert ["all_reduce", "all_reduce", "all_gather"] == kinds
