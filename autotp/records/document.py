"""A record as a text file: JSON that names its format and version and carries its own hash.

    {"format": "autotp plan", "version": 1, "hash": "9f2c…", "model": …}

The hash makes two things cheap: ranks compare plans by it, and a file that was changed is noticed.
What says only how a record was come by, not what it is, is left out of it (`apart`).
"""

import hashlib
import json
import math
from collections.abc import Collection
from typing import TypeVar, cast

from autotp.records.json_record import RecordError, decode, encode

__all__ = ["hash_content", "read_document", "write_document"]

T = TypeVar("T")


def hash_content(record: object, apart: Collection[str] = ()) -> str:
    """The SHA-256, in hexadecimal, of all that `record` holds but the fields `apart`."""
    return _hash(encode(record), apart)


def write_document(record: object, name: str, version: int, apart: Collection[str] = ()) -> str:
    """`record` as JSON text in the format `name`, the header before its own keys."""
    fields = encode(record)
    header = {"format": name, "version": version, "hash": _hash(fields, apart)}
    return json.dumps({**header, **fields}, indent=1, allow_nan=False) + "\n"


def read_document(
    cls: type[T], text: str, name: str, version: int, apart: Collection[str] = ()
) -> T:
    """The record of class `cls` that `text` holds in the format `name`.

    Constraints:
    - Raises RecordError: cut off, another format or version, changed since, or not a `cls`.
    - A text without a hash is taken as it is: whoever edits a file by hand removes that line.
    """
    fields = _parse(text)
    found = fields.pop("format", None), fields.pop("version", None)
    if found != (name, version):
        expected = f"expected format {name!r} version {version}"
        raise RecordError(f"{expected}, found {found[0]!r} version {found[1]!r}")
    stated, actual = fields.pop("hash", None), _hash(fields, apart)
    if stated not in (None, actual):
        reason = f"hash says {str(stated)[:12]}, the content gives {actual[:12]}"
        raise RecordError(f"{reason}: it was changed; remove the hash line to accept that")
    return decode(cls, fields)


def _parse(text: str) -> dict[str, object]:
    try:
        value: object = json.loads(
            text, parse_float=_refuse_infinite, parse_constant=_refuse_infinite
        )
    except json.JSONDecodeError as error:
        ended = " (the text ends here: cut off?)" if _is_cut_off(error, text) else ""
        at = f"line {error.lineno} column {error.colno}"
        raise RecordError(f"{at}: {error.msg}{ended}") from error
    if not isinstance(value, dict):
        raise RecordError(f"expected an object, found {type(value).__name__}")
    return cast("dict[str, object]", value)


def _refuse_infinite(text: str) -> float:
    """The number that is written; Python's own reader takes `NaN` and `1e999` too."""
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"{text} is no finite number")
    return value


def _is_cut_off(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")


def _hash(fields: dict[str, object], apart: Collection[str]) -> str:
    hashed = {name: value for name, value in fields.items() if name not in apart}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
