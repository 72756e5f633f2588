"""What ranks send each other outside of graphs: failures, texts, and full tensors."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp import errors
from autotp.algebra.split import Split
from autotp.errors import AutotpError, GroupError
from autotp.records.plan import ParameterRecord
from autotp.runtime.group.failures import note_wait
from autotp.runtime.group.process_group import Group, get_process_group, group_exists
from autotp.runtime.ops.blocks import concatenate_shards
from autotp.runtime.ops.communicator import Message, Processes


@contextmanager
def fail_together(group: Group, what: str = "a common step") -> Generator[None]:
    """Raise an error of one rank in the block on all ranks at its end, with one message.

    Constraints:
    - All ranks must enter the block, and none may communicate in it: others may have left it.
    - An error that is not autotp's is raised unchanged where it arose, and reported to the others.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  it is raised below, once all ranks know
        failure = error
    texts = gather_texts(
        group, "" if failure is None else f"{type(failure).__name__}\0{failure}", what
    )
    first = next(((rank, text) for rank, text in enumerate(texts) if text), None)
    own = first is not None and (len(texts) == 1 or first[0] == group.rank)
    if failure is not None and (own or not isinstance(failure, AutotpError)):
        raise failure
    if first is not None:
        raise _rebuild_error(*first) from failure


def gather_texts(group: Group, text: str, what: str = "exchanging messages") -> list[str]:
    """Gather the text of each rank; without processes, only the own one."""
    if not group_exists(group.name):
        return [text]
    data = text.encode(errors="backslashreplace")  # e.g. of a path that is not UTF-8
    sizes = gather_rows(group, torch.tensor([len(data)]), what).flatten().tolist()
    if max(sizes) == 0:
        return [""] * group.size
    padded = torch.tensor(list(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    found = gather_rows(group, padded, what)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(found, sizes, strict=True)]


def gather_rows(group: Group, local: Tensor, what: str) -> Tensor:
    """Gather flat tensors of one size: (rank, element), on the CPU.

    - `what` is being done, for the error if a rank is lost.
    """
    own = Message(local.to(group.device))
    with note_wait(group.name, what):
        (found,) = Processes(group.name).exchange("all_gather", [own])
        return found.cpu().view(group.size, -1)


def gather_tensor(
    group: Group, local: Tensor, record: ParameterRecord | None, *, to_all: bool
) -> Tensor | None:
    """Gather the full tensor from the shards of all ranks, on the CPU of rank 0, or of all ranks.

    Constraints:
    - Every rank must call it. `record` None: the tensor is replicated.
    - Rank 0 stores the full tensor and its shards at once, and nothing else of the model.
    """
    if record is None or record.dim is None or group.size == 1:
        return local.detach().cpu() if to_all or group.rank == 0 else None
    with note_wait(group.name, f"gathering {record.name}"):
        full = _concatenate_shards(group, local.detach(), record)
    if not to_all:
        return full
    if full is None:
        full = torch.empty(record.shape, dtype=local.dtype)
    data = _bytes(full).to(group.device)
    dist.broadcast(data, group=get_process_group(group.name), group_src=0)
    return full if group.rank == 0 else data.cpu().view(local.dtype).view(record.shape)


def _concatenate_shards(group: Group, local: Tensor, record: ParameterRecord) -> Tensor | None:
    """Concatenate the shards on rank 0, to which the others send theirs."""
    ranks = get_process_group(group.name)
    if group.rank:
        dist.send(_bytes(local).to(group.device), group=ranks, group_dst=0)
        return None
    shards = [local.cpu()]
    for rank in range(1, group.size):
        shape = record.shards[rank].shape
        shard = torch.empty(shape, dtype=local.dtype, device=group.device)
        dist.recv(shard.view(-1).view(torch.uint8), group=ranks, group_src=rank)
        shards.append(shard.cpu())
    assert record.dim is not None
    return concatenate_shards(shards, record.dim, Split.decode(record.split)).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _rebuild_error(rank: int, text: str) -> Exception:
    kind, _, message = text.partition("\0")
    kinds: Mapping[str, Any] = vars(errors)
    known = kinds.get(kind)
    if isinstance(known, type) and issubclass(known, AutotpError):
        return known(message)
    return GroupError(
        f"rank {rank} failed: {kind}: {message}. Look at the output of that rank, and start all "
        "ranks again."
    )
