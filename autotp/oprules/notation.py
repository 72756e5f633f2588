"""The rule notation `"... i, o i, o -> ... o"`: einsum with named factors, groups and broadcasting.

    rule     = operands "->" results          operands = dims ("," dims)*
    dims     = (factor | "(" factor+ ")" | "..." | "1")*
    factor   = a name; the same name is the same factor wherever it occurs

- `...` matches any number of leading dims, aligned from the right and broadcast.
- `( )` groups the factors of one dim, major to minor.
- `1` is a dim of size 1; an empty list of dims is a scalar.
- An operand with fewer dims than its pattern is aligned from the right (a bias of one dim).
- A dim of size 1 in an operand is broadcast where the factor is larger.
"""

import re
from dataclasses import dataclass

from autotp.errors import RuleError

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|1|\(|\)|\S)")

Pattern = tuple[tuple[str, ...], ...]
"""The dims of a tensor, each a tuple of factor names; the ellipsis is the dim `("...",)`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A parsed rule.

    Constraints:
    - A factor occurs at most once in each operand and each result.
    - A factor of a result occurs in some operand.
    """

    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]

    def __str__(self) -> str:
        """The rule in the notation."""
        sides = (
            ", ".join(_format_pattern(p) for p in side) for side in (self.operands, self.results)
        )
        return " -> ".join(sides)


def parse_rule(text: str) -> Signature:
    """The signature that `text` describes; RuleError shows the rule and what is wrong with it."""
    try:
        return _parse(text)
    except RuleError as error:
        raise RuleError(f"rule {text!r}: {error}") from None


def _parse(text: str) -> Signature:
    if text.count("->") != 1:
        raise RuleError(f"has {text.count('->')} '->', needs exactly 1")
    left, right = text.split("->")
    operands = tuple(_parse_dims(part) for part in left.split(","))
    results = tuple(_parse_dims(part) for part in right.split(","))
    known = {name for pattern in operands for dim in pattern for name in dim}
    for pattern in results:
        for name in (n for dim in pattern for n in dim if n not in known):
            raise RuleError(f"factor {name!r} of a result is in no operand")
    return Signature(operands, results)


def _parse_dims(text: str) -> Pattern:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            dims.append(tuple(group))
            group = None
        elif token in "()" or not (token in (ELLIPSIS, "1") or token.isidentifier()):
            raise RuleError(f"unexpected {token!r} in {text.strip()!r}")
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None:
        raise RuleError(f"'(' without ')' in {text.strip()!r}")
    return _check_dims(tuple(dims), text.strip())


def _check_dims(dims: Pattern, text: str) -> Pattern:
    names = [name for dim in dims for name in dim]
    for name in names:
        if names.count(name) > 1:
            raise RuleError(f"factor {name!r} occurs {names.count(name)} times in {text!r}")
    if (ELLIPSIS,) in dims[1:]:
        raise RuleError(f"'...' must come first in {text!r}")
    return dims


def _format_pattern(pattern: Pattern) -> str:
    return " ".join(_format_dim(dim) for dim in pattern)


def _format_dim(dim: tuple[str, ...]) -> str:
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1"
