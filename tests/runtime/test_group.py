"""Which group is found, and what is said when none fits."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.errors import GroupError, PlanError
from autotp.runtime.group.agreement import require_agreement
from autotp.runtime.group.process_group import (
    Group,
    find_rank,
    find_size,
    find_timeout,
    group_exists,
    resolve_group,
)
from autotp.runtime.ops.library import LIBRARY

CPU = torch.device("cpu")
TORCHRUN = r"torchrun --nproc-per-node {} your_script\.py"


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("tp", [0, -2, True, 2.0, "2"])
def test_tp_must_be_a_positive_whole_number(tp: object) -> None:
    with pytest.raises(PlanError, match=f"tp={tp!r}: must be the number of ranks"):
        resolve_group(tp)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("tp", "processes"), [(None, 8), (2, 2)])
def test_without_a_group_the_error_tells_how_to_start_one(tp: int | None, processes: int) -> None:
    with pytest.raises(PlanError, match=f"tp is {tp}, but .* {TORCHRUN.format(processes)}"):
        resolve_group(tp)


def test_one_rank_can_be_imagined() -> None:
    group = resolve_group(4, rank=3)

    assert Group("tp", 4, 3, CPU) == group
    assert not group_exists(group.name)
    assert require_agreement(group, "a plan", "the plan") is None


@pytest.mark.parametrize("rank", [-1, 4, True])
def test_an_imagined_rank_is_below_tp(rank: int) -> None:
    with pytest.raises(PlanError, match=f"rank is {rank}. With tp 4, give an integer from 0 to 3"):
        resolve_group(4, rank=rank)


def test_an_imagined_rank_needs_tp() -> None:
    with pytest.raises(PlanError, match="rank is 1, but there is no group that determines tp"):
        resolve_group(None, rank=1)


@pytest.mark.parametrize("timeout", [0, -1.0, True, "5", float("nan"), timedelta(0)])
def test_a_timeout_is_a_time_to_wait(timeout: object) -> None:
    with pytest.raises(PlanError, match="timeout is .*. Give a positive number of seconds"):
        resolve_group(1, timeout=timeout)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("timeout", [7, timedelta(seconds=7)])
def test_the_timeout_is_the_groups_from_then_on(
    world: dist.ProcessGroup, timeout: float | timedelta
) -> None:
    before = find_timeout(world.group_name)
    resolve_group(1, group=world)

    assert before == find_timeout(world.group_name) != timedelta(seconds=7)
    assert timedelta(seconds=7) == find_timeout(resolve_group(1, group=world, timeout=timeout).name)


def test_ranks_that_never_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in start.items():
        monkeypatch.setenv(name, str(value))

    with pytest.raises(GroupError, match=rf"rank 0 of 2 did not reach all .* 127.0.0.1:{port}"):
        resolve_group(2, timeout=1)


@pytest.mark.parametrize("op", ["copy", "reduce", "keep_first"])
def test_calling_without_the_group_tells_how_to_start_it(op: str) -> None:
    x = torch.ones(2, requires_grad=True)
    run = getattr(torch.ops.autotp, op)

    assert LIBRARY.ns == "autotp"
    with pytest.raises(PlanError, match=f"'tp' has no processes here, .*{TORCHRUN.format(8)}"):
        run(x, "tp").sum().backward()


@pytest.mark.parametrize("look", [find_rank, find_size])
def test_an_unknown_name_is_refused(look: object) -> None:
    assert callable(look)
    with pytest.raises(PlanError, match="'nobody' has no processes"):
        look("nobody")


def test_a_lone_process_needs_no_group_for_tp_1() -> None:
    group = resolve_group(1)

    assert (1, 0) == (group.size, group.rank)
    assert (1, 0) == (find_size(group.name), find_rank(group.name))
    assert group == resolve_group(1)
    assert not dist.is_initialized()
    assert require_agreement(group, "a plan", "the plan") is None


def test_the_world_is_taken(world: dist.ProcessGroup) -> None:
    assert Group(world.group_name, 1, 0, CPU) == resolve_group(None)
    assert resolve_group(1) == resolve_group(None, group=world)


def test_tp_must_be_the_size_of_the_group(world: dist.ProcessGroup) -> None:
    with pytest.raises(PlanError, match=f"tp is 2, but the group has 1 .*{TORCHRUN.format(2)}"):
        resolve_group(2, group=world)


def test_the_dims_of_a_mesh(world: dist.ProcessGroup) -> None:
    assert resolve_group(None) == resolve_group(1, mesh=DeviceMesh("cpu", [0]))
    named = DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "tp"))

    assert (1, 0) == (resolve_group(1, mesh=named).size, resolve_group(1, mesh=named).rank)
    with pytest.raises(PlanError, match=r"mesh of shape \(1, 1\) has the dims \['data', 'model'\]"):
        resolve_group(1, mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("data", "model")))


def test_one_group_is_enough(world: dist.ProcessGroup) -> None:
    with pytest.raises(PlanError, match="2 groups are given, by group= and rank="):
        resolve_group(1, group=world, rank=0)


@pytest.mark.slow
def test_torchrun_starts_the_world() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (
        "from autotp.runtime.group.process_group import resolve_group\n"
        "g = resolve_group(None)\nprint(g.size, g.rank, g.device)"
    )
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [_started(script, {**settings, "RANK": str(rank)}) for rank in range(2)]

    assert ["2 0 cpu\n", "2 1 cpu\n"] == [process.communicate(timeout=60)[0] for process in ranks]


def _started(script: str, settings: dict[str, str]) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": ".", "GLOO_SOCKET_IFNAME": "lo", **settings}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
