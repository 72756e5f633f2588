"""How one dim of a tensor is cut along an axis: the arithmetic of local slices.

A dim is a row-major product of axes, or a concatenation (segments) of such products. Cutting axis
`a` of a dim `outer * a * inner` takes, of every one of `outer` runs, the block of this rank. A
fused dim is a list of segments, each cut on its own; a segment without the axis stays whole on
every rank.

    column of Llama's gate (dim f, axis f):           Split(1, (Segment(1, f, 1),))
    GPT-2's c_attn (dim (H*d + H*d + H*d), axis H):   Split(1, (Segment(1, H, d),) * 3)
    head_dim of a per-head fused QKV (H*(d+d+d), d):  Split(H, (Segment(1, d, 1),) * 3)
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Segment", "Split", "block"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of `outer * axis * inner` elements cut along `axis`.

    Constraints:
    - `axis` is 0 when the segment stays whole; it then has `outer * inner` elements.
    - At most one of `outer`, `inner` is -1: unknown until run time, inferred from the tensor; only
      in a Split of a single segment with `outer` 1.
    """

    outer: int
    axis: int
    inner: int

    def length(self, parts: int = 1) -> int:
        """The number of elements of one part of `parts` equal ones (a whole segment counts
        fully).
        """
        return self.outer * (self.axis // parts if self.axis else 1) * self.inner


@dataclass(frozen=True, slots=True)
class Split:
    """The cut of one dim: `outer` repetitions of the concatenated `segments`."""

    outer: int
    segments: tuple[Segment, ...]

    @property
    def is_block(self) -> bool:
        """Whether each rank holds one run of consecutive elements."""
        return self.outer == 1 and len(self.segments) == 1 and self.segments[0].outer == 1

    def encode(self) -> tuple[int, ...]:
        """The flat form that the `autotp` ops take: `(outer, o1, a1, i1, o2, a2, i2, …)`."""
        return (self.outer, *(n for s in self.segments for n in (s.outer, s.axis, s.inner)))

    @staticmethod
    def decode(numbers: Sequence[int]) -> "Split":
        """The Split of which `numbers` is the flat form."""
        triples = zip(*(iter(numbers[1:]),) * 3, strict=True)
        return Split(numbers[0], tuple(Segment(*t) for t in triples))

    def ranges(self, rank: int, parts: int) -> list[tuple[int, int]]:
        """The ordered, merged `[start, stop)` intervals of the whole dim that `rank` holds.

        Constraints: no size is -1.
        """
        spans: list[tuple[int, int]] = []
        start = 0
        for _ in range(self.outer):
            for segment in self.segments:
                spans.extend(_spans(segment, start, rank, parts))
                start += segment.length()
        return _merged(spans)

    def length(self, parts: int = 1) -> int:
        """The number of elements of the dim that one of `parts` ranks holds."""
        return self.outer * sum(s.length(parts) for s in self.segments)


def block(size: int) -> Split:
    """The plain cut of a dim of `size` elements into consecutive blocks."""
    return Split(1, (Segment(1, size, 1),))


def _spans(segment: Segment, start: int, rank: int, parts: int) -> list[tuple[int, int]]:
    if not segment.axis:
        return [(start, start + segment.length())]
    size = segment.axis // parts
    firsts = (
        start + (o * segment.axis + rank * size) * segment.inner for o in range(segment.outer)
    )
    return [(first, first + size * segment.inner) for first in firsts]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
