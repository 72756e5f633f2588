"""Reads rules/ into an immutable Rulebook: op rows, roles, and the directory of the machine files.

A TOML row names one op or several with the same rule:

    [[row]]
    ops = ["aten.linear.default"]
    rule = "... i, o i, o -> ... o"
    reduce = { i = "sum" }
    linear = [[0, 2], [1, 2]]
    bias = [2]
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from autotp.errors import RuleError
from autotp.oprules.notation import ELLIPSIS, Signature, parse_rule
from autotp.oprules.row_keys import ROW_KEYS, check_row_types, is_nested
from autotp.oprules.rule import Row

_JOINS = {"sum", "mean", "max", "none"}


@dataclass(frozen=True, slots=True)
class Role:
    """A label for pairs: `name`, given when one of `inside` is between openers and closers."""

    name: str
    inside: frozenset[str]
    axis: str


@dataclass(frozen=True, slots=True)
class Differing:
    """That an op's result may differ between ranks: in the `phase` forward or backward, and why."""

    phase: str
    why: str


@dataclass(frozen=True, slots=True)
class Rulebook:
    """All rows by op name, the roles in the order they are tried, and what differs by op name.

    - `extensions`: the files of a user's that are merged in, each with a hash of its content;
      `extended`: the ops whose rows come from them.
    """

    rows: Mapping[str, Row]
    roles: tuple[Role, ...]
    differing: Mapping[str, tuple[Differing, ...]] = field(
        default_factory=dict[str, tuple[Differing, ...]]
    )
    extensions: tuple[str, ...] = ()
    extended: frozenset[str] = frozenset()


def find_rules_root() -> Path:
    """The directory of the rules: inside the package when installed, else the checkout's
    `rules/`.
    """
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "rules", here.parent / "rules"):
        if (candidate / "roles.toml").is_file():
            return candidate
    raise RuleError(
        f"no rules found for the package in {here}: neither {here / 'rules'} nor "
        f"{here.parent / 'rules'} has a roles.toml. Reinstall autotp."
    )


def load_rulebook(*paths: Path) -> Rulebook:
    """Read autotp's own rules, with those of `paths` merged over them.

    - A file replaces the rows of the ops that it names, and adds to `differing`.
    - A directory that has a roles.toml is a rulebook of its own, and replaces autotp's.

    Example: `load_rulebook(Path("my_rules.toml")).rows["mylib.scale.default"]`.

    Raises RuleError, which names the file, the row and the key.
    """
    book = _load_directory(find_rules_root())
    for path in paths:
        book = _load_directory(path) if path.is_dir() else _merge_file(book, path)
    return book


@cache
def _load_directory(directory: Path) -> Rulebook:
    rows: dict[str, Row] = {}
    if not (directory / "roles.toml").is_file():
        raise RuleError(
            f"{directory}: has no roles.toml, so it is not a directory of rules. Give a TOML file "
            "of rules, or a directory made like autotp's own."
        )
    for path in sorted((directory / "aten").glob("*.toml")):
        for row in _rows(path, _read(path)):
            if row.op in rows:
                raise RuleError(f"{path}: op {row.op} has a row already, in {rows[row.op].source}")
            rows[row.op] = row
    differing = directory / "differing.toml"
    entries = _differing(differing, _read(differing)) if differing.is_file() else {}
    return Rulebook(rows, _roles(directory / "roles.toml"), entries)


