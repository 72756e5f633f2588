"""Errors about ranks that are gone, late or have failed: where this rank waited, and how long.

A call that succeeds costs nothing more: the backend's own error is translated when it is raised. A
rank that fails by itself leaves a note in the group's store, which the others read when they stop
waiting for it.
"""

import linecache
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from autotp.errors import GroupError
from autotp.runtime.group.process_group import find_timeout, get_process_group, group_exists

# Any: private to torch.
_c10d: Any = distributed_c10d
_SIGNS = re.compile(
    r"Connection closed by peer|Connection reset|Timed out waiting|timeout caused pair|gloo/|NCCL"
)
_SOURCE = re.compile(r"^\[[^\]]*\.cc:\d+\] ")
_LATE = re.compile(r"[Tt]imed out|timeout", re.ASCII)
_AGAIN = "Look for the first error in the other ranks' output, and start all of them again."
_LONGER = (
    "Give every rank the same calls with the same inputs (debug=True compares them). If a rank is "
    "only slow, set a longer timeout=."
)
Store: TypeAlias = Any  # a c10d store, which torch leaves without types


def is_lost(error: BaseException) -> bool:
    """Whether an error is a backend's, about ranks that are gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


@contextmanager
def note_wait(name: str, where: str) -> Generator[None]:
    """Turn errors about lost ranks of the group called `name` into one GroupError."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        raise_group_error(error, name, where, time.monotonic() - began)
        raise


def raise_group_error(error: Exception, name: str, where: str, seconds: float) -> None:
    """Raise GroupError if `error` is about lost ranks; otherwise leave a note for the others.

    - `where`: what this rank did; `seconds`: for how long.
    """
    if not group_exists(name) or (group := get_process_group(name)).size() == 1:
        return
    if not is_lost(error):
        _leave_note(group, f"{type(error).__name__}: {error}")
        return
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    whom = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
    text = _SOURCE.sub("", str(error).partition(". This is typically")[0].splitlines()[0])
    fate, advice = _describe_fate(error, find_timeout(name))
    raise GroupError(
        f"{where}: rank {group.rank()} of {group.size()} waited for {whom}, which {fate}, "
        f"{seconds:.2f} s after this began (torch: {text}). {_read_notes(group, others)}{advice}"
    ) from error


def find_place(error: BaseException, model: nn.Module) -> str:
    """Find where in the generated code of `model` an error arose; empty if it was not there.

    Example: `model.layers.0.mlp: down_proj_all_reduce_wait_tensor = …wait_tensor.default(…)`.
    """
    frames = [f for f in _list_frames(error.__traceback__) if f[0].startswith("<autotp graph")]
    if not frames:
        return ""
    file, line, owner = frames[-1]
    paths = (path for path, module in model.named_modules() if module is owner)
    code = linecache.getline(file, line).strip().partition(";  ")[0].replace("torch.ops.", "")
    return f"{next(paths, '') or 'the model'}: {code}"


def _list_frames(found: TracebackType | None) -> Iterator[tuple[str, int, object]]:
    """List file, line and `self` of each frame, outermost first."""
    while found is not None:
        yield (
            found.tb_frame.f_code.co_filename,
            found.tb_lineno,
            found.tb_frame.f_locals.get("self"),
        )
        found = found.tb_next


def _describe_fate(error: Exception, timeout: timedelta | None) -> tuple[str, str]:
    """Describe what happened to the others, and what to do."""
    if not _LATE.search(str(error)):
        return "closed its connection: it exited or was killed", _AGAIN
    limit = f"{timeout.total_seconds():g} s, the group's timeout" if timeout else "the timeout"
    return f"did not arrive within {limit}", _LONGER


def _leave_note(group: dist.ProcessGroup, text: str) -> None:
    store = _find_store()
    if store is not None:
        with suppress(dist.DistError, RuntimeError):  # the rank that had the store is gone
            store.set(_name_note(group, group.rank()), f"{time.time()} {text}")


def _read_notes(group: dist.ProcessGroup, others: list[int]) -> str:
    """Read the notes that other ranks left before they failed."""
    store = _find_store()
    try:
        keys = {rank: _name_note(group, rank) for rank in others}
        left = {r: store.get(k).decode() for r, k in keys.items() if store and store.check([k])}
    except (dist.DistError, RuntimeError) as error:  # the rank that had the store is gone
        return f"The group's store is gone too ({type(error).__name__}). "
    notes = {rank: text.split(" ", 1) for rank, text in left.items()}
    return "".join(
        f"Rank {rank} failed {time.time() - float(when):.1f} s ago: {text.rstrip('.')}. "
        for rank, (when, text) in notes.items()
    )


def _name_note(group: dist.ProcessGroup, rank: int) -> str:
    return f"autotp/{group.group_name}/{rank}"


def _find_store() -> Store | None:
    """Find the store through which the ranks started; None without a default group."""
    return _c10d._get_default_store() if dist.is_initialized() else None
