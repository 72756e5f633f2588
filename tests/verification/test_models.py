"""Tiny models over 2, 3 and 4 ranks in lockstep, where tests/spmd/test_models.py runs processes.

Both run the same code of the same ops; here only the exchange between ranks is the simulator's.
"""

import pytest

from tests.models import ONE_LAYER, build
from tests.proven import Captured
from tests.sharding import check_sharding
from tests.spmd.beside import DIVISIBLE_BY_3


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVISIBLE_BY_3)
def test_a_model_trains_as_the_unsharded_one_over_any_ranks(name: str) -> None:
    one_layer = ONE_LAYER.get(name, {"num_hidden_layers": 1})
    for worlds, sizes in (((2, 4), {}), ((3,), DIVISIBLE_BY_3[name])):
        captured = Captured(*build(name, **one_layer, **sizes), training=True)
        for world in worlds:
            check_sharding(captured.proven(world), world)
