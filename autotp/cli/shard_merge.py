"""Split a checkpoint into one file per rank, and merge them: no group, one tensor in memory."""

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from autotp.algebra.split import Split
from autotp.api import compile_on_all_ranks
from autotp.capture.source_model import read_source_model
from autotp.checkpoint.atomic_write import (
    append_tensor,
    begin_file,
    check_space,
    open_draft,
    publish_files,
    write_text,
)
from autotp.checkpoint.directory import INDEX, Checkpoint
from autotp.checkpoint.empty_model import build_empty_model, fill_buffers
from autotp.checkpoint.load_map import mark_used_conversions
from autotp.checkpoint.quantized import drop_quantisation
from autotp.checkpoint.read_shards import read_buffers, read_shard, show_progress, untie_parameters
from autotp.checkpoint.save_map import map_saved_files
from autotp.checkpoint.sharded_directory import (
    MANIFEST,
    PLAN,
    Manifest,
    check_shards,
    copy_other_files,
    list_entries,
    name_rank_file,
    open_rank_file,
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

    Takes the keywords of `from_pretrained`. The files appear when all of them are complete.

    Raises as `from_pretrained` does, and PlanError if `output` has weights already.
    """
    source, target = Path(directory), Path(output)
    opening, quantiser = open_checkpoint(source, dequantize=dequantize)
    with _open_output(target) as inner, opening as checkpoint:
        found = find_stored_dtype(checkpoint)
        model = build_empty_model(
            source, dtype=dtype, otherwise=found, trust_remote_code=trust_remote_code
        )
        ties = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        ties -= {n for n, _ in model.named_parameters()}
        tensors = prepare_tensors(model, checkpoint, allow_extra=allow_extra, quantiser=quantiser)
        untied = sorted(ties & {n for n, _ in model.named_parameters()})
        options.setdefault("training", False)
        _, compiled = compile_on_all_ranks(resolve_group(tp, rank=0), model, **options)
        plan = compiled.plan
        _write_ranks(model, tensors, plan, inner)
        copy_other_files(source, inner)
        write_text(inner / PLAN, plan.to_json())
        if quantiser is not None:  # the weights were written without their quantisation
            fields = drop_quantisation(read_config_fields(source))
            write_text(inner / "config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
        name = dtype_name(_find_dtype(model))
        Manifest(tp, name, tuple(sorted(checkpoint.tensors)), tuple(untied)).write(inner)
        publish_files(inner, MANIFEST)
    return plan


def merge_checkpoint(
    directory: str | Path,
    output: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    trust_remote_code: bool = False,
) -> None:
    """Merge the files of `shard_checkpoint` into one checkpoint, as save_pretrained would write it.

    The files appear when all of them are complete. Raises WeightsError for files that are missing,
    truncated or of another model, and PlanError if `output` has weights already.
    """
    source, target = Path(directory), Path(output)
    manifest = Manifest.read(source)
    plan = Plan.from_json(source / PLAN)
    with _open_output(target) as inner, ExitStack() as stack:
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
        check_space(target, saved.bytes)
        buffers = dict(model.named_buffers())
        names = {alias: r.name for r in plan.parameters.values() for alias in (r.name, *r.tied)}
        with show_progress("merging weights", saved.bytes) as bar:

            def fetch(name: str) -> Tensor:
                if name in buffers:
                    return buffers[name]
                full = _merge_parameter(names.get(name, name), plan, ranks)
                bar.advance(bar.task_ids[0], full.nbytes)
                return full

            saved.write(inner, fetch)
        copy_other_files(source, inner)
        saved.write_index(inner)
        publish_files(inner, INDEX)


@contextmanager
def _open_output(target: Path) -> Generator[Path]:
    """Make a directory to write into inside `target`; PlanError if `target` has weights already."""
    if found := sorted(target.glob("*.safetensors")) + sorted(target.glob("*.bin")):
        raise PlanError(
            f"{target}: has {len(found)} files of weights already, such as {found[0].name}. Choose "
            "another directory, or remove them."
        )
    with open_draft(target) as inner:
        yield inner


def _write_ranks(
    model: nn.Module, tensors: dict[str, StoredTensor], plan: Plan, directory: Path
) -> None:
    """Write the file of every rank."""
    records, named = plan.parameters, dict(model.named_parameters()) | dict(model.named_buffers())
    total = sum(s.bytes for record in records.values() for s in record.shards)
    check_space(directory, total)
    with show_progress("splitting weights", total) as bar:
        for rank in range(plan.tp):
            path = directory / name_rank_file(rank, plan.tp)
            entries = list_entries(model, plan, rank, tensors)
            begin_file(path, entries)
            for entry in entries:
                record = records.get(entry.name)
                names = (entry.name, *(record.tied if record else ()))
                out = torch.empty(entry.shape, dtype=named[entry.name].dtype)
                read_shard(out, next(tensors[n] for n in names if n in tensors), record, rank)
                append_tensor(path, entry, out)
                bar.advance(bar.task_ids[0], out.nbytes)


def _merge_parameter(name: str, plan: Plan, ranks: list[Checkpoint]) -> Tensor:
    record = plan.parameters[name]
    shards: list[Tensor] = []
    for own in ranks if record.dim is not None else ranks[:1]:
        stored = own.tensors[name]
        shards.append(torch.empty(stored.shape, dtype=stored.dtype))
        read_shard(shards[-1], stored, None, 0)
    if record.dim is None:
        return shards[0]
    return concatenate_shards(shards, record.dim, Split.decode(record.split))


def _find_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
