"""The pool itself: results by rank, failures that reach the test, nothing left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.spmd.pool import Pool, WorkerError

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]


def summed_ranks(rank: int, world: int, offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, total


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def raise_on_last(rank: int, world: int) -> None:
    if rank == world - 1:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def hang_on_first(rank: int, world: int) -> int:
    if rank == 0:
        time.sleep(60)
    return rank


def die_on_first(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_by_rank(pool: Pools) -> None:
    expected = [(rank, torch.tensor([23.0])) for rank in range(2)]

    assert expected == pool(2).run(summed_ranks, 11)


def test_workers_are_kept_between_runs(pool: Pools) -> None:
    first = pool(2).run(process_id)

    assert first == pool(2).run(process_id)
    assert first == pool(2).pids


def test_an_exception_reaches_the_test_while_others_wait() -> None:
    pool = Pool(2)
    pids, start = pool.run(process_id), time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2 raised:.*ValueError: no luck on 1"):
        pool.run(raise_on_last)

    assert time.monotonic() - start < 30
    assert [False, False] == [is_running(pid) for pid in pids]
    assert 2 == len(pool.run(process_id))
    pool.close()


def test_a_hang_ends_at_the_timeout_and_the_next_run_is_fresh() -> None:
    pool = Pool(2)
    pids = pool.run(process_id)
    with pytest.raises(WorkerError, match="rank 0 of 2 did not answer in time"):
        pool.run(hang_on_first, timeout=1.0)

    assert [False, False] == [is_running(pid) for pid in pids]
    assert set(pids).isdisjoint(pool.run(process_id))
    pool.close()


def test_a_death_is_told_with_its_exit_code() -> None:
    pool = Pool(1)
    with pytest.raises(WorkerError, match="rank 0 of 1 died with exit code 7"):
        pool.run(die_on_first)


def test_no_process_is_left_when_a_session_ends() -> None:
    script = (
        "from tests.spmd.pool import pool_of\nfrom tests.spmd.test_pool import process_id\n"
        "if __name__ == '__main__':\n    print(*pool_of(2).run(process_id))\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    pids = [int(pid) for pid in done.stdout.split()]

    assert 2 == len(pids)
    assert [False, False] == [is_running(pid) for pid in pids]
