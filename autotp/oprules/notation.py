"""The rule notation: `"... i, o i, o -> ... o"`, einsum's letters with words, groups and
broadcasting.

    rule     = operands "->" results          operands = dims ("," dims)*
    dims     = (factor | "(" factor+ ")" | "..." | "1")*
    factor   = a word; the same word is the same factor wherever it stands

- `...` stands for any number of leading dims, aligned from the right and broadcast.
- `( )` groups the factors of one dim, major to minor.
- `1` is a dim of size 1; an empty list of dims is a scalar.
- An operand with fewer dims than its pattern is aligned from the right (a bias of one dim).
- An operand's dim of size 1 may stand where a factor is larger: it is broadcast.
"""

import re
from dataclasses import dataclass

from autotp.errors import RuleError

__all__ = ["ELLIPSIS", "Pattern", "Signature", "parse_rule"]

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|1|\(|\)|\S)")

Pattern = tuple[tuple[str, ...], ...]
"""One tensor's dims, each a tuple of factor words; the ellipsis is the dim `("...",)`."""


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
        """The rule in the notation it was read from."""
        sides = (
            ", ".join(_format_pattern(p) for p in side) for side in (self.operands, self.results)
        )
        return " -> ".join(sides)


def parse_rule(text: str) -> Signature:
    """The signature that `text` writes; RuleError says which token is wrong and shows the rule."""
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
    known = {word for pattern in operands for dim in pattern for word in dim}
    for pattern in results:
        for word in (w for dim in pattern for w in dim if w not in known):
            raise RuleError(f"factor {word!r} of a result is in no operand")
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
    words = [word for dim in dims for word in dim]
    for word in words:
        if words.count(word) > 1:
            raise RuleError(f"factor {word!r} stands {words.count(word)} times in {text!r}")
    if (ELLIPSIS,) in dims[1:]:
        raise RuleError(f"'...' must come first in {text!r}")
    return dims


def _format_pattern(pattern: Pattern) -> str:
    return " ".join(_format_dim(dim) for dim in pattern)


def _format_dim(dim: tuple[str, ...]) -> str:
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1"
