"""Pools of worker processes that test functions run in, one pool a world size, kept for a session.

Every worker is a member of one gloo group over the loopback interface. A function and its arguments
are sent by reference and by value, so the function must be at the top of an importable module.

Workers are forked from one process that has imported what a capture needs: that takes longer than
most captures of tiny models.
"""

import atexit
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Pool", "WorkerError", "close_all", "forking", "pool_of"]

_GRACE = 3.0
_IMPORTED = (
    "tests.spmd.pool",
    "tests.spmd.failing",
    "tests.models",
    "torch._dynamo",
    "torch.export",
    "transformers.modeling_utils",
)
"""What the process that workers are forked from imports; it does no more, so it has one thread."""
_pools: dict[int, "Pool"] = {}


class WorkerError(Exception):
    """A worker raised, died or did not answer in time; the message has each rank's traceback."""


class Pool:
    """The `world` processes of one group; started on first use and after any failure.

    Pool(2).run(fn, "a")  # [fn(0, 2, "a"), fn(1, 2, "a")], each in its own process
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """The ids of the running workers, by rank."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: object, timeout: float = 240.0) -> list[Any]:
        """What `fn(rank, world, *args)` returned on each rank.

        Constraints:
        - Raises WorkerError if any rank raised, died, or had no answer after `timeout` seconds; all
          workers are then killed, since the others may wait for it for ever.
        """
        self._start()
        message = pickle.dumps((fn, args))
        for _, connection in self._workers:
            connection.send_bytes(message)
        answers = self._answers(time.monotonic() + timeout)
        wrong = {r: text for r in range(self.world) if (text := _failure(answers.get(r))) != ""}
        if wrong:
            self.close()
            raise WorkerError("\n".join(f"rank {r} of {self.world} {t}" for r, t in wrong.items()))
        return [answers[rank][1] for rank in range(self.world)]

    def close(self) -> None:
        """Kills the workers and waits until they are gone."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._folder = [], None

    def _start(self) -> None:
        if self._workers:
            return
        context = forking()
        self._folder = tempfile.TemporaryDirectory(prefix="autotp-pool-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, str(store), theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        answers: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank, connection)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _answer(self, rank: int, connection: Connection) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        except EOFError:
            process = self._workers[rank][0]
            process.join()
            return False, f"died with exit code {process.exitcode}"
        return answer


def forking() -> ForkServerContext:
    """The context whose processes are forked from one that has imported `_IMPORTED`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def pool_of(world: int) -> Pool:
    """The session's pool of `world` workers."""
    return _pools.setdefault(world, Pool(world))


def close_all() -> None:
    """Ends every pool of the session; also done at exit."""
    for pool in _pools.values():
        pool.close()


atexit.register(close_all)


def _failure(answer: tuple[bool, Any] | None) -> str:
    if answer is None:
        return "did not answer in time and was killed"
    return "" if answer[0] else str(answer[1])


def _work(rank: int, world: int, store: str, connection: Connection) -> None:
    """The life of a worker: join the group, then answer calls until the other end closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_outcome(rank, world, message))


def _outcome(rank: int, world: int, message: bytes) -> bytes:
    try:
        fn, args = pickle.loads(message)
        return pickle.dumps((True, fn(rank, world, *args)))
    except Exception:  # noqa: BLE001 - whatever the test function raised is the answer
        return pickle.dumps((False, f"raised:\n{traceback.format_exc()}"))
