"""A record as a text file: JSON that names its format and version and carries its own hash.

    {"format": "autotp plan", "version": 1, "hash": "9f2c…", "model": …}

Ranks compare plans by the hash, and a changed file is detected by it. Fields that only describe how
a record was computed are excluded from the hash (`apart`).
"""

import hashlib
import json
import math
from collections.abc import Collection
from typing import TypeVar, cast

from autotp.records.json_record import RecordError, decode, encode

T = TypeVar("T")


def hash_content(record: object, apart: Collection[str] = ()) -> str:
    """Compute the SHA-256, in hexadecimal, of `record` without the fields `apart`."""
    return _hash(encode(record), apart)


def write_document(record: object, name: str, version: int, apart: Collection[str] = ()) -> str:
    """Write `record` as JSON text in the format `name`, with the header before its own keys."""
    fields = encode(record)
    header = {"format": name, "version": version, "hash": _hash(fields, apart)}
    return json.dumps({**header, **fields}, indent=1, allow_nan=False) + "\n"


def read_document(
    cls: type[T], text: str, name: str, version: int, apart: Collection[str] = ()
) -> T:
    """Read the record of class `cls` from `text` in the format `name`.

    Constraints:
    - Raises RecordError if the text is truncated, has another format or version, was changed after
      it was written, or does not describe a `cls`.
    - A text without a hash is accepted: to edit a file by hand, remove that line.
    """
    fields = _parse(text)
    found = fields.pop("format", None), fields.pop("version", None)
    if found != (name, version):
        expected = f"expected format {name!r} version {version}"
        raise RecordError(f"{expected}, found {found[0]!r} version {found[1]!r}")
    stated, actual = fields.pop("hash", None), _hash(fields, apart)
    if stated not in (None, actual):
        reason = f"the stated hash is {str(stated)[:12]}, the hash of the content {actual[:12]}"
        raise RecordError(f"{reason}: the file was changed. Remove the hash line to accept that")
    return decode(cls, fields)


def _parse(text: str) -> dict[str, object]:
    try:
        value: object = json.loads(
            text, parse_float=_refuse_infinite, parse_constant=_refuse_infinite
        )
    except json.JSONDecodeError as error:
        ended = " (the text ends here: is it truncated?)" if _is_truncated(error, text) else ""
        at = f"line {error.lineno} column {error.colno}"
        raise RecordError(f"{at}: {error.msg}{ended}") from error
    if not isinstance(value, dict):
        raise RecordError(f"expected an object, found {type(value).__name__}")
    return cast("dict[str, object]", value)


def _refuse_infinite(text: str) -> float:
    """Parse a finite number; Python's own reader also accepts `NaN` and `1e999`."""
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"{text} is not a finite number")
    return value


def _is_truncated(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")


def _hash(fields: dict[str, object], apart: Collection[str]) -> str:
    hashed = {name: value for name, value in fields.items() if name not in apart}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
