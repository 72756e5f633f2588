"""Checks every row of a rulebook.

Samples are run as written, and at random sizes, most of them uneven, if the op accepts these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from random import Random
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.errors import RuleError
from autotp.lower.local_ops import FORMS
from autotp.oprules.derive.derive import RULES
from autotp.oprules.rule import Row
from autotp.oprules.rulebook import Rulebook
from autotp.records.rule_verdict import Verdict
from autotp.verification.rules.cases import OpCase, RandomTensor, Sample, build_cases, find_overload
from autotp.verification.rules.laws import find_violations, list_strategies
from autotp.verification.rules.written import parse_sample

_GROUPS = (2, 3)
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)
_SIZES = (3, 5, 7, 8, 9, 10, 11, 13)


def check_rules(rules: Rulebook, *, ops: str = "*", seed: int = 0) -> Iterator[Verdict]:
    """One verdict per row, by op name.

    - `ops`: a glob for the names of ops. `seed`: of the random sizes.
    """
    for op, row in sorted(rules.rows.items()):
        if fnmatchcase(op, ops):
            yield _check_row(op, row, rules, Random(f"{op} {seed}"))


_VERIFIED: set[tuple[str, ...]] = set()
"""The files of rules that have been verified in this process."""


def require_valid_rules(rules: Rulebook) -> None:
    """Raise RuleError if a row of the user's own files is wrong, or cannot be tested."""
    if rules.extensions in _VERIFIED:
        return
    for op in sorted(rules.extended):
        row = rules.rows[op]
        verdict = _check_row(op, row, rules, Random(f"{op} 0"))
        if verdict.verdict != "right":
            raise RuleError(
                f"{row.source}: the rule of {op} ({verdict.rule}) is {verdict.verdict}: "
                f"{verdict.reason}"
            )
    _VERIFIED.add(rules.extensions)


def _check_row(op: str, row: Row, rules: Rulebook, random: Random) -> Verdict:
    rule = str(row)
    try:
        find_overload(op)
    except AttributeError:
        return Verdict(op, rule, "untested", reason="no such op: import what registers it")
    _check_names(row)
    if not row.samples:
        return Verdict(op, rule, "untested", reason='no sample: give the row samples = ["…"]')
    calls = strategies = 0
    for case in _list_cases(row, rules, random):
        calls += 1
        for tp in _GROUPS:
            strategies += len(list_strategies(case, tp, training=True))
            if broken := find_violations(case, tp):
                return Verdict(op, rule, "wrong", calls, strategies, broken[0])
    return Verdict(op, rule, "right", calls, strategies)


def _check_names(row: Row) -> None:
    """Raise RuleError for a row whose `derive` or `emit` names no function of autotp."""
    for key, name, known in (("derive", row.derive, RULES), ("emit", row.emit, FORMS)):
        if name and name not in known:
            raise RuleError(
                f"{row.source}, {row.op}: `{key}` is {name!r}, not one of {', '.join(known)}"
            )


def _list_cases(row: Row, rules: Rulebook, random: Random) -> Iterator[OpCase]:
    """List the cases of each sample, and one at other sizes if the op accepts these."""
    for text in row.samples:
        try:
            sample = parse_sample(text)
            yield from build_cases(row.op, sample, rules)
        except RuleError as error:
            raise RuleError(f"{row.source}, {row.op}: {error}") from None
        except _REFUSALS as error:
            raise RuleError(
                f"{row.source}, {row.op}: its sample {text!r} cannot be run: {error}"
            ) from error
        other = _resize_sample(sample, random)
        if other is not None and (case := _find_case(row.op, other, rules)):
            yield case


def _find_case(op: str, sample: Sample, rules: Rulebook) -> OpCase | None:
    """The first case of a sample; None if the op does not accept it, forward and backward."""
    try:
        case = next(build_cases(op, sample, rules), None)
    except _REFUSALS:
        return None
    if case is None:
        return None
    replicated = [s for s in list_strategies(case, 2, training=True) if s.label == "replicated"]
    return None if find_violations(case, 2, only=replicated) else case


def _resize_sample(sample: Sample, random: Random) -> Sample | None:
    """The sample with other sizes, equal where they were; None if it has real tensors."""
    flat, spec = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
    if any(isinstance(x, Tensor) for x in flat):
        return None
    shapes = [x.shape for x in flat if isinstance(x, RandomTensor)]
    sizes = sorted({n for shape in shapes for n in shape if n > 1})
    others = dict(zip(sizes, random.sample(_SIZES, min(len(sizes), len(_SIZES))), strict=False))
    args, kwargs = pytree.tree_unflatten([_resize_tensor(x, others) for x in flat], spec)
    return Sample(args, kwargs)


def _resize_tensor(x: Any, others: Mapping[int, int]) -> Any:
    if not isinstance(x, RandomTensor):
        return x
    shape = tuple(others.get(n, n) for n in x.shape)
    return replace(x, shape=shape, high=others.get(int(x.high), x.high))
