"""Sizes of dims: monomials, i.e. an integer coefficient times symbols (`8*s0`).

Sizes are only compared for equality and divided; symbolic sizes are never ordered. Anything
that is not a monomial (`s0 + 3`) is one opaque symbol.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Size(NamedTuple):
    """`coefficient` times the product of `symbols` (sorted, repeats allowed)."""

    coefficient: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: object) -> "Size":  # type: ignore[override]
        """The product of two sizes."""
        assert isinstance(other, Size)
        return Size(
            self.coefficient * other.coefficient, tuple(sorted(self.symbols + other.symbols))
        )

    def over(self, other: "Size") -> "Size | None":
        """The quotient if `other` divides this size, else None."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return None
            left.remove(symbol)
        return Size(self.coefficient // other.coefficient, tuple(left))

    @property
    def static(self) -> int | None:
        """The integer if the size has no symbol, else None."""
        return None if self.symbols else self.coefficient

    def __str__(self) -> str:
        """The size as `8*s0`."""
        parts = [] if self.coefficient == 1 and self.symbols else [str(self.coefficient)]
        return "*".join([*parts, *self.symbols])


ONE = Size(1)


def product(sizes: Iterable[Size]) -> Size:
    """The product of `sizes`; 1 if there are none."""
    total = ONE
    for size in sizes:
        total = total * size
    return total
