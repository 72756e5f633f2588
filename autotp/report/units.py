"""Numbers in readable units: bytes, times and shares with three significant figures.

16_777_216 bytes  16.8 MB        151_300_000 ps  151 µs        0.0042  0.42 %
"""

_BYTES = ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_PICOSECONDS = ((10**12, "s"), (10**9, "ms"), (10**6, "µs"), (10**3, "ns"))


def format_bytes(number: int) -> str:
    """Format bytes in decimal units, e.g. `16.8 MB`; exact below one kilobyte."""
    return _scale(number, _BYTES, "B")


def format_time(picoseconds: int) -> str:
    """Format a time in its largest fitting unit, e.g. `7.20 ms`."""
    return _scale(picoseconds, _PICOSECONDS, "ps")


def format_count(number: int) -> str:
    """Format an integer with thousands separators, e.g. `14,336`."""
    return f"{number:,}"


def format_share(part: float, whole: float) -> str:
    """Format `part / whole` in per cent, e.g. `12.5 %`; `-` if `whole` is 0."""
    if not whole:
        return "-"
    share = 100 * part / whole
    return "< 0.01 %" if 0 < share < 0.01 else f"{_round_to_three(share)} %"


def _scale(number: int, units: tuple[tuple[int, str], ...], least: str) -> str:
    for size, unit in units:
        # a value that would round to 1000 of a unit is shown in the next one
        if number * 2000 >= size * 1999:
            return f"{_round_to_three(number / size)} {unit}"
    return f"{number} {least}"


def _round_to_three(value: float) -> str:
    if value == 0:
        return "0"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"
