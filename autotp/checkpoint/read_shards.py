"""A rank's slices, from disk straight into its parameters."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from autotp.algebra.split import Split
from autotp.capture.source_model import whole_of
from autotp.checkpoint.load_map import ConvertedTensor, RebuiltTensor
from autotp.checkpoint.stored_tensor import (
    PickledTensor,
    StoredTensor,
    fill_tensor,
    iterate_blocks,
    make_full_box,
)
from autotp.errors import WeightsError
from autotp.records.plan import ParameterRecord, Plan
from autotp.runtime.group.process_group import Group, exists
from autotp.runtime.model import ShardedModel

__all__ = [
    "allocate_shards",
    "untie_parameters",
    "read_buffers",
    "read_shard",
    "read_shards",
    "show_progress",
    "untie_differing",
]


def allocate_shards(model: nn.Module, plan: Plan, where: Group) -> dict[str, Tensor]:
    """A tensor for what a rank holds of each parameter of `model`, by first names.

    All are made before anything is read: what is freed in between would leave holes among them.
    """
    return {
        name: torch.empty(
            plan.parameters[name].shards[where.rank].shape,
            dtype=parameter.dtype,
            device=where.device,
        )
        for name, parameter in whole_of(model).parameters.items()
    }


def read_shards(
    sharded: ShardedModel,
    tensors: Mapping[str, StoredTensor],
    where: Group,
    *,
    local: bool = False,
) -> None:
    """Reads what a rank holds of each parameter from `tensors` into the parameters of `sharded`.

    - `local`: the tensors on disk are the rank's parts already.
    """
    records = sharded.sharded_state.plan.parameters
    total = sum(record.shards[where.rank].bytes for record in records.values())
    with show_progress("loading weights", total, where) as progress, torch.no_grad():
        for name, record in records.items():
            stored = _find_stored(tensors, (name, *record.tied))
            out = sharded.get_parameter(name).data
            read_shard(out, stored, None if local else record, where.rank)
            progress.advance(progress.task_ids[0], record.shards[where.rank].bytes)


def read_shard(
    out: Tensor, stored: StoredTensor, record: ParameterRecord | None, rank: int
) -> None:
    """Fills `out` with what `rank` holds of a tensor; all of it where `record` is None."""
    if record is None or record.dim is None:
        fill_tensor(out, stored, make_full_box(stored.shape))
    else:
        at, dim = 0, record.dim
        for start, stop in Split.decode(record.split).ranges(rank, len(record.shards)):
            box = tuple((start, stop) if k == dim else (0, n) for k, n in enumerate(stored.shape))
            fill_tensor(out.narrow(dim, at, stop - start), stored, box)
            at += stop - start
    if isinstance(stored, ConvertedTensor | RebuiltTensor):
        stored.forget()


def read_buffers(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The buffers of `model` that are on disk, whole."""
    found: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        if stored := tensors.get(name):
            found[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
            fill_tensor(found[name], stored, make_full_box(stored.shape))
    return found


def untie_differing(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The parameters that were tied and are no more: the checkpoint has other values for them.

    As in Transformers, what a checkpoint has counts more than what its configuration says.
    """
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
    parted: list[str] = []
    for name, source in ties.items():
        if name in tensors and source in tensors and not _are_equal(tensors[name], tensors[source]):
            parted.append(name)
    untie_parameters(model, parted)
    return parted


def untie_parameters(model: nn.Module, names: list[str]) -> None:
    """Gives the tied parameters of these names tensors of their own."""
    for name in names:
        path, _, key = name.rpartition(".")
        module, old = model.get_submodule(path), model.get_parameter(name)
        setattr(module, key, nn.Parameter(torch.empty_like(old), old.requires_grad))
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        ties.pop(name, None)


@contextmanager
def show_progress(what: str, total: int, where: Group | None = None) -> Generator[Progress]:
    """A bar of bytes on the standard error of rank 0, gone when the block ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    seen = console.is_terminal and (where is None or where.rank == 0 or not exists(where.name))
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not seen
    )
    with bar:
        bar.add_task(what, total=total)
        yield bar


def _find_stored(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> StoredTensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise WeightsError(
        f"{names[0]}: is in none of the checkpoint's {len(tensors)} tensors, and Transformers "
        "would draw it at random. Save the checkpoint with it."
    )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if isinstance(one, PickledTensor) and isinstance(other, PickledTensor):
        a, b = one.tensor, other.tensor
        if (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
            b.data_ptr(),
            b.shape,
            b.stride(),
            b.dtype,
        ):
            return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return all(
        torch.equal(one.read(box).clone(), other.read(box))
        for box in iterate_blocks(one.shape, one.dtype.itemsize)
    )
