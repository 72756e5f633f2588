"""Ranks that are meant to die: processes of their own, forked from one that has imported all."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.spmd.pool import forking

__all__ = ["End", "ends"]


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, what it raised (or returned), and after how many seconds."""

    code: int | None
    raised: str
    returned: Any
    seconds: float


def ends(
    world: int, fn: Callable[..., Any], *args: object, limit: float = 240.0, group: float = 60.0
) -> list[End]:
    """How the ranks that run `fn(rank, world, *args)` end, in `group` seconds' patience.

    Constraints: all are gone when it returns; those that were not after `limit` were killed.
    """
    context = forking()
    with tempfile.TemporaryDirectory(prefix="autotp-ends-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        about = (world, str(Path(folder) / "store"), group, fn, args)
        ranks = [
            context.Process(target=_live, args=(rank, pipes[rank][1], *about), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        told = _told([ours for ours, _ in pipes], time.monotonic() + limit)
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()
    codes = [process.exitcode for process in ranks]
    return [End(code, *last) for code, last in zip(codes, told, strict=True)]


def _told(pipes: list[Connection], deadline: float) -> list[tuple[str, Any, float]]:
    """The last word of each rank; nothing for one that died without."""
    left, found = list(pipes), dict[Connection, tuple[str, Any, float]]()
    while left:
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            left.remove(pipe)
            try:
                found[pipe] = pipe.recv()
            except EOFError:
                found[pipe] = "", None, 0.0
    return [found.get(pipe, ("still there at the end", None, 0.0)) for pipe in pipes]


def _live(
    rank: int,
    pipe: Connection,
    world: int,
    store: str,
    group: float,
    fn: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", timeout=timedelta(seconds=group), **where)
    began = time.monotonic()
    try:
        returned = fn(rank, world, *args)
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        pipe.send((f"{type(error).__name__}: {error}\n\n{told}", None, time.monotonic() - began))
        raise
    pipe.send(("", returned, time.monotonic() - began))
