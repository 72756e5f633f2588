"""Read a rank's slices from disk directly into its parameters."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from autotp.algebra.split import Split
from autotp.capture.source_model import read_source_model
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
from autotp.runtime.group.process_group import Group, group_exists
from autotp.runtime.model import ShardedModel


def allocate_shards(model: nn.Module, plan: Plan, where: Group) -> dict[str, Tensor]:
    """Allocate a rank's shard of each parameter of `model`, by first names.

    All are allocated before anything is read: memory freed in between would be fragmented.
    """
    return {
        name: torch.empty(
            plan.parameters[name].shards[where.rank].shape,
            dtype=parameter.dtype,
            device=where.device,
        )
        for name, parameter in read_source_model(model).parameters.items()
    }


def read_shards(
    sharded: ShardedModel,
    tensors: Mapping[str, StoredTensor],
    where: Group,
    *,
    local: bool = False,
) -> None:
    """Read a rank's shard of each parameter from `tensors` into the parameters of `sharded`.

    - `local`: the tensors on disk are the rank's shards already.
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
    """Read the shard that `rank` has of a tensor into `out`; all of it if `record` is None."""
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
    """Read the buffers of `model` that are on disk."""
    found: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        if stored := tensors.get(name):
            found[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
            fill_tensor(found[name], stored, make_full_box(stored.shape))
    return found


def untie_differing(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Untie tied parameters for which the checkpoint has different values; return their names.

    As in Transformers, the checkpoint takes precedence over its configuration.
    """
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
    differing: list[str] = []
    for name, source in ties.items():
        if name in tensors and source in tensors and not _are_equal(tensors[name], tensors[source]):
            differing.append(name)
    untie_parameters(model, differing)
    return differing


def untie_parameters(model: nn.Module, names: list[str]) -> None:
    """Give the tied parameters of these names their own tensors."""
    for name in names:
        path, _, key = name.rpartition(".")
        module, old = model.get_submodule(path), model.get_parameter(name)
        setattr(module, key, nn.Parameter(torch.empty_like(old), old.requires_grad))
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        ties.pop(name, None)


@contextmanager
def show_progress(what: str, total: int, where: Group | None = None) -> Generator[Progress]:
    """Show a progress bar in bytes on the stderr of rank 0 until the block ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    visible = console.is_terminal and (
        where is None or where.rank == 0 or not group_exists(where.name)
    )
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not visible
    )
    with bar:
        bar.add_task(what, total=total)
        yield bar


def _find_stored(tensors: Mapping[str, StoredTensor], names: tuple[str, ...]) -> StoredTensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise WeightsError(
        f"{names[0]}: is not among the {len(tensors)} tensors of the checkpoint, and Transformers "
        "would initialise it at random. Save the checkpoint with it."
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
