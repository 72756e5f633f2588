"""A checkpoint that was split for one tp: one file per rank, the plan, and a manifest.

shards.json                      tp, dtype, and size and SHA-256 of every file
plan.json                        the plan that the files follow
rank-00000-of-00002.safetensors  the shards of rank 0, under the model's own keys
config.json, …                   as in the directory that was split
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.atomic_write import SafetensorsWriter, report_write_errors
from autotp.checkpoint.directory import Checkpoint, read_json
from autotp.checkpoint.safetensors_format import Entry, lay_out_tensors, read_header
from autotp.checkpoint.stored_tensor import CheckpointFile, SafetensorsTensor, StoredTensor
from autotp.errors import PlanError, WeightsError
from autotp.records.plan import Plan

__all__ = [
    "MANIFEST",
    "PLAN",
    "Manifest",
    "ConversionProgress",
    "check_files",
    "check_shards",
    "copy_other_files",
    "list_entries",
    "is_sharded",
    "is_complete_file",
    "open_rank_file",
    "name_rank_file",
    "write_tensors",
    "write_text",
]

MANIFEST: Final = "shards.json"
PLAN: Final = "plan.json"
_ANEW: Final = "Remove this file, then run `autotp shard` again."
_AGAIN: Final = "Run `autotp shard` again: it writes what is missing."


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `shards.json`.

    - `job`: a hash of the checkpoint and of how it was split; `files`: size and SHA-256 by name.
    - `keys`: the names on disk in the checkpoint; `untied`: parameters that are tied in its
      configuration, but not in its tensors.
    """

    tp: int
    dtype: str
    job: str
    keys: tuple[str, ...]
    untied: tuple[str, ...]
    files: Mapping[str, tuple[int, str]]

    @staticmethod
    def read(directory: Path) -> "Manifest":
        """Read the manifest in a directory; WeightsError if it is malformed."""
        path = directory / MANIFEST
        fields = read_json(path, _ANEW)
        try:
            files = {name: (int(size), str(sha)) for name, (size, sha) in fields["files"].items()}
            lists = (tuple(fields["keys"]), tuple(fields["untied"]))
            manifest = Manifest(int(fields["tp"]), fields["dtype"], fields["job"], *lists, files)
            if not isinstance(getattr(torch, manifest.dtype, None), torch.dtype):
                raise ValueError(manifest.dtype)
            names = {name_rank_file(rank, manifest.tp) for rank in range(manifest.tp)}
            if absent := names - files.keys():
                raise ValueError(f"{min(absent)} is not in it")
            return manifest
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{path}: is not a manifest of shards ({error!r}). {_ANEW}"
            ) from error

    def write(self, directory: Path) -> None:
        """Write the manifest."""
        write_text(directory / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return cast("torch.dtype", getattr(torch, self.dtype))


@dataclass(slots=True)
class ConversionProgress:
    """The complete files of a job, recorded on disk so that a killed job can resume."""

    path: Path
    job: str
    files: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    @staticmethod
    def of(directory: Path, job: str) -> "ConversionProgress":
        """Read the progress of a job; WeightsError if the directory has files of another job."""
        path = directory / f"{MANIFEST}.part"
        if not path.is_file():
            return ConversionProgress(path, job)
        fields = read_json(path, "Remove this file, then run the command again.")
        if fields.get("job") != job:
            raise WeightsError(
                f"{directory}: has {len(fields.get('files', {}))} files of another conversion, or "
                "of a checkpoint that was changed since. Remove the directory, or choose another."
            )
        files = cast("dict[str, list[Any]]", fields["files"])
        return ConversionProgress(
            path, job, {n: (int(size), str(sha)) for n, (size, sha) in files.items()}
        )

    def add_file(self, name: str, size: int, sha: str) -> None:
        """Record that a file is complete."""
        self.files[name] = (size, sha)
        self.save()

    def save(self) -> None:
        """Write the progress to disk."""
        write_text(self.path, json.dumps({"job": self.job, "files": self.files}))

    def has_file(self, directory: Path, name: str) -> bool:
        """Whether a file is complete, and unchanged since it was written."""
        return name in self.files and is_complete_file(directory / name, *self.files[name])


def is_sharded(directory: Path) -> bool:
    """Whether a directory has a checkpoint that `autotp shard` wrote."""
    return (directory / MANIFEST).is_file()


def is_complete_file(path: Path, size: int, sha: str) -> bool:
    """Whether a file has this size and SHA-256."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha


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

    Raises PlanError if the directory was written for another tp, WeightsError if the file is not as
    it was written.
    """
    manifest = Manifest.read(directory)
    if manifest.tp != tp:
        raise PlanError(
            f"{directory}: was written for tp {manifest.tp}, but tp is {tp}. Merge it first, with "
            f"autotp merge {directory} MERGED; then load MERGED, or run autotp shard MERGED OUT "
            f"--tp {tp}."
        )
    path = directory / name_rank_file(rank, tp)
    size, _ = manifest.files[path.name]
    there = path.stat().st_size if path.is_file() else None
    if there != size:
        found = "does not exist" if there is None else f"has {there} bytes"
        raise WeightsError(f"{path}: {found}, but {size} bytes were written. {_AGAIN}")
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


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise WeightsError for files that were changed since they were written; all are read."""
    for name, (size, sha) in manifest.files.items():
        if not is_complete_file(directory / name, size, sha):
            raise WeightsError(
                f"{directory / name}: differs from the file of {size} bytes that was written "
                f"(SHA-256 {sha[:12]}…). {_AGAIN}"
            )


def write_text(path: Path, text: str) -> None:
    """Write a file that appears under its name when it is complete."""
    draft = path.with_name(f"{path.name}.writing")
    with report_write_errors(path):
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)


def copy_other_files(
    source: Path, target: Path, suffixes: tuple[str, ...], leave: set[str]
) -> None:
    """Copy the files besides the weights: configurations, tokenizers, the model's own code."""
    for path in sorted(source.iterdir()):
        if path.suffix in suffixes and path.is_file() and path.name not in leave:
            with report_write_errors(target / path.name):
                shutil.copyfile(path, target / path.name)


def write_tensors(writer: SafetensorsWriter, make: Callable[[Entry], Tensor]) -> tuple[int, str]:
    """Write the rest of a file; return its size and SHA-256."""
    try:
        for entry in writer.entries[writer.done :]:
            writer.write(make(entry))
        return writer.finish()
    finally:
        writer.close()
