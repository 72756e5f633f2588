"""A checkpoint that was split for one tp: one file per rank, and the plan that they follow.

shards.json                      the tp, the dtype, and the names in the checkpoint
plan.json                        the plan
rank-00000-of-00002.safetensors  the shards of rank 0, under the model's own keys
config.json, …                   as in the directory that was split
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import nn

from autotp.checkpoint.atomic_write import report_write_errors, write_text
from autotp.checkpoint.directory import Checkpoint, read_json
from autotp.checkpoint.safetensors_format import Entry, lay_out_tensors, read_header
from autotp.checkpoint.stored_tensor import CheckpointFile, SafetensorsTensor, StoredTensor
from autotp.errors import PlanError, WeightsError
from autotp.records.plan import Plan

MANIFEST: Final = "shards.json"
PLAN: Final = "plan.json"
_OTHER_FILES: Final = (".json", ".txt", ".model", ".jinja", ".py", ".md")
_AGAIN: Final = "Run `autotp shard` again, into a new directory."


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `shards.json`.

    - `keys`: the names on disk in the checkpoint; `untied`: parameters that are tied in its
      configuration, but not in its tensors.
    """

    tp: int
    dtype: str
    keys: tuple[str, ...]
    untied: tuple[str, ...]

    @staticmethod
    def read(directory: Path) -> "Manifest":
        """Read the manifest in a directory; WeightsError if it is malformed."""
        path = directory / MANIFEST
        fields = read_json(path, _AGAIN)
        try:
            manifest = Manifest(
                int(fields["tp"]), fields["dtype"], tuple(fields["keys"]), tuple(fields["untied"])
            )
            if not isinstance(getattr(torch, manifest.dtype, None), torch.dtype):
                raise ValueError(manifest.dtype)
            return manifest
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{path}: is not a manifest of shards ({error!r}). {_AGAIN}"
            ) from error

    def write(self, directory: Path) -> None:
        """Write the manifest."""
        write_text(directory / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return cast("torch.dtype", getattr(torch, self.dtype))


def is_sharded(directory: Path) -> bool:
    """Whether a directory has a checkpoint that `autotp shard` wrote."""
    return (directory / MANIFEST).is_file()


def name_rank_file(rank: int, tp: int) -> str:
    """Name the file of a rank."""
    return f"rank-{rank:05d}-of-{tp:05d}.safetensors"


def list_entries(
    model: nn.Module, plan: Plan, rank: int, stored: Mapping[str, StoredTensor]
) -> list[Entry]:
    """List the entries of a rank's file: its shards of parameters, and the buffers on disk."""
    named = dict(model.named_parameters())
    shards = [(n, named[n].dtype, r.shards[rank].shape) for n, r in plan.parameters.items()]
    buffers = [(n, b.dtype, tuple(b.shape)) for n, b in model.named_buffers() if n in stored]
    return lay_out_tensors([*shards, *buffers])


def open_rank_file(directory: Path, tp: int, rank: int) -> Checkpoint:
    """Open the file of a rank; its tensors are under the model's keys.

    Raises PlanError if the directory was written for another tp, WeightsError if the file is
    missing or truncated.
    """
    manifest = Manifest.read(directory)
    if manifest.tp != tp:
        raise PlanError(
            f"{directory}: was written for tp {manifest.tp}, but tp is {tp}. Merge it first, with "
            f"autotp merge {directory} MERGED; then load MERGED, or run autotp shard MERGED OUT "
            f"--tp {tp}."
        )
    path = directory / name_rank_file(rank, tp)
    if not path.is_file():
        raise WeightsError(f"{path}: does not exist, but has the shards of rank {rank}. {_AGAIN}")
    file = CheckpointFile(path)
    tensors = {name: SafetensorsTensor(file, entry) for name, entry in read_header(path).items()}
    return Checkpoint(directory, (path,), tensors, (file,))


def check_shards(plan: Plan, checkpoint: Checkpoint, rank: int) -> None:
    """Raise WeightsError for a rank's file that lacks a shard, or has one of another shape."""
    for name, record in plan.parameters.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise WeightsError(
                f"{checkpoint.files[0]}: tensor {name} is missing; by the plan, rank {rank} has "
                f"{list(record.shards[rank].shape)} of it. {_AGAIN}"
            )
        if stored.shape != record.shards[rank].shape:
            raise WeightsError(
                f"{stored.label}: has shape {list(stored.shape)}, but by the plan rank {rank} has "
                f"{list(record.shards[rank].shape)}. {_AGAIN}"
            )


def copy_other_files(source: Path, target: Path) -> None:
    """Copy the files besides the weights: configurations, tokenizers, the model's own code."""
    leave = {MANIFEST, PLAN, *(path.name for path in source.glob("*.index.json"))}
    for path in sorted(source.iterdir()):
        if path.suffix in _OTHER_FILES and path.is_file() and path.name not in leave:
            with report_write_errors(target / path.name):
                shutil.copyfile(path, target / path.name)
