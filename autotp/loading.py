"""From a directory to one rank's model: planned on meta, then filled with the rank's slices."""

from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.checkpoint.directory import Checkpoint
from autotp.checkpoint.hollow import fill_buffers, hollow
from autotp.checkpoint.incoming import incoming, mark_used
from autotp.checkpoint.parts import PLAN, Manifest, check_part, is_sharded, part_of
from autotp.checkpoint.quantised import quantiser_of
from autotp.checkpoint.reading import empty_shards, part, read_buffers, read_shards, untie
from autotp.checkpoint.sample import samples
from autotp.checkpoint.stored import Stored
from autotp.core.plan import Plan
from autotp.errors import PlanError
from autotp.models import config_fields
from autotp.options import Keywords, check_rank
from autotp.pipeline import planned, watched
from autotp.run.accord import agree_weights
from autotp.run.exchange import as_one
from autotp.run.group import Group, resolve
from autotp.run.heap import give_back
from autotp.run.model import ShardedModel

__all__ = ["from_pretrained", "opened", "prepared", "stored_dtype"]


class _Ways(TypedDict):
    """How a model's class is found and built."""

    attn_implementation: str | None
    trust_remote_code: bool
    revision: str | None


def from_pretrained(
    directory: str | Path,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
    debug: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    allow_extra: bool = False,
    dequantize: bool = False,
    **options: Unpack[Keywords],
) -> ShardedModel:
    """One rank's part of the model saved in `directory`, ready to call.

        model = autotp.from_pretrained("my-model", tp=2)  # in each process that torchrun starts

    The model is planned before any weight is read; then each rank reads its own slices, once.

    - `directory`: with config.json and safetensors files (or pytorch_model.bin), or what `autotp
      shard` wrote for this tp.
    - `tp`, `mesh`, `group`, `rank`, `timeout`, `debug`: as for `parallelize`.
    - `dtype`: of the parameters; None: as the configuration says, or as stored.
    - `device`: where the parameters go; None: where the group's tensors belong.
    - `attn_implementation`, `trust_remote_code`, `revision`: as in Transformers.
    - `allow_extra`: tensors that the model does not know are left unread, and are no error.
    - `dequantize`: quantised weights become plain ones of `dtype` while they are read.
    - Further keywords: as for `plan`; `training` is off unless asked for.

    Raises on every rank, as `plan` does; and WeightsError, with tensor and file, for weights that
    are missing, unknown, cut short, of another shape or kind, quantised, or NaN.
    """
    check_rank(rank)
    where = resolve(tp, mesh=mesh, group=group, rank=rank, timeout=timeout)
    if device is not None:
        where = Group(where.name, where.size, where.rank, torch.device(device))
    path = Path(directory)
    ways: _Ways = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    options.setdefault("training", False)
    if is_sharded(path):
        return watched(_from_parts(path, where, dtype, ways, options), where, debug=debug)
    with as_one(where, "opening the checkpoint"):
        checkpoint, quantiser = opened(path, dequantize=dequantize)
    with checkpoint:
        with as_one(where, "building the model"):
            model = hollow(path, dtype=dtype, otherwise=stored_dtype(checkpoint), **ways)
            tensors = prepared(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
        agree_weights(where, samples(checkpoint.tensors), "samples of the checkpoint")
        sharded = _empty(where, model, **options)
        give_back()
        with as_one(where, "reading weights"):
            read_shards(sharded, tensors, where)
    _agree_whole(sharded, where)
    return watched(sharded, where, debug=debug)


def _agree_whole(model: ShardedModel, where: Group) -> None:
    """Raises WeightsError on every rank unless all hold the same of what none holds a part of."""
    records = model.sharded_state.plan.parameters
    parts = {name for name, record in records.items() if record.dim is not None}
    whole = (*model.named_parameters(), *model.named_buffers())
    held = ((name, tensor) for name, tensor in whole if name not in parts)
    agree_weights(where, held, "what every rank holds whole")


def _from_parts(
    path: Path, where: Group, dtype: torch.dtype | str | None, ways: _Ways, options: Keywords
) -> ShardedModel:
    """One rank's model from the file that `autotp shard` wrote for it."""
    with as_one(where, "opening the checkpoint"):
        _check_own(path, options)
        checkpoint, manifest = part_of(path, where.size, where.rank), Manifest.read(path)
        options["plan"] = Plan.from_json(path / PLAN)
    with checkpoint:
        with as_one(where, "building the model"):
            model = hollow(path, dtype=dtype or manifest.torch_dtype(), **ways)
            part(model, list(manifest.untied))
            mark_used(model, manifest.keys)
            fill_buffers(model, read_buffers(model, checkpoint.tensors))
        sharded = _empty(where, model, **options)
        give_back()
        with as_one(where, "reading weights"):
            for name, record in sharded.sharded_state.plan.parameters.items():
                check_part(record, checkpoint.tensors[name], where.rank)
            read_shards(sharded, checkpoint.tensors, where, local=True)
    _agree_whole(sharded, where)
    return sharded


def _check_own(path: Path, options: Keywords) -> None:
    for name in ("plan", "overrides"):
        if options.get(name):
            raise PlanError(
                f"{path}: was cut by the plan in it, and {name}= asks for another. Load the "
                "checkpoint that it was cut from, or leave the option out."
            )


def opened(directory: Path, *, dequantize: bool = False) -> tuple[Checkpoint, Any]:
    """The checkpoint in a directory, whose configuration was checked, and its quantiser, if any."""
    if not directory.is_dir():
        raise PlanError(
            f"{directory}: is no directory. Give one with config.json and weights; a model of the "
            f"hub is downloaded first: hf download {directory} --local-dir DIRECTORY."
        )
    fields = config_fields(directory)
    quantiser = quantiser_of(directory, fields, dequantise=dequantize)
    return Checkpoint.open(directory, fields.get("transformers_weights")), quantiser


def prepared(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,  # noqa: ANN401  one of Transformers'
) -> dict[str, Stored]:
    """What is read for each of the model's keys; its buffers get their values, ties are settled."""
    found = incoming(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
    untie(model, found.tensors)
    fill_buffers(model, read_buffers(model, found.tensors))
    return dict(found.tensors)


def _empty(where: Group, model: nn.Module, **options: Unpack[Keywords]) -> ShardedModel:
    """One rank's model, whose parameters have memory, but no values yet."""
    work, made = planned(where, model, **options)
    return work.built(made, where, shards=empty_shards(model, made.plan, where))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the first tensor that holds fractions, as Transformers takes it."""
    floating = (t.dtype for t in checkpoint.tensors.values() if t.dtype.is_floating_point)
    return next((dtype for dtype in floating if dtype.itemsize > 1), torch.float32)
