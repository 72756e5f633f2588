"""From a directory to one rank's model: planned on meta, then filled with the rank's slices."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.api import attach_group_monitor, compile_on_all_ranks
from autotp.capture.heap import give_back
from autotp.checkpoint.directory import Checkpoint, read_json
from autotp.checkpoint.empty_model import build_empty_model, fill_buffers
from autotp.checkpoint.load_map import map_checkpoint, mark_used_conversions
from autotp.checkpoint.quantized import find_quantiser
from autotp.checkpoint.read_shards import (
    allocate_shards,
    read_buffers,
    read_shards,
    untie_differing,
    untie_parameters,
)
from autotp.checkpoint.samples import sample_tensors
from autotp.checkpoint.sharded_directory import (
    PLAN,
    Manifest,
    check_shards,
    is_sharded,
    open_rank_file,
)
from autotp.checkpoint.stored_tensor import StoredTensor
from autotp.errors import PlanError, WeightsError
from autotp.model_source import read_config_fields
from autotp.options import Keywords, check_rank, read_request
from autotp.records.plan import Plan
from autotp.runtime.group.agreement import agree_weights
from autotp.runtime.group.exchange import as_one, texts
from autotp.runtime.group.process_group import Group, resolve
from autotp.runtime.model import ShardedModel

__all__ = ["from_pretrained", "open_checkpoint", "prepare_tensors", "find_stored_dtype"]


_ADAPTER: Final = "adapter_config.json"
_NO_HUB: Final = "Nothing is downloaded: give a directory, such as hf download leaves."
_ALL: Final = "Leave it out: each rank's slices go straight into its parameters."
_NO_VALUES: Final = "Leave it out: what is missing or does not fit is an error."
_INSTEAD: Final[Mapping[str, str]] = {
    "torch_dtype": "Write dtype=.",
    "device_map": "Write device=, or leave it out: ranks choose their own.",
    "tp_plan": "Leave it out: the plan is found; overrides= changes it.",
    "tp_size": "Write tp=.",
    "device_mesh": "Write mesh=.",
    "subfolder": 'Give the directory itself: Path(directory, "subfolder").',
    "variant": "Put the files wanted alone into a directory, without the variant in their names.",
    "use_safetensors": "Leave it out: safetensors are read where they are.",
    "weights_only": "Leave it out: nothing else is read.",
    "quantization_config": "Weights are not quantised here; dequantize=True undoes a quantisation.",
    "config": "Write what it says into the directory's config.json.",
    "state_dict": "Load it into the whole model and call parallelize().",
    "adapter_kwargs": "Merge adapters before: merge_and_unload().",
    "low_cpu_mem_usage": _ALL,
    "max_memory": _ALL,
    "offload_folder": _ALL,
    "offload_buffers": _ALL,
    "output_loading_info": _NO_VALUES,
    "ignore_mismatched_sizes": _NO_VALUES,
    **dict.fromkeys(
        ("token", "cache_dir", "force_download", "local_files_only", "proxies"), _NO_HUB
    ),
}


class _ModelOptions(TypedDict):
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
    here = resolve(tp, mesh=mesh, group=group, rank=rank, timeout=timeout)
    with as_one(here, "checking the options"):
        _check_keywords(options)
        where = here if device is None else _place_on(here, device)
    path = Path(directory)
    ways: _ModelOptions = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    options.setdefault("training", False)
    _check_same_kind(path, where)
    if is_sharded(path):
        return attach_group_monitor(
            _load_sharded(path, where, dtype, ways, debug, options), debug=debug
        )
    with as_one(where, "opening the checkpoint"):
        checkpoint, quantiser = open_checkpoint(path, dequantize=dequantize)
    with checkpoint:
        with as_one(where, "building the model"):
            model = build_empty_model(
                path, dtype=dtype, otherwise=find_stored_dtype(checkpoint), **ways
            )
            tensors = prepare_tensors(
                model, checkpoint, allow_extra=allow_extra, quantiser=quantiser
            )
        agree_weights(where, sample_tensors(checkpoint.tensors), "samples of the checkpoint")
        sharded = _build_empty(where, model, debug, **options)
        give_back()
        with as_one(where, "reading weights"):
            read_shards(sharded, tensors, where)
    _check_replicated(sharded, where)
    return attach_group_monitor(sharded, debug=debug)


def _check_same_kind(path: Path, where: Group) -> None:
    """Raises WeightsError on every rank if some were given a cut checkpoint, and others a whole."""
    kinds = texts(where, "cut" if is_sharded(path) else "whole", "opening the checkpoint")
    if len(set(kinds)) > 1:
        cut = [rank for rank, kind in enumerate(kinds) if kind == "cut"]
        raise WeightsError(
            f"the checkpoint is not of one kind on all {len(kinds)} ranks: ranks {cut} were given "
            "a directory that autotp shard wrote, the others a whole one. Give every rank the same "
            "directory."
        )


def _check_replicated(model: ShardedModel, where: Group) -> None:
    """Raises WeightsError on every rank unless all hold the same of what none holds a part of."""
    records = model.sharded_state.plan.parameters
    parts = {name for name, record in records.items() if record.dim is not None}
    whole = (*model.named_parameters(), *model.named_buffers())
    held = ((name, tensor) for name, tensor in whole if name not in parts)
    agree_weights(where, held, "what every rank holds whole")


def _load_sharded(
    path: Path,
    where: Group,
    dtype: torch.dtype | str | None,
    ways: _ModelOptions,
    debug: bool,
    options: Keywords,
) -> ShardedModel:
    """One rank's model from the file that `autotp shard` wrote for it."""
    with as_one(where, "opening the checkpoint"):
        checkpoint, manifest = open_rank_file(path, where.size, where.rank), Manifest.read(path)
        _check_sharded_options(path, options, dtype, manifest)
        options["plan"] = Plan.from_json(path / PLAN)
    with checkpoint:
        with as_one(where, "building the model"):
            model = build_empty_model(path, dtype=manifest.torch_dtype(), **ways)
            untie_parameters(model, list(manifest.untied))
            mark_used_conversions(model, manifest.keys)
            fill_buffers(model, read_buffers(model, checkpoint.tensors))
        sharded = _build_empty(where, model, debug, **options)
        give_back()
        with as_one(where, "reading weights"):
            check_shards(sharded.sharded_state.plan, checkpoint, where.rank)
            read_shards(sharded, checkpoint.tensors, where, local=True)
    _check_replicated(sharded, where)
    return sharded


