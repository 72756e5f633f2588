"""Bringing a sharded model together again: tensor by tensor, on rank 0's disk or in memory."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.atomic_write import (
    SafetensorsWriter,
    check_space,
    open_draft,
    publish_files,
    report_write_errors,
)
from autotp.checkpoint.save_map import SaveMap, map_saved_files
from autotp.dtypes import dtype_name
from autotp.errors import PlanError
from autotp.records.plan import ParameterRecord
from autotp.runtime.group.exchange import as_one, gathered
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel

__all__ = [
    "GroupStore",
    "index_records",
    "remove_stale_files",
    "copy_unsharded_on_meta",
    "write_configs",
]


class GroupStore:
    """What saves a model whose parts are on the ranks of a group."""

    def __init__(self, where: Group) -> None:
        self._where = where

    def save(self, model: ShardedModel, directory: Path, max_shard_size: int | str) -> None:
        """Writes the whole model as its own save_pretrained would; every rank must call it."""
        where, first = self._where, self._where.rank == 0
        inner: Path | None = None
        with ExitStack() as stack:
            with as_one(where), report_write_errors(directory):
                whole = copy_unsharded_on_meta(model)
                _check_savable(whole)
                plan = map_saved_files(whole, max_shard_size)
                if directory.exists() and not directory.is_dir():
                    raise PlanError(f"{directory}: is a file. Give a directory to save into.")
                if first:
                    check_space(directory, plan.size())
                    inner = stack.enter_context(open_draft(directory))
            self._write(model, plan, inner)
            with as_one(where):
                if inner is not None:
                    write_configs(whole, inner, plan)
                    publish_files(inner, plan.index_name)
                    remove_stale_files(directory, plan)

    def state_dict(self, model: ShardedModel, *, rank0_only: bool) -> dict[str, Tensor]:
        """The whole model's `state_dict()` on the CPU."""
        records, found = index_records(model), dict[str, Tensor]()
        for name, local in model.state_dict().items():
            whole = gathered(self._where, local, records.get(name), to_all=not rank0_only)
            if whole is not None:
                found[name] = whole
        return found

    def _write(self, model: ShardedModel, plan: SaveMap, inner: Path | None) -> None:
        """Writes all weights into a directory, on rank 0; the others send what is asked for."""
        records, state = index_records(model), model.state_dict()
        held: dict[str, Tensor] = {}
        done = plan.last_uses()
        for name, entries in plan.files.items():
            with as_one(self._where):
                writer = SafetensorsWriter(inner / name, entries) if inner else None
            for entry in entries:
                for key in plan.needed(entry.name):
                    if key not in held:
                        whole = gathered(self._where, state[key], records.get(key), to_all=False)
                        held[key] = state[key] if whole is None else whole
                with as_one(self._where):
                    if writer is not None:
                        writer.write(plan.made(entry.name, held))
                for key in done.get(entry.name, ()):
                    del held[key]
            with as_one(self._where):
                if writer is not None:
                    writer.finish()


def index_records(model: ShardedModel) -> dict[str, ParameterRecord]:
    """The plan's records of parameters, by each of a parameter's names."""
    return {
        name: record
        for record in model.sharded_state.plan.parameters.values()
        for name in (record.name, *record.tied)
    }


def copy_unsharded_on_meta(model: ShardedModel) -> nn.Module:
    """The whole model without values: a copy of a sharded one, with whole tensors on meta."""
    records = index_records(model)
    memo: dict[int, Any] = {}
    for name, local in model.named_parameters():
        shape = records[name].shape if name in records else local.shape
        empty = torch.empty(shape, dtype=local.dtype, device="meta")
        memo[id(local)] = nn.Parameter(empty, requires_grad=False)
    for _, buffer in model.named_buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def write_configs(whole: nn.Module, directory: Path, plan: SaveMap) -> None:
    """Writes what is beside the weights: configurations, the index, the model's own code."""
    model = cast("Any", whole)
    config, previous = model.config, (model.config.dtype, model.config.architectures)
    config.dtype = dtype_name(model.dtype)
    config.architectures = [type(whole).__name__]
    try:
        with report_write_errors(directory.parent / "config.json"):
            config.save_pretrained(directory)
            if model.can_generate():
                model.generation_config.save_pretrained(directory)
            if plan.index:
                text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
                (directory / plan.index_name).write_text(text, encoding="utf-8")
    finally:
        config.dtype, config.architectures = previous


def remove_stale_files(directory: Path, plan: SaveMap) -> None:
    """Removes weights of an earlier save that this one did not replace."""
    numbered: Callable[[str], object] = re.compile(r"model-\d{5}-of-\d{5}\.safetensors").fullmatch
    for path in directory.iterdir():
        single = path.name in ("model.safetensors", plan.index_name) and (
            path.name not in plan.files and not (path.name == plan.index_name and plan.index)
        )
        if single or (numbered(path.name) and path.name not in plan.files):
            path.unlink()


def _check_savable(model: nn.Module) -> None:
    methods: Mapping[str, bool] = {
        name: hasattr(model, name) for name in ("config", "can_generate", "base_model_prefix")
    }
    if not all(methods.values()):
        raise PlanError(
            f"{type(model).__name__}: is no model of Transformers (0 configurations to write). "
            "Save what full_state_dict(rank0_only=True) gives on rank 0."
        )
