"""Finds the rule of an op without a row by running it on shards of random tensors.

A rule that holds for several draws, sizes and numbers of ranks, forward and backward, becomes a row
like those of rules/. An op that is unsuitable, or without such a rule, needs replicated operands,
with the reason. All seeds are fixed, and effort is counted, not timed: all ranks find the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from string import ascii_lowercase

import torch

from autotp.oprules.derive.call import Binding, Call
from autotp.oprules.discover.call import OpaqueCall
from autotp.oprules.discover.factors import FoundFactor, find_factors, find_linear_sets, find_ties
from autotp.oprules.discover.joins import DimSplit
from autotp.oprules.discover.sizes import FAMILIES, list_sizings
from autotp.oprules.discover.trial import DRAWS, Setting, Trial
from autotp.oprules.notation import Pattern, Signature
from autotp.oprules.rule import Discovery, NodeRule, Row, Slot

_FEWEST = 2  # draws that an op must take at the first sizes
CACHE: dict[tuple[object, ...], Discovery] = {}


def discover_rule(call: OpaqueCall, *, gradients: bool) -> Discovery:
    """The rule found by running the op of `call`, at most once per process and call.

    - `gradients`: the rule must hold for the backward pass too.
    """
    key = (*call.key, gradients)
    if key not in CACHE:
        devices = list(range(torch.cuda.device_count())) if call.device == "cuda" else []
        with torch.random.fork_rng(devices), torch.inference_mode(False):
            CACHE[key] = _search_rule(call, gradients)
    return CACHE[key]


def bind_row(row: Row, call: Call) -> NodeRule | None:
    """The rule of one node by a discovered row, which numbers the present operands."""
    assert row.signature is not None
    binding, patterns = Binding(call, row.signature), row.signature.operands
    groups = [sum(len(dim) > 1 for dim in pattern) for pattern in patterns]
    for k in sorted(range(len(patterns)), key=lambda k: groups[k]):
        if not binding.bind_operand(patterns[k], k):  # groups last: they need the sizes of others
            return None
    return binding.build_rule()


def _search_rule(call: OpaqueCall, gradients: bool) -> Discovery:
    op = str(call.target)
    try:
        families = _run_trials(call, gradients)
        if isinstance(families, str):
            return Discovery(op, None, families)
        rows = _build_rows(op, families, find_factors(call, families), find_linear_sets(families))
    except _OverlapError as error:
        return Discovery(op, None, str(error))
    if not rows or any(row != rows[0] for row in rows):
        return Discovery(op, None, "no way to shard it, of those tried, gives the right results")
    return Discovery(op, rows[0])


def _run_trials(call: OpaqueCall, gradients: bool) -> list[list[Trial]] | str:
    """For each family of sizes the usable trials, or why there are none.

    In double precision on the CPU if the op accepts it, otherwise closer to the model's own call.
    """
    reasons: list[str] = []
    for device in dict.fromkeys(("cpu", "cuda" if call.device == "cuda" else "cpu")):
        for dtype in (torch.float64, torch.float32, None):
            setting = Setting(device, dtype, gradients)
            families = [_run_family(call, first, setting, reasons) for first in FAMILIES]
            if all(families):
                return families
    return reasons[0]


def _run_family(call: OpaqueCall, first: int, setting: Setting, reasons: list[str]) -> list[Trial]:
    """The trials at the smallest sizes of one family that the op accepts; adds to `reasons`."""
    reason = "its sizes are tied to an argument, and too large to try"
    for values in list_sizings(call, first):
        trials = [Trial(call, values, setting, k) for k in range(len(DRAWS))]
        unusable = {t.number: _explain_trial(t) for t in trials}
        usable = [t for t in trials if not unusable[t.number]]
        if len(usable) >= _FEWEST:
            return usable
        reason = next(r for r in unusable.values() if r)
    reasons.append(reason)
    return []


def _explain_trial(trial: Trial) -> str:
    try:
        return trial.find_obstacle()
    except Exception as error:  # noqa: BLE001  whatever an op does with numbers that we made up
        lines = str(error).strip().splitlines() or [""]
        return f"it fails on random numbers: {type(error).__name__}: {lines[0][:120]}"


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────

_FactorKey = tuple[int, ...]
"""A factor without a name: (number,) of one found, or (operand, dim, place) of another."""


def _build_rows(
    op: str,
    families: Sequence[Sequence[Trial]],
    found: Sequence[FoundFactor],
    linear: Sequence[frozenset[int]],
) -> list[Row]:
    """The row by each family of sizes; none if no rule holds."""
    joined = [f.joined[0] for f in found if f.joined[0].kind != "pass"]
    kept = [f for f in found if f.joined[0].kind == "pass" or _combines_alike(f, joined)]
    if not (kept or linear):
        return []
    tied = find_ties(families[0][0], kept)
    return [_RowBuilder(t[0], kept, at, tied).row(op, linear) for at, t in enumerate(families)]


def _combines_alike(factor: FoundFactor, joined: Sequence[object]) -> bool:
    """Whether a contracted factor combines like the first one, as a row requires."""
    return factor.joined[0] == joined[0]


class _OverlapError(Exception):
    """Two factors claim the same elements of a dim."""


class _RowBuilder:
    """Builds a row from factors, at the sizes of one family."""

    def __init__(
        self, trial: Trial, found: Sequence[FoundFactor], family: int, tied: Mapping[Slot, Slot]
    ) -> None:
        self.trial, self.call, self.found, self.family = trial, trial.call, found, family
        self.tied = tied
        self.unshardable: set[_FactorKey] = set()
        self.names: dict[_FactorKey, str] = {}

    def row(self, op: str, linear: Sequence[frozenset[int]]) -> Row:
        """The row."""
        operands = [self._operand(k) for k in range(len(self.call.shapes))]
        results = [self._result(r, operands) for r in range(len(self.call.results))]
        signature = Signature(
            tuple(self._name_pattern(p) for p in operands),
            tuple(self._name_pattern(p) for p in results),
        )
        contracted = {
            self.names[(n,)]: f.joined[0].kind
            for n, f in enumerate(self.found)
            if f.joined[0].kind != "pass"
        }
        return Row(
            op=op,
            signature=signature,
            reduce=contracted,
            whole=frozenset(self.names[w] for w in self.unshardable),
            linear=tuple(linear),
            bias=frozenset(k for f in self.found for k in f.joined[0].bias),
            note="found by running it",
        )

    def _operand(self, k: int) -> list[list[_FactorKey]]:
        cuts = {n: f.cuts[self.family].get(k) for n, f in enumerate(self.found)}
        return [self._dim((k, d), cuts, s) for d, s in enumerate(self.trial.operands[k].shape)]

    def _result(self, r: int, operands: Sequence[list[list[_FactorKey]]]) -> list[list[_FactorKey]]:
        joins = {n: f.joined[self.family] for n, f in enumerate(self.found)}
        cuts = {n: j.cuts[r] for n, j in joins.items() if j.kind == "pass"}
        made = list[list[_FactorKey]]()
        for d, size in enumerate(self.trial.results[r].shape):
            keys = self._dim((~r, d), cuts, size)
            same = self._same(r, d, operands)
            if same is not None and len(keys) == 1 and keys[0] in self.unshardable:
                self.unshardable.discard(keys[0])
                keys = [same]
            made.append(keys)
        return made

    def _dim(self, slot: Slot, cuts: Mapping[int, DimSplit | None], size: int) -> list[_FactorKey]:
        """The factors of one dim, major first; what no factor found covers is unshardable."""
        here = sorted((c.outer, c.size, n) for n, c in cuts.items() if c and c.dim == slot[1])
        keys, before = list[_FactorKey](), 1
        for outer, length, number in here:
            if outer % before:
                raise _OverlapError("factors of its results overlap")
            keys += self._gap(slot, before, outer)
            keys.append((number,))
            before = outer * length
        return keys + self._gap(slot, before, size)

    def _gap(self, slot: Slot, before: int, after: int) -> list[_FactorKey]:
        if before == after:
            return []
        key = (*self.tied.get(slot, slot), int(before > 1))
        self.unshardable.add(key)
        return [key]

    def _same(
        self, r: int, d: int, operands: Sequence[list[list[_FactorKey]]]
    ) -> _FactorKey | None:
        """The unshardable dim of an operand that a result's dim is, going by its size and place."""
        size, behind = self.call.results[r][d], len(self.call.results[r]) - d
        for k, dims in enumerate(operands):
            at = len(dims) - behind
            if at >= 0 and self.call.shapes[k][at] == size and len(dims[at]) == 1:
                return dims[at][0] if dims[at][0] in self.unshardable else None
        return None

    def _name_pattern(self, dims: Sequence[Sequence[_FactorKey]]) -> Pattern:
        return tuple(tuple(self._name(w) for w in keys) for keys in dims)

    def _name(self, key: _FactorKey) -> str:
        if key not in self.names:
            self.names[key] = next(n for n in _generate_names() if n not in self.names.values())
        return self.names[key]


def _generate_names() -> Iterator[str]:
    yield from ascii_lowercase
    yield from (f"a{k}" for k in count())
