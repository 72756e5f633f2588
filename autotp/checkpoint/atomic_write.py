"""Files that appear only when they are complete: written under another name, then renamed."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from autotp.checkpoint.safetensors_format import Entry, encode_header
from autotp.errors import WeightsError

__all__ = [
    "METADATA",
    "SafetensorsWriter",
    "check_space",
    "open_draft",
    "publish_files",
    "report_write_errors",
]

METADATA: Final = {"format": "pt"}
_BLOCK: Final = 4 << 20
_DRAFT: Final = ".saving-"


class SafetensorsWriter:
    """A safetensors file that is written tensor by tensor, in the order of its `entries`.

    It has another name until `finish`. With `resume`, a partial file with the same header is
    continued after its last complete tensor.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], *, resume: bool = False) -> None:
        self.path, self.entries = path, list(entries)
        self._part = path.with_name(f"{path.name}.part")
        self._header = encode_header(entries, METADATA)
        self._hash = hashlib.sha256()
        self.done = 0
        with report_write_errors(self._part):
            self._file: BinaryIO = self._part.open("r+b" if self._can_resume(resume) else "w+b")
            if self._file.seek(0, os.SEEK_END):
                self._resume()
            else:
                self._put(self._header)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, which must have the shape and dtype of the next entry."""
        entry = self.entries[self.done]
        assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
        with report_write_errors(self.path, f"tensor {entry.name}"):
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _BLOCK):
                self._put(data[start : start + _BLOCK])
            self._file.flush()
        self.done += 1

    def finish(self) -> tuple[int, str]:
        """Rename the complete file; return its size and SHA-256."""
        assert self.done == len(self.entries), f"{self.done} of {len(self.entries)} tensors"
        with report_write_errors(self.path):
            size = self._file.tell()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self.path)
        return size, self._hash.hexdigest()

    def close(self) -> None:
        """Close the file; a partial one stays under its other name."""
        self._file.close()

    def _can_resume(self, resume: bool) -> bool:
        if not resume or not self._part.is_file():
            return False
        with self._part.open("rb") as file:
            return file.read(len(self._header)) == self._header

    def _resume(self) -> None:
        """Truncate the file after its last complete tensor, and hash its content."""
        begin, size = len(self._header), self._file.tell()
        complete = [entry for entry in self.entries if begin + entry.stop <= size]
        stop = begin + max((entry.stop for entry in complete), default=0)
        self.done = len(complete)
        self._file.truncate(stop)
        self._file.seek(0)
        left = stop
        while left:
            block = self._file.read(min(left, _BLOCK))
            self._hash.update(block)
            left -= len(block)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)


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
