"""From a checkpoint to one rank's model: planned on meta, then filled with the rank's slices."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.api import attach_group_monitor, compile_on_all_ranks
from autotp.capture.heap import release_memory
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
from autotp.runtime.group.agreement import require_equal_weights
from autotp.runtime.group.exchange import fail_together, gather_texts
from autotp.runtime.group.process_group import Group, resolve_group
from autotp.runtime.model import ShardedModel

_ADAPTER: Final = "adapter_config.json"
_NO_HUB: Final = "Nothing is downloaded: give a directory, such as hf download writes."
_ALL: Final = "Leave it out: each rank reads its slices directly into its parameters."
_NO_VALUES: Final = "Leave it out: a tensor that is missing or does not fit is an error."
_INSTEAD: Final[Mapping[str, str]] = {
    "torch_dtype": "Write dtype=.",
    "device_map": "Write device=, or leave it out: ranks choose their own.",
    "tp_plan": "Leave it out: autotp finds the plan; overrides= changes it.",
    "tp_size": "Write tp=.",
    "device_mesh": "Write mesh=.",
    "subfolder": 'Give the directory itself: Path(directory, "subfolder").',
    "variant": "Put only these files into a directory, without the variant in their names.",
    "use_safetensors": "Leave it out: safetensors files are read if there are any.",
    "weights_only": "Leave it out: files are always read with weights_only.",
    "quantization_config": "Weights are not quantised here; dequantize=True dequantises them.",
    "config": "Write its fields into the directory's config.json.",
    "state_dict": "Load it into the unsharded model and call parallelize().",
    "adapter_kwargs": "Merge adapters first: merge_and_unload().",
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
    """How the class of a model is found, and the model built."""

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
    """Build this rank's shard of the model saved in `directory`, ready to call.

        # in each process that `torchrun --nproc-per-node 2 script.py` starts
        sharded = autotp.from_pretrained("my-model", tp=2)
        logits = sharded(input_ids=ids).logits  # (batch, sequence, vocabulary), on every rank

    The model is planned before any weight is read. Then each rank reads only its own slices, in
    blocks of 1 MB.

    - `directory`: with config.json and safetensors files (or pytorch_model.bin), or one that
      `autotp shard` wrote for this tp.
    - `tp`, `mesh`, `group`, `rank`, `timeout`, `debug`: as for `parallelize`.
    - `dtype`: of the parameters; None: that of the configuration, or else of the files.
    - `device`: of the parameters; None: the device of the group's backend.
    - `attn_implementation`, `trust_remote_code`, `revision`: as in Transformers.
    - `allow_extra`: ignore tensors that are unknown to the model.
    - `dequantize`: dequantise quantised weights to `dtype` while they are read.
    - All other keywords: as for `plan`; `training` is off by default.

    Raises on every rank what `parallelize` raises, and WeightsError, with the tensor and the file,
    for weights that are missing, unknown, truncated, of another shape or kind of dtype, quantised,
    or NaN.
    """
    check_rank(rank)
    here = resolve_group(tp, mesh=mesh, group=group, rank=rank, timeout=timeout)
    with fail_together(here, "checking the options"):
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
    with fail_together(where, "opening the checkpoint"):
        checkpoint, quantiser = open_checkpoint(path, dequantize=dequantize)
    with checkpoint:
        with fail_together(where, "building the model"):
            model = build_empty_model(
                path, dtype=dtype, otherwise=find_stored_dtype(checkpoint), **ways
            )
            tensors = prepare_tensors(
                model, checkpoint, allow_extra=allow_extra, quantiser=quantiser
            )
        require_equal_weights(
            where, sample_tensors(checkpoint.tensors), "samples of the checkpoint"
        )
        sharded = _build_empty(where, model, debug, **options)
        release_memory()
        with fail_together(where, "reading weights"):
            read_shards(sharded, tensors, where)
    _check_replicated(sharded, where)
    return attach_group_monitor(sharded, debug=debug)


def _check_same_kind(path: Path, where: Group) -> None:
    """Raise WeightsError on every rank if some have a sharded checkpoint and others a plain one."""
    kinds = gather_texts(
        where, "sharded" if is_sharded(path) else "plain", "opening the checkpoint"
    )
    if len(set(kinds)) > 1:
        sharded = [rank for rank, kind in enumerate(kinds) if kind == "sharded"]
        raise WeightsError(
            f"the checkpoint is not of one kind on all {len(kinds)} ranks: ranks {sharded} were "
            "given a directory that autotp shard wrote, the others a plain one. Give every rank "
            "the same directory."
        )


def _check_replicated(model: ShardedModel, where: Group) -> None:
    """Raise WeightsError on every rank unless replicated tensors are the same on all ranks."""
    records = model.sharded_state.plan.parameters
    sharded = {name for name, record in records.items() if record.dim is not None}
    tensors = (*model.named_parameters(), *model.named_buffers())
    replicated = ((name, tensor) for name, tensor in tensors if name not in sharded)
    require_equal_weights(where, replicated, "the replicated weights")


def _load_sharded(
    path: Path,
    where: Group,
    dtype: torch.dtype | str | None,
    ways: _ModelOptions,
    debug: bool,
    options: Keywords,
) -> ShardedModel:
    """Build one rank's model from the file that `autotp shard` wrote for it."""
    with fail_together(where, "opening the checkpoint"):
        checkpoint, manifest = open_rank_file(path, where.size, where.rank), Manifest.read(path)
        _check_sharded_options(path, options, dtype, manifest)
        options["plan"] = Plan.from_json(path / PLAN)
    with checkpoint:
        with fail_together(where, "building the model"):
            model = build_empty_model(path, dtype=manifest.torch_dtype, **ways)
            untie_parameters(model, list(manifest.untied))
            mark_used_conversions(model, manifest.keys)
            fill_buffers(model, read_buffers(model, checkpoint.tensors))
        sharded = _build_empty(where, model, debug, **options)
        release_memory()
        with fail_together(where, "reading weights"):
            check_shards(sharded.sharded_state.plan, checkpoint, where.rank)
            read_shards(sharded, checkpoint.tensors, where, local=True)
    _check_replicated(sharded, where)
    return sharded


