"""Split a checkpoint into one file per rank, and merge them: no group, one tensor in memory.

Both resume after an interruption: a complete file is recognised by its size and hash, and a partial
file is continued after its last complete tensor.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Unpack

import torch
from torch import Tensor, nn

from autotp.algebra.split import Split
from autotp.api import compile_on_all_ranks
from autotp.capture.source_model import read_source_model
from autotp.checkpoint.atomic_write import SafetensorsWriter, check_space, report_write_errors
from autotp.checkpoint.directory import Checkpoint
from autotp.checkpoint.empty_model import build_empty_model, fill_buffers
from autotp.checkpoint.load_map import mark_used_conversions
from autotp.checkpoint.quantized import drop_quantisation
from autotp.checkpoint.read_shards import read_buffers, read_shard, show_progress, untie_parameters
from autotp.checkpoint.safetensors_format import Entry
from autotp.checkpoint.save_map import SaveMap, map_saved_files
from autotp.checkpoint.sharded_directory import (
    MANIFEST,
    PLAN,
    ConversionProgress,
    Manifest,
    check_files,
    check_shards,
    copy_other_files,
    list_entries,
    name_rank_file,
    open_rank_file,
    write_tensors,
    write_text,
)
from autotp.checkpoint.stored_tensor import StoredTensor
from autotp.dtypes import dtype_name
from autotp.errors import PlanError
from autotp.loading import find_stored_dtype, open_checkpoint, prepare_tensors
from autotp.model_source import read_config_fields
from autotp.options import Keywords
from autotp.planner.constraints import check_followed_plan
from autotp.records.plan import Plan
from autotp.runtime.group.process_group import resolve_group
from autotp.runtime.ops.blocks import concatenate_shards

__all__ = ["merge_checkpoint", "shard_checkpoint"]

_OTHER_FILES: Final = (".json", ".txt", ".model", ".jinja", ".py", ".md")


def shard_checkpoint(
    directory: str | Path,
    output: str | Path,
    tp: int,
    *,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    allow_extra: bool = False,
    dequantize: bool = False,
    **options: Unpack[Keywords],
) -> Plan:
    """Write one file per rank into `output`, for `from_pretrained` at the same tp; return the plan.

    Takes the keywords of `from_pretrained`. After an interruption, the same call resumes.

    Raises as `from_pretrained` does, and PlanError or WeightsError if `output` has the files of
    another conversion.
    """
    source, target = Path(directory), Path(output)
    _check_different(source, target)
    opening, quantiser = open_checkpoint(source, dequantize=dequantize)
    with opening as checkpoint:
        found = find_stored_dtype(checkpoint)
        model = build_empty_model(
            source, dtype=dtype, otherwise=found, trust_remote_code=trust_remote_code
        )
        ties = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        ties -= {n for n, _ in model.named_parameters()}
        tensors = prepare_tensors(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
        untied = sorted(ties & {n for n, _ in model.named_parameters()})
        where = resolve_group(tp, rank=0)
        options.setdefault("training", False)
        _, compiled = compile_on_all_ranks(where, model, **options)
        plan = compiled.plan
        job = _hash_lines(
            [plan.hash, str(_find_dtype(model)), *map(_describe_file, checkpoint.files)]
        )
        with report_write_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        files = _write_ranks(model, tensors, plan, target, job)
    keys = tuple(sorted(checkpoint.tensors))
    write_text(target / PLAN, plan.to_json())
    copy_other_files(source, target, _OTHER_FILES, {MANIFEST, PLAN, *_list_indexes(source)})
    if quantiser is not None:  # the weights were written without their quantisation
        fields = drop_quantisation(read_config_fields(source))
        write_text(target / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    name = dtype_name(_find_dtype(model))
    Manifest(tp, name, job, keys, tuple(untied), files).write(target)
    (target / f"{MANIFEST}.part").unlink(missing_ok=True)
    return plan


def merge_checkpoint(
    directory: str | Path,
    output: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    trust_remote_code: bool = False,
) -> None:
    """Merge the files of `shard_checkpoint` into one checkpoint, as save_pretrained would write it.

    After an interruption, the same call resumes. Raises WeightsError for files that were changed
    since they were written.
    """
    source, target = Path(directory), Path(output)
    manifest = Manifest.read(source)
    plan = Plan.from_json(source / PLAN)
    _check_different(source, target)
    check_files(source, manifest)
    with ExitStack() as stack:
        ranks = [stack.enter_context(open_rank_file(source, plan.tp, r)) for r in range(plan.tp)]
        model = build_empty_model(
            source, dtype=manifest.torch_dtype, trust_remote_code=trust_remote_code
        )
        untie_parameters(model, list(manifest.untied))
        check_followed_plan(plan, read_source_model(model), plan.tp, training=plan.training)
        for rank, own in enumerate(ranks):
            check_shards(plan, own, rank)
        mark_used_conversions(model, manifest.keys)
        fill_buffers(model, read_buffers(model, ranks[0].tensors))
        saved = map_saved_files(model, max_shard_size)
        with report_write_errors(target):
            target.mkdir(parents=True, exist_ok=True)
        _write_merged(
            model, plan, ranks, saved, target, _hash_lines([manifest.job, str(max_shard_size)])
        )
    copy_other_files(source, target, _OTHER_FILES, {MANIFEST, PLAN})
    if saved.index:
        text = json.dumps(saved.index, indent=2, sort_keys=True) + "\n"
        write_text(target / saved.index_name, text)
    (target / f"{MANIFEST}.part").unlink(missing_ok=True)


def _check_different(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise PlanError(
            f"{target}: is also the directory to read from, and both have a config.json of their "
            "own. Choose another directory to write to."
        )


def _write_ranks(
    model: nn.Module, tensors: dict[str, StoredTensor], plan: Plan, target: Path, job: str
) -> dict[str, tuple[int, str]]:
    """Write the missing files of ranks; return the size and hash of all files by name."""
    progress = _load_progress(target, job)
    records, named = plan.parameters, dict(model.named_parameters()) | dict(model.named_buffers())
    total = sum(s.bytes for record in records.values() for s in record.shards)
    missing = [
        r for r in range(plan.tp) if not progress.has_file(target, name_rank_file(r, plan.tp))
    ]
    check_space(target, total * len(missing) // plan.tp - _count_begun_bytes(target))
    with show_progress("splitting weights", total) as bar:
        for rank in range(plan.tp):
            entries = list_entries(model, plan, rank, tensors)

            def make(entry: Entry, rank: int = rank) -> Tensor:
                record = records.get(entry.name)
                names = (entry.name, *(record.tied if record else ()))
                out = torch.empty(entry.shape, dtype=named[entry.name].dtype)
                read_shard(out, next(tensors[n] for n in names if n in tensors), record, rank)
                bar.advance(bar.task_ids[0], entry.stop - entry.start)
                return out

            if rank in missing:
                path = target / name_rank_file(rank, plan.tp)
                progress.add_file(
                    path.name, *write_tensors(SafetensorsWriter(path, entries, resume=True), make)
                )
    return progress.files


def _write_merged(
    model: nn.Module,
    plan: Plan,
    ranks: list[Checkpoint],
    saved: SaveMap,
    target: Path,
    job: str,
) -> None:
    progress = _load_progress(target, job)
    buffers, full = dict(model.named_buffers()), dict[str, Tensor]()
    done = saved.find_last_uses()
    check_space(target, saved.bytes - _count_begun_bytes(target))
    names = {alias: r.name for r in plan.parameters.values() for alias in (r.name, *r.tied)}
    with show_progress("merging weights", saved.bytes) as bar:

        def make(entry: Entry) -> Tensor:
            for name in saved.list_needed(entry.name):
                if name not in full:
                    own = names.get(name, name)
                    full[name] = (
                        buffers[name] if name in buffers else _gather_parameter(own, plan, ranks)
                    )
            tensor = saved.build_tensor(entry.name, full)
            for name in done.get(entry.name, ()):
                full.pop(name, None)
            bar.advance(bar.task_ids[0], entry.stop - entry.start)
            return tensor

        for name, entries in saved.files.items():
            if not progress.has_file(target, name):
                writer = SafetensorsWriter(target / name, entries, resume=True)
                progress.add_file(name, *write_tensors(writer, make))
            full.clear()


def _gather_parameter(name: str, plan: Plan, ranks: list[Checkpoint]) -> Tensor:
    record = plan.parameters[name]
    shards: list[Tensor] = []
    for own in ranks if record.dim is not None else ranks[:1]:
        stored = own.tensors[name]
        shards.append(torch.empty(stored.shape, dtype=stored.dtype))
        read_shard(shards[-1], stored, None, 0)
    return (
        shards[0]
        if record.dim is None
        else concatenate_shards(shards, record.dim, Split.decode(record.split))
    )


def _load_progress(target: Path, job: str) -> ConversionProgress:
    """Read the progress of a job; PlanError for a directory with files that are not of this job."""
    progress = ConversionProgress.of(target, job)
    if (target / MANIFEST).is_file():
        manifest = Manifest.read(target)
        if manifest.job != job:
            raise PlanError(
                f"{target}: has {len(manifest.files)} files for tp {manifest.tp} of another "
                "conversion, or of a checkpoint that was changed since. Choose another directory."
            )
        progress.files.update(manifest.files)
    elif not progress.path.is_file() and any(target.glob("*.safetensors")):
        raise PlanError(
            f"{target}: has {len(list(target.glob('*.safetensors')))} files of weights that are "
            "not of this conversion. Choose another directory."
        )
    progress.save()
    return progress


def _count_begun_bytes(target: Path) -> int:
    """Count the bytes of partial files."""
    return sum(path.stat().st_size for path in target.glob("*.safetensors*.part"))


def _find_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _list_indexes(source: Path) -> set[str]:
    return {path.name for path in source.glob("*.index.json")}


def _describe_file(path: Path) -> str:
    """Describe the state of a file without reading it."""
    state = path.stat()
    return f"{path.name} {state.st_size} {state.st_mtime_ns}"


def _hash_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
