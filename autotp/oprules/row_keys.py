"""The keys of a row in a TOML file of rules, and the type of each."""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

from autotp.errors import RuleError


def is_list_of(value: object, kind: type) -> bool:
    """Whether a value is a list with items of a type."""
    return isinstance(value, list) and all(isinstance(x, kind) for x in cast("list[object]", value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of_texts(value: object) -> bool:
    return is_list_of(value, str)


def _is_list_of_numbers(value: object) -> bool:
    return is_list_of(value, int)


def _is_list_of_sets(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_list_of_numbers, cast("list[object]", value)))


_Type: TypeAlias = tuple[Callable[[object], bool], str]
_NAMES: Final[_Type] = (_is_list_of_texts, 'a list of names, such as ["i"]')
_OPERANDS: Final[_Type] = (_is_list_of_numbers, "a list of operands, such as [2]")
_TEXT: Final[_Type] = (_is_text, "text")
_FLAG: Final[_Type] = (_is_flag, "true or false")
ROW_KEYS: Final[Mapping[str, _Type]] = {
    "ops": (_is_list_of_texts, 'a list of ops, such as ["namespace.name.overload"]'),
    "rule": (_is_text, 'text, such as "..., ... -> ..."'),
    "reduce": (_is_table, 'a table, such as { i = "sum" }'),
    "whole": _NAMES,
    "aligned": _NAMES,
    "block": _NAMES,
    "linear": (_is_list_of_sets, "a list of sets of operands, such as [[0], [1]]"),
    "bias": _OPERANDS,
    "derive": _TEXT,
    "options": (_is_table, "a table"),
    "emit": _TEXT,
    "loss": _FLAG,
    "moves": _FLAG,
    "stops": _OPERANDS,
    "samples": (_is_list_of_texts, 'a list of calls as text, such as ["real(6, 12), 1"]'),
    "samples_of": (_is_table, "a table of lists of calls, by op"),
    "note": _TEXT,
}
"""The keys of a row, each with the check of its type and the description of it."""


def check_row_types(row: Mapping[str, object]) -> None:
    """Raise RuleError for an unknown key, or a value of the wrong type."""
    for key, value in row.items():
        if key not in ROW_KEYS:
            raise RuleError(f"unknown key {key!r}; the keys are {', '.join(sorted(ROW_KEYS))}")
        has_right_type, description = ROW_KEYS[key]
        if not has_right_type(value):
            raise RuleError(f"`{key}` must be {description}, not {value!r}")
