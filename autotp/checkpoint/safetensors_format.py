"""The layout of a safetensors file: a length, a JSON header, then the tensors one after another.

Files are read and written here, and not by the safetensors library: to read only a rank's slices,
and to write a file tensor by tensor, the offsets of tensors must be known. The files equal those of
the library byte by byte.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, cast

import torch

from autotp.errors import WeightsError

# in the order of the library: a file begins with tensors of the last dtype
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ORDER: Final = list(DTYPES)
_AGAIN: Final = "Copy or download the file again."


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its bytes are `[start, stop)` of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Read the entries of a safetensors file by name.

    Raises WeightsError if the file is truncated, or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(
                f"{path}: is truncated: its header should have {length} bytes, but the file has "
                f"only {size}. {_AGAIN}"
            )
        rows = _parse_header(path, file.read(length))
    begin = 8 + length
    entries = {name: _read_entry(path, name, row, begin) for name, row in rows.items()}
    last, end = None, begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            what = f"those of {last.name} end" if last else "the header ends"
            raise WeightsError(
                f"{path}: tensor {entry.name}: its bytes begin at {entry.start}, but {what} at "
                f"{end}: each byte must belong to one tensor. {_AGAIN}"
            )
        last, end = entry, entry.stop
    if end != size:
        which = f" (the last tensor is {last.name})" if last else ""
        raise WeightsError(
            f"{path}: has {size} bytes, but {end} according to its header{which}. {_AGAIN}"
        )
    return entries


def lay_out_tensors(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> list[Entry]:
    """Lay out tensors in a file in the order of the library; offsets begin after the header."""
    rows = sorted(tensors, key=lambda row: (-_ORDER.index(_NAMES[row[1]]), row[0].encode()))
    entries: list[Entry] = []
    at = 0
    for name, dtype, shape in rows:
        stop = at + prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, shape, at, stop))
        at = stop
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Encode the header of a file with the entries of `lay_out_tensors`, with its length first."""
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        rows[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_header(path: Path, text: bytes) -> dict[str, Mapping[str, Any]]:
    try:
        rows: object = json.loads(text)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise WeightsError(
            f"{path}: its header of {len(text)} bytes is not JSON ({error}). {_AGAIN}"
        ) from error
    if not isinstance(rows, dict):
        raise WeightsError(
            f"{path}: its header is a {type(rows).__name__}, not an object. {_AGAIN}"
        )
    objects = cast("dict[str, Mapping[str, Any]]", rows)
    return {name: row for name, row in objects.items() if name != "__metadata__"}


def _read_entry(path: Path, name: str, row: Mapping[str, Any], begin: int) -> Entry:
    try:
        dtype, shape = DTYPES.get(row["dtype"]), tuple(map(_check_size, row["shape"]))
        start, stop = map(_check_size, row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: tensor {name}: its entry must have a dtype, a shape and two offsets, all of "
            f"them integers of at least 0. {_AGAIN}"
        ) from error
    if dtype is None:
        raise WeightsError(
            f"{path}: tensor {name}: its dtype {row['dtype']} is not one of {', '.join(DTYPES)}. "
            "Convert the checkpoint to one of them, such as BF16."
        )
    wanted = prod(shape) * dtype.itemsize
    if stop - start != wanted:
        raise WeightsError(
            f"{path}: tensor {name} {list(shape)} of {row['dtype']} needs {wanted} bytes, but its "
            f"entry has {stop - start}. {_AGAIN}"
        )
    return Entry(name, dtype, shape, begin + start, begin + stop)


def _check_size(number: object) -> int:
    """Return a size or an offset; ValueError for anything else."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number