def _merge_file(book: Rulebook, path: Path) -> Rulebook:
    """Merge a user's file over a rulebook."""
    content = _read(path)
    unknown = sorted(set(content) - {"row", "differing"})
    if unknown or not content:
        what = f"has the unknown table {unknown[0]!r}" if unknown else "is empty"
        raise RuleError(
            f"{path}: {what}. Give [[row]] entries, as docs/how-to/add-a-rule.md shows."
        )
    rows: dict[str, Row] = {}
    for row in _rows(path, content):
        if row.op in rows:
            raise RuleError(f"{path}: op {row.op} has two rows. Give it one.")
        rows[row.op] = row
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Rulebook(
        {**book.rows, **rows},
        book.roles,
        {**book.differing, **_differing(path, content)},
        (*book.extensions, f"{path.name} {digest}"),
        book.extended | rows.keys(),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RuleError(f"{path}: cannot be read: {error}") from None


def _rows(path: Path, content: Mapping[str, Any]) -> Iterator[Row]:
    for number, entry in enumerate(_list_tables(path, content, "row"), 1):
        where = f"{path}, row {number}"
        try:
            yield from _row(entry, path.name)
        except RuleError as error:
            raise RuleError(f"{where}: {error}") from None


def _list_tables(path: Path, content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """List the tables [[name]] of a file."""
    tables: object = content.get(name, [])
    if not is_nested(tables, list, dict):
        raise RuleError(f"{path}: {name!r} is not a list of tables. Write [[{name}]] above each.")
    return cast("list[dict[str, Any]]", tables)


def _row(entry: dict[str, Any], source: str) -> Iterator[Row]:
    check_row_types(entry)
    if not entry.get("ops"):
        raise RuleError('names no op: set ops = ["namespace.name.overload"]')
    if ("rule" in entry) == ("derive" in entry):
        raise RuleError("needs exactly one of `rule` and `derive`")
    signature = parse_rule(entry["rule"]) if "rule" in entry else None
    _check(entry, signature)
    samples = _samples(entry)
    for op in entry["ops"]:
        yield Row(
            op=op,
            signature=signature,
            reduce=dict(entry.get("reduce", {})),
            whole=frozenset(entry.get("whole", ())),
            block=frozenset(entry.get("block", ())),
            aligned=frozenset(entry.get("aligned", ())),
            linear=tuple(frozenset(s) for s in entry.get("linear", ())),
            bias=frozenset(entry.get("bias", ())),
            derive=entry.get("derive", ""),
            options=dict(entry.get("options", {})),
            emit=entry.get("emit", ""),
            loss=bool(entry.get("loss", False)),
            moves=bool(entry.get("moves", False)),
            stops=frozenset(entry.get("stops", ())),
            note=entry.get("note", ""),
            source=source,
            samples=samples[op],
        )


def _samples(entry: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The sample calls of each op: its own in `samples_of`, otherwise the row's."""
    shared, own = entry.get("samples", []), entry.get("samples_of", {})
    for op in own:
        if op not in entry["ops"]:
            raise RuleError(
                f"`samples_of` has {op!r}, which is not one of the row's `ops`. Add it to `ops`; "
                "if it is a key of the row, write it above [row.samples_of]"
            )
    for op, calls in own.items():
        if not is_nested(calls, list, str):
            raise RuleError(f"`{op}` must be {ROW_KEYS['samples'][1]}, not {calls!r}")
    return {op: tuple(own.get(op, shared)) for op in entry["ops"]}


def _check(entry: dict[str, Any], signature: Signature | None) -> None:
    joins: dict[str, str] = entry.get("reduce", {})
    for factor, join in joins.items():
        if join not in _JOINS:
            raise RuleError(
                f"reduce of {factor!r} is {join!r}, not one of {', '.join(sorted(_JOINS))}"
            )
    if signature is None:
        return
    inputs = {w for p in signature.operands for d in p for w in d}
    outputs = {w for p in signature.results for d in p for w in d}
    contracted = inputs - outputs - {ELLIPSIS}
    named = set(joins) | set(entry.get("whole", ()))
    mentioned = named | set(entry.get("block", ())) | set(entry.get("aligned", ()))
    for factor in sorted((contracted - named) | (mentioned - inputs)):
        known = (
            "is contracted: say how in `reduce` or `whole`"
            if factor in inputs
            else "is in no operand"
        )
        raise RuleError(f"rule {str(signature)!r}: factor {factor!r} {known}")
    for index in {i for s in [*entry.get("linear", ()), entry.get("bias", ())] for i in s}:
        if not 0 <= index < len(signature.operands):
            raise RuleError(f"operand {index} is not one of the rule's {len(signature.operands)}")


def _roles(path: Path) -> tuple[Role, ...]:
    entries = cast("list[dict[str, Any]]", _read(path).get("role", []))
    return tuple(
        Role(e["name"], frozenset(e.get("inside", ())), e.get("axis", e["name"])) for e in entries
    )


def _differing(path: Path, content: Mapping[str, Any]) -> dict[str, tuple[Differing, ...]]:
    found: dict[str, tuple[Differing, ...]] = {}
    for number, entry in enumerate(_list_tables(path, content, "differing"), 1):
        if entry.get("phase") not in ("forward", "backward") or not entry.get("why"):
            raise RuleError(
                f"{path}, entry {number}: needs a `phase`, forward or backward, and a `why`"
            )
        if not is_nested(entry.get("ops"), list, str):
            raise RuleError(f"{path}, entry {number}: `ops` must be {ROW_KEYS['ops'][1]}")
        for op in entry["ops"]:
            found[op] = (*found.get(op, ()), Differing(entry["phase"], entry["why"]))
    return found
