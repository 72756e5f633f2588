"""Loading takes the memory of a rank's shards and little more; the benchmark at a small size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.loading import MB, TINY, figures, write

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 24000,
}
BESIDE = 20 * MB  # the plan, one graph, blocks that are read: the same for any size of weights


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """The bytes of the file, and what each rank measured."""
    large, warm = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("warm")
    size = write(large, SMALL, torch.float32)
    write(warm, TINY, torch.float32)
    return size, figures(Path(large), Path(warm), 2, timeout=200)


def test_a_rank_grows_by_its_shards(measured: tuple[int, list[dict[str, Any]]]) -> None:
    size, ranks = measured
    for rank in ranks:
        assert 0.49 * size < rank["shards"] < 0.52 * size
        assert rank["all"] < rank["shards"] + BESIDE
        assert rank["peak"] < rank["shards"] + BESIDE


def test_each_byte_is_read_by_one_rank(measured: tuple[int, list[dict[str, Any]]]) -> None:
    size, ranks = measured

    assert size < sum(rank["read"] for rank in ranks) < 1.02 * size
    assert ranks[0]["sum"] == ranks[1]["sum"]
