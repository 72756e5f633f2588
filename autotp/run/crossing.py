"""Two cuts of one dim at once: what an all-to-all needs to move from one to the other.

One idea: if two axes are factors of one product, a part along the first still holds all of the
second, so every rank can send every other its share. If they overlap, no single all-to-all can.
"""

from autotp.core.split import Segment, Split
from autotp.run.blocks import fitted

__all__ = ["crossed"]


def crossed(cut: Split, to: Split, size: int, dim: int, parts: int) -> tuple[Split, Split]:
    """`cut` as it lies in a part of `to`, and `to` as it lies in a part of `cut`.

        crossed(Split(1, (Segment(1, 4, 6),)), Split(4, (Segment(1, 6, 1),)), 24, 0, 2)
        # Split(1, (Segment(1, 4, 3),)), Split(2, (Segment(1, 6, 1),))

    Constraints:
    - `size` is that of the whole dim.
    - The axes are distinct factors: one lies wholly inside or wholly outside the other, in the dim
      or in each of its segments; otherwise ValueError.
    """
    cut, to = _plain(fitted(cut, size, dim)), _plain(fitted(to, size, dim))
    pair = _cut_outside(cut, to, parts) or _swapped(_cut_outside(to, cut, parts))
    pair = pair or _by_segment(cut, to, parts)
    if pair is None:
        raise ValueError(
            f"dim {dim} of size {size} cannot go from {cut} to {to} over {parts} ranks by one "
            "all-to-all, since the axes overlap; convert to R first and then to S"
        )
    return pair


def _plain(split: Split) -> Split:
    """`split` with all repetitions of a lone segment counted in the Split."""
    segment, *others = split.segments
    if others:
        return split
    return Split(split.outer * segment.outer, (Segment(1, segment.axis, segment.inner),))


def _swapped(pair: tuple[Split, Split] | None) -> tuple[Split, Split] | None:
    return None if pair is None else (pair[1], pair[0])


def _cut_outside(cut: Split, to: Split, parts: int) -> tuple[Split, Split] | None:
    first, *others = cut.segments
    if others or not first.axis or to.outer % (cut.outer * first.axis):
        return None
    inner = to.length(parts) // (cut.outer * first.axis)
    local_cut = Split(cut.outer, (Segment(1, first.axis, inner),))
    return local_cut, Split(to.outer // parts, to.segments)


def _by_segment(cut: Split, to: Split, parts: int) -> tuple[Split, Split] | None:
    lengths = [s.length() for s in cut.segments]
    if cut.outer != to.outer or lengths != [s.length() for s in to.segments]:
        return None
    segments = zip(cut.segments, to.segments, strict=True)
    crossings = [_crossed_segment(first, second, parts) for first, second in segments]
    found = [pair for pair in crossings if pair is not None]
    if len(found) < len(crossings):
        return None
    return Split(cut.outer, tuple(p[0] for p in found)), Split(to.outer, tuple(p[1] for p in found))


def _crossed_segment(cut: Segment, to: Segment, parts: int) -> tuple[Segment, Segment] | None:
    if not cut.axis:
        return Segment(1, 0, to.length(parts)), to
    if not to.axis:
        return cut, Segment(1, 0, cut.length(parts))
    if to.outer % (cut.outer * cut.axis) == 0:
        return _narrower(cut, parts), Segment(to.outer // parts, to.axis, to.inner)
    if cut.outer % (to.outer * to.axis) == 0:
        return Segment(cut.outer // parts, cut.axis, cut.inner), _narrower(to, parts)
    return None


def _narrower(segment: Segment, parts: int) -> Segment:
    return Segment(segment.outer, segment.axis, segment.inner // parts)