def _check_sharded_options(
    path: Path, options: Keywords, dtype: torch.dtype | str | None, manifest: Manifest
) -> None:
    """Raise PlanError for options that need other shards than those in a directory."""
    if dtype not in (None, "auto", manifest.dtype, manifest.torch_dtype):
        raise PlanError(
            f"{path}: was sharded in {manifest.dtype}, but dtype is {dtype!r}. Leave dtype out, or "
            "shard the checkpoint again with that dtype."
        )
    for name in ("plan", "overrides"):
        if options.get(name):
            raise PlanError(
                f"{path}: was sharded by the plan in it, but {name}= requests another. Load the "
                "original checkpoint, or leave the option out."
            )


def open_checkpoint(directory: Path, *, dequantize: bool = False) -> tuple[Checkpoint, Any]:
    """Open the checkpoint in a directory after checking its configuration; with its quantiser."""
    if not directory.is_dir():
        raise PlanError(
            f"{directory}: is not a directory. Give one with config.json and weights; download a "
            f"model of the hub first: hf download {directory} --local-dir DIRECTORY."
        )
    _refuse_adapter(directory)
    fields = read_config_fields(directory)
    quantiser = find_quantiser(directory, fields, dequantise=dequantize)
    return Checkpoint.open(directory, fields.get("transformers_weights")), quantiser


def _refuse_adapter(directory: Path) -> None:
    """Raise PlanError for a directory with an adapter, which Transformers would apply."""
    if (directory / _ADAPTER).is_file():
        found: object = read_json(directory / _ADAPTER, "Restore the adapter's own configuration.")
        fields = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        raise PlanError(
            f"{directory}: has an adapter ({_ADAPTER}, for "
            f"{fields.get('base_model_name_or_path') or 'the model in the same directory'}), none "
            "of whose weights would be read. Load it with peft, call merge_and_unload(), save the "
            f"model with save_pretrained and load that; or remove {_ADAPTER} to load the model "
            "without it."
        )


def _place_on(where: Group, device: torch.device | str) -> Group:
    """Place the group's parameters on `device`; PlanError if tensors cannot be there."""
    try:
        wanted = torch.device(device)
        torch.empty(1, device=wanted).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PlanError(
            f"device={device!r}: weights cannot be placed there: {reason}. Give a device such as "
            "'cpu' or 'cuda:0', or None for that of the group's backend."
        ) from error
    return Group(where.name, where.size, where.rank, wanted)


def _check_keywords(options: Keywords) -> None:
    """Raise PlanError for keywords of Transformers that autotp does not have, with the reason."""
    for name in options:
        if name in _INSTEAD:
            raise PlanError(f"option {name!r}: only Transformers has it. {_INSTEAD[name]}")
    read_request(**options)


def prepare_tensors(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,
) -> dict[str, StoredTensor]:
    """Map the checkpoint to the model's keys, untie parameters that differ, and read buffers."""
    load_map = map_checkpoint(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
    untie_differing(model, load_map.tensors)
    fill_buffers(model, read_buffers(model, load_map.tensors))
    return dict(load_map.tensors)


def _build_empty(
    where: Group, model: nn.Module, debug: bool, **options: Unpack[Keywords]
) -> ShardedModel:
    """Build one rank's model, whose parameters are allocated, but have no values yet."""
    compiler, compiled = compile_on_all_ranks(where, model, debug=debug, **options)
    shards = allocate_shards(model, compiled.plan, where)
    return compiler.build(compiled, where, shards=shards)


def find_stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Find the dtype of the first floating-point tensor, as Transformers does."""
    floating = (t.dtype for t in checkpoint.tensors.values() if t.dtype.is_floating_point)
    return next((dtype for dtype in floating if dtype.itemsize > 1), torch.float32)
