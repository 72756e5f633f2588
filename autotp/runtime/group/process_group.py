"""The tensor-parallel group of this process: found, started, or only described (`rank=`).

A group is passed through graphs as its *name*, a string, so that graphs can be printed, copied and
compared; ops look the process group up when they run. A rank is always the rank in this group, not
in the world: with two replicas of tp 2, world ranks 1 and 3 may be one group.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from autotp.algebra.split import Peers, Split
from autotp.errors import GroupError, PlanError
from autotp.records.plan import Plan

# Any: private to torch, and typed differently in each version.
_registry: Any = _distributed_c10d
_ALONE = "autotp_alone"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class Group:
    """A tensor-parallel group as this process sees it.

    - `name`: what the ops take; it resolves to a process group unless the group has no processes.
    - `size`, `rank`: the number of members and this process's place among them.
    - `device`: where this rank's tensors belong; it follows the group's backend.
    """

    name: str
    size: int
    rank: int
    device: torch.device


def resolve_group(
    tp: int | None,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
) -> Group:
    """Resolve the group to shard over.

        resolve_group(8)                # the world, which is initialised under torchrun if
        necessary resolve_group(None, mesh=mesh)  # the "tp" dim of a mesh, or its only dim
        resolve_group(8, rank=3)        # rank 3 of 8, without processes: for inspection only

    Constraints:
    - At most one of `mesh`, `group`, `rank` is given.
    - `tp` None takes the group's size; otherwise they must be equal.
    - A tp of 1 needs no group: a group of one process is made, without changing the world.
    - `timeout`: seconds after which the group stops waiting for a rank; None keeps its own.
    """
    _check_tp(tp)
    limit = _read_timeout(timeout)
    _check_exclusive(mesh=mesh, group=group, rank=rank)
    if rank is not None:
        return _imagine_group(tp, rank)
    if mesh is not None:
        return _set_timeout(_describe_group(_find_group(mesh), tp), limit)
    if group is not None:
        return _set_timeout(_describe_group(group, tp), limit)
    if not dist.is_initialized():
        if not all(name in os.environ for name in _TORCHRUN):
            return _resolve_lone_group(tp)
        _initialise(limit)
    return _set_timeout(_describe_group(dist.group.WORLD, tp), limit)


def group_exists(name: str) -> bool:
    """Whether a process group is registered under `name` in this process."""
    try:
        _registry._resolve_process_group(name)
    except RuntimeError:
        return False
    return True


def is_real(group: Group) -> bool:
    """Whether the group has processes (rather than only `rank=`)."""
    return dist.is_initialized() and group.name != "tp"


def check_group(name: str) -> str:
    """Check that a process group is registered under `name`, and return it; else PlanError."""
    _lookup(name)
    return name


def get_process_group(name: str) -> dist.ProcessGroup:
    """Get the process group registered under `name`; PlanError if there is none."""
    return _lookup(name)


def find_rank(name: str) -> int:
    """Find the rank of this process in the group called `name`."""
    return _lookup(name).rank()


def find_size(name: str) -> int:
    """Find the number of members of the group called `name`."""
    return _lookup(name).size()


def find_timeout(name: str) -> timedelta | None:
    """Find how long the group called `name` waits for a rank; None if torch does not say."""
    known = (getattr(backend, "options", None) for backend in _list_backends(name))
    return next((options._timeout for options in known if options is not None), None)


def name_subgroup(name: str, peers: Peers) -> str:
    """Name the sub-group of the ranks `peers` in the group called `name`.

    Constraints: it is made on first use, by its members alone, all of which must call this, in the
    same order for several sub-groups.
    """
    if peers.count == find_size(name):
        return name
    key = (name, peers)
    if key not in _SUBGROUPS or not group_exists(_SUBGROUPS[key]):
        parent = _lookup(name)
        ranks = [dist.get_global_rank(parent, r) for r in peers.ranks]
        limit = find_timeout(name)
        made = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), f"rank {parent.rank()} is not among {peers}"
        _SUBGROUPS[key] = made.group_name
    return _SUBGROUPS[key]


def make_subgroups(group: Group, plan: Plan) -> None:
    """Make the sub-groups in which `plan` sums gradients before the first backward pass.

    Constraints: every rank must call it, with the same plan.
    """
    for record in plan.parameters.values() if plan.training and group_exists(group.name) else ():
        if record.gradient_partial and record.split:
            split = Split.decode(record.split)
            found = [split.find_peers(piece, group.rank, group.size) for piece in split.segments]
            for peers in dict.fromkeys(p for p in found if p.count > 1):
                name_subgroup(group.name, peers)


_SUBGROUPS: dict[tuple[str, Peers], str] = {}


def _check_tp(tp: object) -> None:
    if tp is not None and (not isinstance(tp, int) or isinstance(tp, bool) or tp < 1):
        raise PlanError(
            f"tp={tp!r}: must be the number of ranks, 1 or more, or None for the size of the group."
        )


def _read_timeout(timeout: object) -> timedelta | None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise PlanError(
            f"timeout is {timeout!r}. Give a positive number of seconds, a timedelta, or None for "
            "the group's own timeout."
        )
    return timedelta(seconds=seconds)


def _set_timeout(group: Group, limit: timedelta | None) -> Group:
    """Set how long the group waits for a rank, and return it."""
    if limit is not None:
        for backend in _list_backends(group.name):
            backend._set_default_timeout(limit)
    return group


def _list_backends(name: str) -> list[Any]:
    """List the backends of the group called `name`, by device."""
    group: Any = _lookup(name)  # Any: private to torch, and typed differently in each version
    return [group._get_backend(device) for device in group._device_types]


def _check_exclusive(**given: object) -> None:
    names = [f"{name}=" for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise PlanError(
            f"{len(names)} groups are given, by {' and '.join(names)}. Give only one of them."
        )


def _imagine_group(tp: int | None, rank: int) -> Group:
    if tp is None:
        raise PlanError(
            f"rank is {rank}, but there is no group that determines tp. Give tp= as well."
        )
    if isinstance(rank, bool) or not 0 <= rank < tp:
        raise PlanError(f"rank is {rank!r}. With tp {tp}, give an integer from 0 to {tp - 1}.")
    return Group("tp", tp, rank, torch.device("cpu"))


def _find_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh.get_group()
    if "tp" not in names:
        raise PlanError(
            f"the mesh of shape {tuple(mesh.shape)} has the dims {list(names)}, none of which is "
            'called "tp". Give one of them that name, or pass one dim of the mesh, mesh["…"].'
        )
    return mesh.get_group("tp")


def _describe_group(group: dist.ProcessGroup | None, tp: int | None) -> Group:
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"world rank {dist.get_rank()} of {dist.get_world_size()} is not a member of the given "
            "group. Call autotp only on its members, each with its own group."
        )
    if tp is not None and tp != group.size():
        raise PlanError(
            f"tp is {tp}, but the group has {group.size()} members. Leave tp out, pass mesh= or "
            f"group= with {tp} ranks, or start {tp} processes: {_format_torchrun(tp)}"
        )
    return Group(group.group_name, group.size(), group.rank(), _find_device(group))


def _find_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" not in dist.get_backend_config(group):
        return torch.device("cpu")
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def _initialise(limit: timedelta | None) -> None:
    """Initialise the world that torchrun describes."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(backend, timeout=limit)
    except dist.DistError as error:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise GroupError(
            f"start of the group: rank {rank} of {size} did not reach all others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '?')} (torch: "
            f"{str(error).splitlines()[0]}). Look for the first error in the other ranks' output, "
            "and start all of them again."
        ) from error


