"""Chooses small sizes for trials of an op without a row.

Equal sizes remain equal and divisors remain divisors, so that the op's requirements still hold:
query heads are a multiple of key-value heads, a fused dim is a multiple of its segments. A size
that is tied to an argument is kept, or replaced by another multiple of the argument.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm, prod

from autotp.oprules.discover.call import OpaqueCall, Values, evaluate_size

FAMILIES = (4, 6)
"""The smallest size of each family: what holds must hold in all of them."""

_LARGEST = 1 << 18  # elements of a trial's operands
_SYMBOLS = {4: (5, 7, 9, 11, 13), 6: (7, 5, 11, 9, 17)}  # odd, unlike multiples of the sizes


def list_sizings(call: OpaqueCall, first: int) -> Iterator[Values]:
    """Numbers for the sizes of `call`, the smallest first, without those of too many elements.

    - `first`: the family, by its smallest size.
    """
    sizes = call.sizes()
    statics = sorted({s.coefficient for s in sizes if not s.symbols})
    symbols = dict.fromkeys(name for s in sizes for name in s.symbols)
    numbers = [*_SYMBOLS[first], *range(19, 19 + 2 * len(symbols), 2)]
    named = dict(zip(symbols, numbers, strict=False))
    seen: list[Values] = []
    for fixed in _keep_numbers(statics, call.numbers(), first):
        small = _shrink(statics, first, fixed)
        values = {
            s: prod(named[n] for n in s.symbols) * (s.coefficient if s.symbols else 1)
            if s.symbols
            else small[s.coefficient]
            for s in sizes
        }
        if values not in seen and _count_elements(call, values) <= _LARGEST:
            seen.append(values)
            yield values


def _keep_numbers(
    statics: Sequence[int], numbers: Sequence[int], first: int
) -> Iterator[dict[int, int]]:
    """Which sizes are kept or fixed: first none, finally all."""
    yield {}
    equal = {s: s for s in statics if s in numbers}
    yield equal
    whole = [n for n in numbers if all(s % n == 0 for s in equal)]
    tied = [s for s in statics if any(s % n == 0 for n in whole)]
    factors = {s: max(n for n in whole if s % n == 0) for s in tied}
    yield {s: n * (first // 2 + k) for k, (s, n) in enumerate(factors.items())} | equal
    yield {s: s for s in statics if any(s % n == 0 or n % s == 0 for n in numbers)}
    yield {s: s for s in statics}


def _shrink(statics: Sequence[int], first: int, fixed: Mapping[int, int]) -> dict[int, int]:
    """A small number for each size, in the same order and with the same divisors."""
    out: dict[int, int] = {}
    last = first - 1
    for size in statics:
        if size in fixed:
            out[size] = fixed[size]
            continue
        step = lcm(*(out[s] for s in out if size % s == 0))
        value = max(1, last // step + 1) * step
        while value in out.values():
            value += step
        out[size] = last = value
    return out


def _count_elements(call: OpaqueCall, values: Values) -> int:
    return sum(prod(evaluate_size(s, values) for s in shape) for shape in call.shapes)
