"""What a rank keeps in memory: its shards and nothing of the model they were cut from."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.records.plan import Plan
from tests.models import build
from tests.spmd.beside import Call, inputs_of, run
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 12288}
MB = 1 << 20
SLACK = 10 * MB  # graphs and plans (3 MB seen); a shard is 57 MB
# Each large tensor in pages of its own, which go back when it is freed: otherwise the allocator
# keeps a hole of up to 32 MB, or not, as its threshold happens to have moved.
PAGES_OF_ITS_OWN = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by address of the real storages behind `tensors`, each once."""
    real = (
        t for t in tensors if t.device.type == "cpu" and type(t) in (torch.Tensor, nn.Parameter)
    )
    found = (t.untyped_storage() for t in real)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def everywhere() -> dict[int, int]:
    """The storages of every tensor that this process can reach."""
    gc.collect()
    # by type alone: isinstance would ask proxies of other libraries for their class
    kinds = (torch.Tensor, nn.Parameter)
    return storages([o for o in gc.get_objects() if type(o) in kinds])


def held_bytes(plan: Plan, rank: int) -> int:
    return sum(record.shards[rank].bytes for record in plan.parameters.values())


def resident(rank: int, world: int) -> tuple[str, int, int, int]:
    """The plan, and the bytes of a rank's parameters, its buffers, and what else came to be."""
    before = everywhere()
    model, _ = build("llama")
    sharded = autotp.parallelize(
        model, world, example_inputs=inputs_of("llama", Call(2, 12)), training=True
    )
    del model
    run(sharded, inputs_of("llama", Call(1, 7)), backward=True)
    parameters = storages(list(sharded.parameters()))
    buffers = storages(list(sharded.buffers()))
    others = {at: n for at, n in everywhere().items() if at not in before | parameters | buffers}
    return (
        sharded.plan.to_json(),
        sum(parameters.values()),
        sum(buffers.values()),
        sum(others.values()),
    )


@pytest.mark.parametrize("world", [2, 4])
def test_only_shards_stay(pool: Pools, world: int) -> None:
    for rank, (text, parameters, buffers, others) in enumerate(pool(world).run(resident)):
        plan = Plan.from_json(text)

        assert held_bytes(plan, rank) == parameters
        assert plan.memory["buffers"] >= buffers
        assert others < parameters // 100


def resident_size() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth() -> dict[str, int]:
    """How this process grew by a large model, and then by a quarter of it instead."""
    inputs = inputs_of("llama", Call(2, 12))
    warm, _ = build("llama")
    run(warm, inputs, backward=False)
    autotp.parallelize(warm, 4, rank=0, example_inputs=inputs, training=True)
    gc.collect()
    start = resident_size()
    model, _ = build("llama", **LARGE)
    whole = resident_size()
    sharded = autotp.parallelize(model, 4, rank=0, example_inputs=inputs, training=True)
    bytes_of_model = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    gc.collect()
    return {
        "model": bytes_of_model,
        "whole": whole - start,
        "sharded": resident_size() - start,
        "shards": held_bytes(sharded.plan, 0),
    }


def test_the_process_shrinks_to_its_shards() -> None:
    code = "import json, tests.spmd.test_memory as m; print(json.dumps(m.growth()))"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **PAGES_OF_ITS_OWN}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=240, env=environment
    )
    found = json.loads(done.stdout)

    assert found["model"] > 200 * MB
    assert found["whole"] > found["model"] - SLACK
    assert found["shards"] < found["model"] * 0.26
    assert found["sharded"] < found["shards"] + SLACK


def state_of(model: nn.Module) -> dict[str, tuple[int, int, torch.Tensor, bool]]:
    """Each parameter and buffer by name: identity, version, values, whether it is trained."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: (id(t), t._version, t.detach().clone(), t.requires_grad) for n, t in named.items()}


def test_the_model_given_is_left_as_it_was() -> None:
    model, _ = build("bert")
    model.train()
    model.get_parameter("bert.embeddings.LayerNorm.weight").requires_grad_(False)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    before, keys = state_of(model), list(model.state_dict())
    sharded = autotp.parallelize(
        model, 2, rank=1, example_inputs=inputs_of("bert", Call(2, 12)), training=True
    )
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    after = state_of(model)

    assert keys == list(model.state_dict())
    assert before.keys() == after.keys()
    for name, (identity, version, values, trained) in before.items():
        assert (identity, version, trained) == (after[name][0], after[name][1], after[name][3])
        assert torch.equal(values, after[name][2])
    assert attributes == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert not set(storages(list(sharded.parameters()))) & set(storages(list(model.parameters())))
