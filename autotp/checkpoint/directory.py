"""The directory of a checkpoint: which of its files have the weights, and each tensor by name.

Files are tried in the order of Transformers: model.safetensors, its index, pytorch_model.bin, its
index.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast

import torch

from autotp.checkpoint.safetensors_format import read_header
from autotp.checkpoint.stored_tensor import (
    CheckpointFile,
    PickledTensor,
    SafetensorsTensor,
    StoredTensor,
)
from autotp.errors import WeightsError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_ZIP: Final = b"PK\x03\x04"  # the first bytes of files of torch.save
_RESTORE: Final = "Restore the checkpoint's own index."
_NAMES: Final = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a directory, ready to be read; closed at the end of a `with` block.

    - `files`: the files with weights, in order.
    - `tensors`: by name on disk.
    """

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    _opened: tuple[CheckpointFile, ...] = ()

    @staticmethod
    def open(directory: Path, named: str | None = None) -> "Checkpoint":
        """Open the checkpoint in a directory; `named`: the file that its configuration names.

        Raises WeightsError for files that are missing or truncated, or two tensors of one name.
        """
        path = _choose_file(directory, named)
        files = _list_indexed_files(path) if path.name.endswith(".index.json") else [path]
        tensors: dict[str, StoredTensor] = {}
        opened: list[CheckpointFile] = []
        for file in files:
            for name, stored in _read_tensors(file, opened):
                if name in tensors:
                    raise WeightsError(
                        f"{stored.label}: is in a second file too: {tensors[name].label}. Remove "
                        "one of them."
                    )
                tensors[name] = stored
        if path not in files:
            _check_index(path, tensors)
        return Checkpoint(directory, tuple(files), tensors, tuple(opened))

    def __enter__(self) -> "Checkpoint":
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all files."""
        for file in self._opened:
            file.close()


def read_json(path: Path, advice: str) -> Any:
    """Read a JSON file; WeightsError, with `advice` on what to do, where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}. {advice}") from error


def _choose_file(directory: Path, named: str | None) -> Path:
    if not directory.is_dir():
        raise WeightsError(
            f"{directory}: is not a directory. Give one with config.json and safetensors files."
        )
    for name in (named,) if named else _NAMES:
        if (directory / name).is_file():
            return directory / name
    names = ", ".join([named] if named else _NAMES)
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".safetensors", ".bin"))
    found = f", only {', '.join(others[:4])}" if others else ""
    raise WeightsError(
        f"{directory}: has no weights: none of {names} exists{found}. Put the files of the "
        "checkpoint there, under one of these names or with an index."
    )


def _list_indexed_files(index: Path) -> list[Path]:
    """List the files that an index names, each of which must exist."""
    content = read_json(index, _RESTORE)
    where: object = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where:
        raise WeightsError(f"{index}: has no weight_map. {_RESTORE}")
    mapped = cast("dict[str, str]", where)
    for tensor, name in cast("dict[str, object]", where).items():
        if not isinstance(name, str):
            raise WeightsError(f"{index}: names {name!r} as the file of {tensor}. {_RESTORE}")
    files = [index.parent / name for name in sorted(set(mapped.values()))]
    for file in files:
        if file.parent.resolve() != index.parent.resolve():
            raise WeightsError(
                f"{index}: names {file}, which is outside {index.parent}. {_RESTORE}"
            )
        if not file.is_file():
            lost = [tensor for tensor, name in mapped.items() if name == file.name]
            raise WeightsError(
                f"{index}: names the file {file.name} with {len(lost)} tensors ({lost[0]}"
                f"{', …' if len(lost) > 1 else ''}), but it does not exist. Download the missing "
                f"files: {sum(f.is_file() for f in files)} of {len(files)} exist."
            )
    return files


def _check_index(index: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise WeightsError for an index that names tensors that no file has."""
    where: dict[str, str] = read_json(index, _RESTORE)["weight_map"]
    for name, file in where.items():
        if name not in tensors:
            raise WeightsError(
                f"{index}: tensor {name} should be in {file}, but is in none of the files "
                f"({len(tensors)} of {len(where)} tensors were found). Download that file again."
            )


def _read_tensors(file: Path, opened: list[CheckpointFile]) -> Iterable[tuple[str, StoredTensor]]:
    if file.suffix != ".safetensors":
        return _unpickle_tensors(file)
    source = CheckpointFile(file)
    opened.append(source)
    return [(name, SafetensorsTensor(source, entry)) for name, entry in read_header(file).items()]


def _unpickle_tensors(file: Path) -> list[tuple[str, StoredTensor]]:
    with file.open("rb") as opened:
        mapped = opened.read(len(_ZIP)) == _ZIP  # older files must be read into memory
    try:
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    # torch raises errors of any kind for a damaged file
    except Exception as error:
        raise WeightsError(
            f"{file}: cannot be read as plain weights (weights_only): {_extract_reason(error)}. "
            "Download it again; if it is not damaged, convert it to safetensors on a machine where "
            "you trust this file."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(
            f"{file}: contains a {type(content).__name__}, not tensors by name. Save the model's "
            "own state_dict()."
        )
    tensors = {
        name: tensor
        for name, tensor in cast("dict[str, object]", content).items()
        if isinstance(tensor, torch.Tensor)
    }
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise WeightsError(
                f"tensor {name} of {file}: is {kind}, but parameters must be dense tensors with "
                "values. Save the model's own state_dict()."
            )
    return [(name, PickledTensor(file, name, tensor.detach())) for name, tensor in tensors.items()]


def _extract_reason(error: Exception) -> str:
    """Extract from an error of torch why it cannot read a file, without the advice to trust it."""
    text = str(error).strip()
    unsafe = re.search(r"WeightsUnpickler error: (.+)", text)
    line = unsafe[1] if unsafe else text.partition("\n")[0]
    return f"{type(error).__name__}: {line.partition('. ')[0].rstrip('.') or 'it ends too early'}"