def _resolve_lone_group(tp: int | None) -> Group:
    if tp != 1:
        raise PlanError(
            f"tp is {tp}, but no process group is initialised and RANK, WORLD_SIZE and MASTER_ADDR "
            f"are not all set. Start the processes with: {_format_torchrun(tp or 8)}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    group = _make_lone_group(device)
    if not group_exists(_ALONE):  # destroying all groups of the process removes this name too
        _registry._register_process_group(_ALONE, group)
    return Group(group.group_name, 1, 0, device)


@cache
def _make_lone_group(device: torch.device) -> dist.ProcessGroup:
    # The default group is the caller's to initialise, so a lone process gets a group of its own;
    # it is cached because the registry does not keep it alive.
    store, kinds = _registry.HashStore(), dist.ProcessGroup.BackendType
    group: Any = dist.ProcessGroup(store, 0, 1)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        kind, backend = kinds.NCCL, dist.ProcessGroupNCCL(store, 0, 1, options)
    else:
        kind, backend = kinds.GLOO, dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=1))
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    group._set_group_name(_ALONE)
    _registry._register_process_group(_ALONE, group)
    return group


def _lookup(name: str) -> dist.ProcessGroup:
    if not group_exists(name):
        raise PlanError(
            f"the group {name!r} has no processes here, so collectives cannot run. Build the model "
            f"in the processes of its group, started with: {_format_torchrun(8)}"
        )
    return _registry._resolve_process_group(name)


def _format_torchrun(tp: int) -> str:
    return f"torchrun --nproc-per-node {tp} your_script.py"
