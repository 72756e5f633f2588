"""Every row of rules/ is proven by running its op on shards; a planted wrong row is caught."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)

from autotp.algebra.partition import UNCUT
from autotp.oprules.notation import parse_rule
from autotp.oprules.rule import Row
from autotp.oprules.rulebook import Rulebook, load_rulebook
from autotp.verification.rules.cases import Sample, build_cases, call, real
from autotp.verification.rules.laws import find_violations, list_strategies
from autotp.verification.rules.written import parse_sample

RULES = load_rulebook()
SAMPLES = {op: tuple(map(parse_sample, row.samples)) for op, row in RULES.rows.items()}
X = real(6, 2, 12)


def broken(op: str, samples: tuple[Sample, ...], rules: Rulebook) -> Iterator[str]:
    return (
        f"{op}, sample {number}, constant {case.program.inputs}, {reason}"
        for number, sample in enumerate(samples)
        for case in build_cases(op, sample, rules)
        for tp in (2, 3, 4)
        for reason in find_violations(case, tp)
    )


def planted(op: str, **changes: object) -> Rulebook:
    """The rulebook with one row changed, or added."""
    row = replace(RULES.rows.get(op, Row(op, None)), **changes)
    return Rulebook({**RULES.rows, op: row}, RULES.roles)


def test_every_op_has_sample_calls() -> None:
    assert [] == [op for op, samples in SAMPLES.items() if not samples]


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(RULES.rows))
def test_shards_joined_by_placement_are_the_whole(op: str) -> None:
    assert [] == list(broken(op, SAMPLES[op], RULES))


@pytest.mark.parametrize(
    "op",
    sorted(op for op, row in RULES.rows.items() if row.derive != "unshardable" and not row.loss),
)
def test_some_sample_of_every_row_can_be_split(op: str) -> None:
    partitions = {
        strategy.partition
        for sample in SAMPLES[op]
        for case in build_cases(op, sample, RULES)
        for strategy in list_strategies(case, 2, training=True)
    }

    assert partitions > {UNCUT}


def test_dropout_drops_the_same_elements_on_every_rank_that_holds_a_summand() -> None:
    sample = call(X, 0.5, True)
    case = next(build_cases("aten.dropout.default", sample, RULES))
    whole = [s for s in list_strategies(case, 2, training=True) if not s.partition.parts]

    assert ["replicated", "partial:0", "shared"] == [s.label for s in whole]
    assert [] == find_violations(case, 2, only=whole)


# ── twins: wrong rows that the law must catch ────────────────────────────────────────────────────

WRONG = {
    "softmax passes its dim": ("aten.softmax.int", {"signature": parse_rule("... -> ...")}),
    "mean without rescale": (
        "aten.mean.dim",
        {"options": {"kind": "sum"}, "emit": ""},
    ),
    "relu is linear": ("aten.relu.default", {"linear": (frozenset({0}),)}),
    "a product of two partial sums": ("aten.mul.Tensor", {"linear": (frozenset({0, 1}),)}),
    "a sum of one partial operand": ("aten.add.Tensor", {"linear": (frozenset({0}),)}),
    "a bias on every rank": ("aten.linear.default", {"bias": frozenset[int]()}),
    "amax joined by a sum": ("aten.amax.default", {"options": {"kind": "sum"}}),
    "lookup without a mask": ("aten.embedding.default", {"emit": ""}),
    "view with whole sizes": ("aten.view.default", {"emit": ""}),
    "a sorted dim passes": ("aten.sort.default", {"signature": parse_rule("... -> ..., ...")}),
    "a cumulated dim passes": ("aten.cumsum.default", {"signature": parse_rule("... -> ...")}),
    "queries see all keys": (
        "aten.scaled_dot_product_attention.default",
        {"whole": frozenset({"e", "q"})},
    ),
    "t instead of its operand": (
        "aten.t.default",
        {"signature": parse_rule("a b -> a b"), "derive": ""},
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_row_is_caught(fault: str) -> None:
    op, changes = WRONG[fault]

    assert next(broken(op, SAMPLES[op], planted(op, **changes)), None)


def test_a_literal_added_on_every_rank_is_no_linear_set() -> None:
    (case,) = build_cases("aten.add.Tensor", call(X, 1.0), RULES)

    assert "partial:0" not in [s.label for s in list_strategies(case, 2, training=True)]
