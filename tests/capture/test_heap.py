"""What a capture leaves behind: nothing that only it needed."""

import linecache

import pytest
import torch
from torch import fx, nn
from torch.fx import graph_module

import autotp
from autotp.capture.heap import release_memory
from tests.models import build


def test_sources_of_graph_modules_that_are_gone_are_dropped() -> None:
    living, gone = (fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))) for _ in range(2))
    names = [type(m).forward.__code__.co_filename for m in (living, gone)]
    assert set(names) <= set(graph_module._loader.eval_cache)

    del gone
    release_memory()

    assert [True, False] == [name in graph_module._loader.eval_cache for name in names]
    assert "def forward" in "".join(linecache.getlines(names[0]))


@pytest.mark.slow
def test_layers_that_are_alike_hold_one_description_of_their_values() -> None:
    sharded = autotp.parallelize(build("llama", num_hidden_layers=3)[0], tp=1)
    variant = next(iter(sharded.variants.values()))
    _, first, other = variant.outlined.layers.values()  # the first follows the embedding

    for mine, its in zip(first.nodes, other.nodes, strict=True):
        value = mine.meta.get("val")
        assert value is its.meta.get("val") or not isinstance(value, torch.Tensor)
        assert mine.meta.get("stack_trace") is its.meta.get("stack_trace")
