"""Gather a sharded model, tensor by tensor, into files of rank 0 or into memory."""

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.atomic_write import (
    check_space,
    open_draft,
    publish_files,
    report_write_errors,
)
from autotp.checkpoint.directory import INDEX
from autotp.checkpoint.save_map import SaveMap, map_saved_files
from autotp.dtypes import dtype_name
from autotp.errors import PlanError
from autotp.records.plan import ParameterRecord
from autotp.runtime.group.exchange import fail_together, gather_tensor
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel


class GroupStore:
    """Saves a model whose shards are on the ranks of a group."""

    def __init__(self, where: Group) -> None:
        self._where = where

    def save(self, model: ShardedModel, directory: Path, max_shard_size: int | str) -> None:
        """Write the full model as its own save_pretrained would; every rank must call it."""
        where, first = self._where, self._where.rank == 0
        inner: Path | None = None
        with ExitStack() as stack:
            with fail_together(where), report_write_errors(directory):
                full = copy_unsharded_on_meta(model)
                _check_savable(full)
                plan = map_saved_files(full, max_shard_size)
                if directory.exists() and not directory.is_dir():
                    raise PlanError(f"{directory}: is a file. Give a directory to save into.")
                if first:
                    check_space(directory, plan.bytes)
                    inner = stack.enter_context(open_draft(directory))
            records, state = index_records(model), model.state_dict()

            def fetch(name: str) -> Tensor:
                tensor = gather_tensor(where, state[name], records.get(name), to_all=False)
                return state[name] if tensor is None else tensor

            plan.write(inner, fetch, lambda: fail_together(where))
            with fail_together(where):
                if inner is not None:
                    write_configs(full, inner, plan)
                    publish_files(inner, INDEX)
                    remove_stale_files(directory, plan)

    def state_dict(self, model: ShardedModel, *, rank0_only: bool) -> dict[str, Tensor]:
        """Gather the `state_dict()` of the full model on the CPU."""
        records, found = index_records(model), dict[str, Tensor]()
        for name, local in model.state_dict().items():
            full = gather_tensor(self._where, local, records.get(name), to_all=not rank0_only)
            if full is not None:
                found[name] = full
        return found


def index_records(model: ShardedModel) -> dict[str, ParameterRecord]:
    """Index the plan's records of parameters by all names, those of tied parameters included."""
    return {
        name: record
        for record in model.sharded_state.plan.parameters.values()
        for name in (record.name, *record.tied)
    }


def copy_unsharded_on_meta(model: ShardedModel) -> nn.Module:
    """Copy a sharded model as an unsharded one, with all tensors on meta."""
    records = index_records(model)
    memo: dict[int, Any] = {}
    for name, local in model.named_parameters():
        shape = records[name].shape if name in records else local.shape
        empty = torch.empty(shape, dtype=local.dtype, device="meta")
        memo[id(local)] = nn.Parameter(empty, requires_grad=False)
    for _, buffer in model.named_buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def write_configs(full: nn.Module, directory: Path, plan: SaveMap) -> None:
    """Write what accompanies the weights: configurations, the index, the model's own code."""
    model = cast("Any", full)
    config, previous = model.config, (model.config.dtype, model.config.architectures)
    config.dtype = dtype_name(model.dtype)
    config.architectures = [type(full).__name__]
    try:
        with report_write_errors(directory.parent / "config.json"):
            config.save_pretrained(directory)
            if model.can_generate():
                model.generation_config.save_pretrained(directory)
            plan.write_index(directory)
    finally:
        config.dtype, config.architectures = previous


def remove_stale_files(directory: Path, plan: SaveMap) -> None:
    """Remove the weights of an earlier save that this one did not replace."""
    numbered: Callable[[str], object] = re.compile(r"model-\d{5}-of-\d{5}\.safetensors").fullmatch
    for path in directory.iterdir():
        single = path.name in ("model.safetensors", INDEX) and (
            path.name not in plan.files and not (path.name == INDEX and plan.index)
        )
        if single or (numbered(path.name) and path.name not in plan.files):
            path.unlink()


def _check_savable(model: nn.Module) -> None:
    methods: Mapping[str, bool] = {
        name: hasattr(model, name) for name in ("config", "can_generate", "base_model_prefix")
    }
    if not all(methods.values()):
        raise PlanError(
            f"{type(model).__name__}: is not a model of Transformers, so there is no configuration "
            "to write. Save what full_state_dict(rank0_only=True) returns on rank 0."
        )
