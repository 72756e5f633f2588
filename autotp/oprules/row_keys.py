"""The keys of a row in a TOML file of rules, and the type of each."""

from collections.abc import Mapping
from typing import Final, TypeAlias, cast

from autotp.errors import RuleError


def is_nested(value: object, *types: type) -> bool:
    """Whether a value is of the first type, its items are of the second, and so on."""
    return isinstance(value, types[0]) and (
        len(types) == 1 or all(is_nested(x, *types[1:]) for x in cast("list[object]", value))
    )


_Type: TypeAlias = tuple[tuple[type, ...], str]
_NAMES: Final[_Type] = ((list, str), 'a list of names, such as ["i"]')
_OPERANDS: Final[_Type] = ((list, int), "a list of operands, such as [2]")
_TEXT: Final[_Type] = ((str,), "text")
_FLAG: Final[_Type] = ((bool,), "true or false")
ROW_KEYS: Final[Mapping[str, _Type]] = {
    "ops": ((list, str), 'a list of ops, such as ["namespace.name.overload"]'),
    "rule": ((str,), 'text, such as "..., ... -> ..."'),
    "reduce": ((dict,), 'a table, such as { i = "sum" }'),
    "whole": _NAMES,
    "aligned": _NAMES,
    "block": _NAMES,
    "linear": ((list, list, int), "a list of sets of operands, such as [[0], [1]]"),
    "bias": _OPERANDS,
    "derive": _TEXT,
    "options": ((dict,), "a table"),
    "emit": _TEXT,
    "loss": _FLAG,
    "moves": _FLAG,
    "stops": _OPERANDS,
    "samples": ((list, str), 'a list of calls as text, such as ["real(6, 12), 1"]'),
    "samples_of": ((dict,), "a table of lists of calls, by op"),
    "note": _TEXT,
}
"""The keys of a row, each with its type, those of its items, and their description."""


def check_row_types(row: Mapping[str, object]) -> None:
    """Raise RuleError for an unknown key, or a value of the wrong type."""
    for key, value in row.items():
        if key not in ROW_KEYS:
            raise RuleError(f"unknown key {key!r}; the keys are {', '.join(sorted(ROW_KEYS))}")
        types, description = ROW_KEYS[key]
        if not is_nested(value, *types):
            raise RuleError(f"`{key}` must be {description}, not {value!r}")