def _check_sharded_options(
    path: Path, options: Keywords, dtype: torch.dtype | str | None, manifest: Manifest
) -> None:
    """Refuses what would need another cut than the one in a directory."""
    if dtype not in (None, "auto", manifest.dtype, manifest.torch_dtype()):
        raise PlanError(
            f"{path}: was cut in {manifest.dtype}, and dtype is {dtype!r}. Leave it out, or cut "
            "the checkpoint again with that dtype."
        )
    for name in ("plan", "overrides"):
        if options.get(name):
            raise PlanError(
                f"{path}: was cut by the plan in it, and {name}= asks for another. Load the "
                "checkpoint that it was cut from, or leave the option out."
            )


def open_checkpoint(directory: Path, *, dequantize: bool = False) -> tuple[Checkpoint, Any]:
    """The checkpoint in a directory, whose configuration was checked, and its quantiser, if any."""
    if not directory.is_dir():
        raise PlanError(
            f"{directory}: is no directory. Give one with config.json and weights; a model of the "
            f"hub is downloaded first: hf download {directory} --local-dir DIRECTORY."
        )
    _refuse_adapter(directory)
    fields = read_config_fields(directory)
    quantiser = find_quantiser(directory, fields, dequantise=dequantize)
    return Checkpoint.open(directory, fields.get("transformers_weights")), quantiser


def _refuse_adapter(directory: Path) -> None:
    """Refuses a directory with an adapter, which Transformers would put on the model."""
    if (directory / _ADAPTER).is_file():
        found: object = read_json(directory / _ADAPTER, "Restore the adapter's own configuration.")
        told = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        raise PlanError(
            f"{directory}: holds an adapter ({_ADAPTER}, for "
            f"{told.get('base_model_name_or_path') or 'the model beside it'}), of which 0 weights "
            "would be read. Load it with peft, call merge_and_unload(), save the whole model with "
            f"save_pretrained and load that; or remove {_ADAPTER} to load the model without it."
        )


def _place_on(where: Group, device: torch.device | str) -> Group:
    """The group's rank with its parameters on `device`; PlanError where nothing can be there."""
    try:
        place = torch.device(device)
        torch.empty(1, device=place).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(
            f"device is {device!r}: weights cannot be put there: {reason}. Give one such as 'cpu' "
            "or 'cuda:0', or None for where the group's tensors belong."
        ) from error
    return Group(where.name, where.size, where.rank, place)


def _check_keywords(options: Keywords) -> None:
    """Refuses keywords that Transformers knows and this does not, with what takes their place."""
    for name in options:
        if name in _INSTEAD:
            raise PlanError(f"option {name!r}: is Transformers' own. {_INSTEAD[name]}")
    read_request(**options)


def prepare_tensors(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,
) -> dict[str, StoredTensor]:
    """What is read for each of the model's keys; its buffers get their values, ties are settled."""
    found = map_checkpoint(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
    untie_differing(model, found.tensors)
    fill_buffers(model, read_buffers(model, found.tensors))
    return dict(found.tensors)


def _build_empty(
    where: Group, model: nn.Module, debug: bool, **options: Unpack[Keywords]
) -> ShardedModel:
    """One rank's model, whose parameters have memory, but no values yet."""
    compiler, compiled = compile_on_all_ranks(where, model, debug=debug, **options)
    shards = allocate_shards(model, compiled.plan, where)
    return compiler.build(compiled, where, shards=shards)


def find_stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the first tensor that holds fractions, as Transformers takes it."""
    floating = (t.dtype for t in checkpoint.tensors.values() if t.dtype.is_floating_point)
    return next((dtype for dtype in floating if dtype.itemsize > 1), torch.float32)
