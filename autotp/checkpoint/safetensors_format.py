"""The layout of a safetensors file: a length, a JSON header, then the tensors one after another.

It is read and written here, and not by the safetensors library, for two reasons: where a tensor's
bytes begin must be known to read a rank's part of it and nothing else, and to write a file tensor
by tensor. What is written is what the library writes, to the byte.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, cast

import torch

from autotp.errors import WeightsError

__all__ = ["DTYPES", "Entry", "encode_header", "lay_out_tensors", "read_header"]

# in the library's order: a file begins with the tensors of the last of them
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
    """A tensor in a file: its bytes are `[start, stop)`, from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name.

    Raises WeightsError, with the file's name and both sizes, where it is cut short or no such file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(
                f"{path}: is cut short: its header should have {length} bytes, the file has {size} "
                f"in all. {_AGAIN}"
            )
        rows = _parse_header(path, file.read(length))
    begin = 8 + length
    entries = {name: _read_entry(path, name, row, begin) for name, row in rows.items()}
    last, end = None, begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            what = f"that of {last.name} ends" if last else "the header ends"
            raise WeightsError(
                f"{path}: tensor {entry.name}: its bytes begin at {entry.start}, and {what} at "
                f"{end}: all bytes belong to one tensor each. {_AGAIN}"
            )
        last, end = entry, entry.stop
    if end != size:
        told = f" (its last tensor is {last.name})" if last else ""
        raise WeightsError(
            f"{path}: has {size} bytes, but its header tells of {end}{told}. {_AGAIN}"
        )
    return entries


def lay_out_tensors(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> list[Entry]:
    """The entries of a file with these tensors, in the library's order, offsets from the header's
    end.
    """
    rows = sorted(tensors, key=lambda row: (-_ORDER.index(_NAMES[row[1]]), row[0].encode()))
    entries: list[Entry] = []
    at = 0
    for name, dtype, shape in rows:
        stop = at + prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, shape, at, stop))
        at = stop
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with the entries that `lay_out_tensors` gave, its length first."""
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
            f"{path}: its header of {len(text)} bytes is no JSON ({error}). {_AGAIN}"
        ) from error
    if not isinstance(rows, dict):
        raise WeightsError(f"{path}: its header is a {type(rows).__name__}, no object. {_AGAIN}")
    found = cast("dict[str, Mapping[str, Any]]", rows)
    return {name: row for name, row in found.items() if name != "__metadata__"}


def _read_entry(path: Path, name: str, row: Mapping[str, Any], begin: int) -> Entry:
    try:
        dtype, shape = DTYPES.get(row["dtype"]), tuple(map(_check_size, row["shape"]))
        start, stop = map(_check_size, row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: tensor {name}: its entry lacks dtype, shape or two offsets, or has others "
            f"than whole numbers from 0. {_AGAIN}"
        ) from error
    if dtype is None:
        raise WeightsError(
            f"{path}: tensor {name}: its dtype {row['dtype']} is none of {', '.join(DTYPES)}. "
            "Convert the checkpoint to one of them, e.g. BF16."
        )
    wanted = prod(shape) * dtype.itemsize
    if stop - start != wanted:
        raise WeightsError(
            f"{path}: tensor {name} {list(shape)} of {row['dtype']} needs {wanted} bytes, its "
            f"entry has {stop - start}. {_AGAIN}"
        )
    return Entry(name, dtype, shape, begin + start, begin + stop)


def _check_size(number: object) -> int:
    """A size or a place in a file; ValueError for anything else."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number
