"""Files that appear only when they are complete: written under another name, then renamed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from autotp.checkpoint.safetensors_format import Entry, encode_header
from autotp.errors import WeightsError

METADATA: Final = {"format": "pt"}
_BLOCK: Final = 4 << 20
_DRAFT: Final = ".saving-"


def begin_file(path: Path, entries: Sequence[Entry]) -> None:
    """Write the header of a safetensors file with these entries; the tensors are appended."""
    with report_write_errors(path):
        path.write_bytes(encode_header(entries, METADATA))


def write_text(path: Path, text: str) -> None:
    """Write a small file."""
    with report_write_errors(path):
        path.write_text(text, encoding="utf-8")


def append_tensor(path: Path, entry: Entry, tensor: Tensor) -> None:
    """Append the tensor of the next entry of a safetensors file."""
    assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
    with report_write_errors(path, f"tensor {entry.name}"), path.open("ab") as file:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _BLOCK):
            file.write(data[start : start + _BLOCK])


@contextmanager
def report_write_errors(path: Path, what: str = "") -> Generator[None]:
    """Turn an OSError of the block into a WeightsError, which names the file and the tensor."""
    try:
        yield
    except OSError as error:
        where = f" at {what}" if what else ""
        free = shutil.disk_usage(_find_existing(path)).free
        raise WeightsError(
            f"{path}: cannot be written{where}: {error.strerror or error} "
            f"({_format_megabytes(free)} are free there). Free space, or choose another directory; "
            "there is no file of this name."
        ) from error


@contextmanager
def open_draft(directory: Path) -> Generator[Path]:
    """Make a directory inside `directory` to write into; it is removed at the end of the block.

    Those of killed processes, which are no longer locked, are removed too.
    """
    is_new = not directory.exists()
    with report_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{_DRAFT}*"):
            if (lock := _lock_directory(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        inner = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=directory))
    lock = _lock_directory(inner)
    try:
        yield inner
    finally:
        shutil.rmtree(inner, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if is_new and not any(directory.iterdir()):  # nothing was published
            directory.rmdir()


def publish_files(inner: Path, last: str = "") -> None:
    """Move the files of a draft to their final place, the one called `last` after the others."""
    files = sorted(inner.iterdir(), key=lambda path: (path.name == last, path.name))
    for name in (file.name for file in files):
        if (inner.parent / name).is_dir():
            raise WeightsError(
                f"{inner.parent / name}: is a directory, but a file must be written there. Remove "
                f"it, or choose another directory; none of the {len(files)} files was written."
            )
    for file in files:
        with report_write_errors(inner.parent / file.name):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
            file.replace(inner.parent / file.name)


def check_space(directory: Path, needed: int) -> None:
    """Raise WeightsError unless `needed` bytes are free."""
    free = shutil.disk_usage(_find_existing(directory)).free
    if free < needed:
        raise WeightsError(
            f"{directory}: {_format_megabytes(needed)} must be written, and "
            f"{_format_megabytes(free)} are free. Free space, or choose another directory; nothing "
            "was written."
        )


def _lock_directory(directory: Path) -> int | None:
    """Lock a directory until the returned file is closed or the process ends; None if it is locked
    already.
    """
    try:
        opened = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by another process, or this file system has no locks
        os.close(opened)
        return None
    return opened


def _find_existing(path: Path) -> Path:
    """Find the closest existing parent of a path, or the path itself."""
    for candidate in (absolute := path.absolute(), *absolute.parents):
        with suppress(OSError):  # such as a name that is too long
            if candidate.exists():
                return candidate
    return absolute


def _format_megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
