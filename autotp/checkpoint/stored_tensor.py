"""A tensor on disk of which any box, a range [start, stop) in each dim, can be read.

Only the bytes of the box are read, in contiguous runs, through one small buffer. Nothing is mapped,
so that pages of the file do not count as memory of this process.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from autotp.checkpoint.safetensors_format import Entry
from autotp.errors import WeightsError

Box: TypeAlias = tuple[tuple[int, int], ...]

_BLOCK: Final = 1 << 20  # bytes read at a time
_MARKS: Final = torch.empty(_BLOCK // 2, dtype=torch.bool)  # which elements of a block are NaN
_SHORT: Final = 16  # bytes of a run below which reading the gaps too is faster


class StoredTensor(Protocol):
    """A tensor on disk."""

    @property
    def label(self) -> str:
        """The tensor and its file for messages: `tensor norm.weight of model.safetensors`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on disk."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape on disk."""
        ...

    def read(self, box: Box) -> Tensor:
        """Read the elements in a box of at most 1 MB, valid until the next read."""
        ...


class CheckpointFile:
    """A file that is read in ranges, with the buffer for them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: int | None = None
        self._buffer: Tensor | None = None

    def read(self, runs: list[int], length: int, label: str) -> Tensor:
        """Read runs of `length` bytes at the offsets `runs`, one after another."""
        if self._opened is None:
            self._opened = os.open(self.path, os.O_RDONLY)
        size = length * len(runs)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, _BLOCK), dtype=torch.uint8)
        view = self._buffer.numpy().data
        for k, start in enumerate(runs):
            _read_all(self._opened, view[k * length : (k + 1) * length], start, label)
        return self._buffer[:size]

    def close(self) -> None:
        """Close the file and free the buffer."""
        if self._opened is not None:
            with suppress(OSError):
                os.close(self._opened)
        self._opened = self._buffer = None


class SafetensorsTensor:
    """A tensor of a safetensors file."""

    def __init__(self, file: CheckpointFile, entry: Entry) -> None:
        self._file, self.entry = file, entry
        self.label = f"tensor {entry.name} of {file.path}"
        self.dtype, self.shape = entry.dtype, entry.shape

    def read(self, box: Box) -> Tensor:
        """Read the elements in a box of at most 1 MB, valid until the next read."""
        last = max((k for k, span in enumerate(box) if span != (0, self.shape[k])), default=0)
        size = self.dtype.itemsize
        run = prod(measure_box(box)[last:]) * size
        wide = (*box[:last], *((0, n) for n in self.shape[last:]))
        if last and run < _SHORT and prod(measure_box(wide)) * size <= _BLOCK:
            # the gaps between short runs are read too, in one call
            return self.read(wide).narrow(last, box[last][0], box[last][1] - box[last][0])
        offsets = [self.entry.start + at * size for at in self._find_starts(box, last)]
        return self._file.read(offsets, run, self.label).view(self.dtype).view(measure_box(box))

    def _find_starts(self, box: Box, last: int) -> list[int]:
        """Find the elements at which runs begin; `last`: the last dim that is sliced."""
        strides = [prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        starts = [0]
        for k in range(last):
            starts = [s + i * strides[k] for s in starts for i in range(*box[k])]
        return [s + box[last][0] * strides[last] for s in starts] if box else starts


class PickledTensor:
    """A tensor of a file of torch.save, mapped into memory by torch.load."""

    def __init__(self, path: Path, name: str, tensor: Tensor) -> None:
        self.tensor = tensor
        self.label = f"tensor {name} of {path}"
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)

    def read(self, box: Box) -> Tensor:
        """Read the elements in a box."""
        return self.tensor[tuple(slice(*span) for span in box)]


def make_full_box(shape: tuple[int, ...]) -> Box:
    """Make the box of all elements of a shape."""
    return tuple((0, n) for n in shape)


def measure_box(box: Box) -> tuple[int, ...]:
    """Give the shape of a box."""
    return tuple(stop - start for start, stop in box)


def fill_tensor(out: Tensor, stored: StoredTensor, box: Box) -> None:
    """Read a box into `out`, block by block, converted to its dtype.

    Raises WeightsError for NaN, or a truncated file.
    """
    for block in iterate_blocks(measure_box(box), stored.dtype.itemsize):
        inner = tuple((a + s, a + e) for (a, _), (s, e) in zip(box, block, strict=True))
        values = stored.read(inner)
        _check_numbers(values, stored, inner)
        out[tuple(slice(*span) for span in block)].copy_(values)


def iterate_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Divide a shape into boxes of at most 1 MB, in order."""
    if 0 in shape:
        return
    yield from _iterate_blocks(shape, itemsize, 0)


def _iterate_blocks(shape: tuple[int, ...], itemsize: int, dim: int) -> Iterator[Box]:
    row = prod(shape[dim + 1 :]) * itemsize
    if dim == len(shape) or shape[dim] * row <= _BLOCK:
        yield tuple((0, n) for n in shape[dim:])
        return
    step = max(1, _BLOCK // row)
    for start in range(0, shape[dim], step):
        stop = min(start + step, shape[dim])
        inner = (tuple((0, n) for n in shape[dim + 1 :]),)
        for rest in inner if row <= _BLOCK else _iterate_blocks(shape, itemsize, dim + 1):
            yield ((start, stop), *rest)


def _read_all(opened: int, view: memoryview, start: int, label: str) -> None:
    while view:
        got = os.preadv(opened, [view], start)
        if got == 0:
            raise WeightsError(
                f"{label}: the file ends at byte {start}, {len(view)} bytes too early. Copy or "
                "download it again, and do not change it while it is read."
            )
        view, start = view[got:], start + got


def _check_numbers(values: Tensor, stored: StoredTensor, box: Box) -> None:
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        return
    marks = _MARKS[: values.numel()].view(values.shape) if values.numel() <= len(_MARKS) else None
    marks = torch.ne(values, values, out=marks)
    if marks.any():
        raise WeightsError(
            f"{stored.label}: {int(marks.sum())} of the {values.numel()} values in "
            f"{_format_box(box)} are NaN, and every output would be NaN. Download or save the "
            "checkpoint again."
        )


def _format_box(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in box) + "]"
