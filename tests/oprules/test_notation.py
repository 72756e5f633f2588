"""The rule notation: round trips, and good rules beside their broken neighbours."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotp.errors import RuleError
from autotp.oprules.notation import ELLIPSIS, Pattern, Signature, parse_rule
from autotp.oprules.rulebook import load_rulebook

GOOD = [
    "... i, o i, o -> ... o",
    "m o, m i, i o -> m o",
    "... (h g) q e, ... h k e, ... h k v, ... (h g) q k -> ... (h g) q v",
    "v h, ... -> ... h",
    "... -> ..., ...",
    "i, i -> ",
    "b c s0, c 1 k0, c -> b c",
    "t c, t, c -> ",
]


@pytest.mark.parametrize("text", GOOD)
def test_a_rule_prints_as_it_is_written(text: str) -> None:
    assert text == str(parse_rule(text))


@pytest.mark.parametrize("text", GOOD)
def test_spaces_do_not_matter(text: str) -> None:
    loose = text.replace("(", " (  ").replace(",", " ,  ").replace("->", "   ->  ")

    assert parse_rule(text) == parse_rule(loose)


WORDS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=4)


@st.composite
def patterns(draw: st.DrawFn, allowed: list[str] | None = None) -> Pattern:
    """Dims of one to three words, some grouped, some of size 1, the ellipsis first if at all."""
    words = draw(WORDS)
    if allowed is not None:
        words = [w for w in words if w in allowed]
    dims: list[tuple[str, ...]] = [(ELLIPSIS,)] if draw(st.booleans()) else []
    while words:
        count = draw(st.integers(1, min(3, len(words))))
        dims.append(tuple(words[:count]))
        words = words[count:]
    return (*dims, ()) if draw(st.booleans()) else tuple(dims)


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    """A signature whose results have factors of its operands only."""
    operands = tuple(draw(st.lists(patterns(), min_size=1, max_size=3)))
    known = [w for p in operands for d in p for w in d]
    results = tuple(draw(st.lists(patterns(known), min_size=1, max_size=2)))
    if ELLIPSIS not in known:
        results = tuple(tuple(d for d in p if d != (ELLIPSIS,)) for p in results)
    return Signature(operands, results)


@given(signatures())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_signature_round_trips(signature: Signature) -> None:
    assert signature == parse_rule(str(signature))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("... i, o i, o", "has 0 '->', needs exactly 1"),
        ("i -> i -> i", "has 2 '->', needs exactly 1"),
        ("... i, o i -> ... u", "factor 'u' of a result is in no operand"),
        ("i i -> i", "factor 'i' occurs 2 times in 'i i'"),
        ("i, j -> i i", "factor 'i' occurs 2 times in 'i i'"),
        ("i ... -> i", "'...' must come first in 'i ...'"),
        ("(h g -> h", "'(' without ')' in '(h g'"),
        ("h g) -> h", "unexpected ')' in 'h g)'"),
        ("((h) g) -> h", "unexpected '(' in '((h) g)'"),
        ("() h -> h", "unexpected ')' in '() h'"),
        ("h + g -> h", "unexpected '+' in 'h + g'"),
        ("2 h -> h", "unexpected '2' in '2 h'"),
    ],
)
def test_a_broken_rule_is_told_with_its_token(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(f"rule {text!r}: {message}")):
        parse_rule(text)


def test_every_row_round_trips() -> None:
    signatures = [
        row.signature for row in load_rulebook().rows.values() if row.signature is not None
    ]

    assert signatures == [parse_rule(str(s)) for s in signatures]
