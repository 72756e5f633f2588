"""How one dim of a tensor is cut: the arithmetic of local slices.

A dim is a row-major product of extents, or a concatenation (segments) of such products. Cutting an
extent takes, of every run of what stands before it, the units of this rank: whole ones, as evenly
as they go (7 over 3 ranks: 3, 2, 2). A fused dim is a list of segments, each cut on its own; one
that has nothing to cut stays whole on every rank.

    column of Llama's gate (dim f, axis f):           Split(1, (segment(1, f, 1),))
    GPT-2's c_attn (dim (H*d + H*d + H*d), axis H):   Split(1, (segment(1, H, d),) * 3)
    head_dim of a per-head fused QKV (H*(d+d+d), d):  Split(H, (segment(1, d, 1),) * 3)

Most cuts have one part a rank. With fewer key-value heads than ranks the group is factored: q's
heads `kv*g` are cut in both factors, 2 x 4 parts over 8 ranks, and k's `kv` in 2 parts of which 4
ranks hold a copy each:

    q  Extent(kv, 2, stride 4), Extent(g, 4, stride 1), Extent(d)
    k  Extent(kv, 2, stride 4), Extent(d)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

__all__ = ["Extent", "Peers", "Segment", "Split", "block", "segment", "share"]


def share(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of `size` units cut into `parts`; the first get one more.

    [share(7, 3, k) for k in range(3)] == [(0, 3), (3, 2), (5, 2)]
    """
    least, more = size // parts, size % parts
    return index * least + min(index, more), least + (index < more)


class Extent(NamedTuple):
    """A factor of a segment: `size` units in `parts`, of which rank r holds `r // stride % parts`.

    Constraints:
    - `parts` 0 is one part a rank, 1 is whole on every rank.
    - `size` is -1 where it is unknown until run time.
    """

    size: int
    parts: int = 1
    stride: int = 1

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Start and length of what `rank` of `ranks` holds."""
        return share(self.size, self.parts or ranks, self.at(rank, ranks))

    def at(self, rank: int, ranks: int) -> int:
        """Which part `rank` of `ranks` holds."""
        return rank // self.stride % (self.parts or ranks)

    def is_even(self, ranks: int) -> bool:
        """Whether all parts have one length."""
        return self.size == -1 or self.size % (self.parts or ranks) == 0


@dataclass(frozen=True, slots=True)
class Peers:
    """Ranks that hold the same: `count` of them from `first` on, `stride` apart."""

    first: int
    count: int
    stride: int

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.first, self.first + self.count * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements: the row-major product of `extents`."""

    extents: tuple[Extent, ...]

    @property
    def cuts(self) -> tuple[Extent, ...]:
        """The extents that are cut."""
        return tuple(e for e in self.extents if e.parts != 1)

    def length(self) -> int:
        """The number of elements in all."""
        return prod([e.size for e in self.extents])

    def local_length(self, rank: int, ranks: int) -> int:
        """The number of elements that `rank` of `ranks` holds."""
        return prod([e.part(rank, ranks)[1] for e in self.extents])

    def spans(self, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """The [start, stop) intervals that `rank` holds, in order."""
        last = max((k for k, e in enumerate(self.extents) if e.parts != 1), default=-1)
        starts, run = [0], self.length()
        for k, extent in enumerate(self.extents[: last + 1]):
            inner = run // extent.size
            first, count = extent.part(rank, ranks)
            if k == last:
                return ((s + first * inner, s + (first + count) * inner) for s in starts)
            starts = [s + unit * inner for s in starts for unit in range(first, first + count)]
            run = inner
        return iter([(0, run)])


@dataclass(frozen=True, slots=True)
class Split:
    """The cut of one dim: `outer` repetitions of the concatenated `segments`.

    - `repeats`: the extents of which `outer` is the product, where some are cut as well.

    Constraints: at most one size is -1, in a Split of one segment with `outer` 1.
    """

    outer: int
    segments: tuple[Segment, ...]
    repeats: tuple[Extent, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether no size is left to run time."""
        return all(e.size != -1 for s in self.segments for e in s.extents)

    def extents(self, piece: Segment) -> tuple[Extent, ...]:
        """All extents of a segment: those of its repetitions, then its own."""
        return (*(self.repeats or (Extent(self.outer),)), *piece.extents)

    def cuts(self, piece: Segment) -> tuple[Extent, ...]:
        """Those of them that are cut."""
        return tuple(e for e in self.extents(piece) if e.parts != 1)

    def is_block(self, ranks: int) -> bool:
        """Whether each rank holds one run of consecutive elements."""
        if self.outer != 1 or len(self.segments) != 1:
            return False
        extents = self.segments[0].extents
        last = max((k for k, e in enumerate(extents) if e.parts != 1), default=0)
        return all(e.size == (e.parts or ranks) for e in extents[:last])

    def is_even(self, ranks: int) -> bool:
        """Whether all ranks hold equally many elements."""
        return all(e.is_even(ranks) for s in self.segments for e in self.cuts(s))

    def is_exact(self, ranks: int) -> bool:
        """Whether each element is held by one rank only."""
        return all(self.count_copies(s, ranks) == 1 for s in self.segments)

    def count_copies(self, piece: Segment, ranks: int) -> int:
        """How many ranks hold each element of a segment."""
        return ranks // prod([e.parts or ranks for e in self.cuts(piece)])

    def find_peers(self, piece: Segment, rank: int, ranks: int) -> Peers:
        """The ranks that hold what `rank` holds of a segment."""
        cuts = self.cuts(piece)
        own = [e.at(rank, ranks) for e in cuts]
        same = [r for r in range(ranks) if [e.at(r, ranks) for e in cuts] == own]
        return Peers(same[0], len(same), same[1] - same[0] if len(same) > 1 else 1)

    def count_shared(self, ranks: int) -> dict[Peers, int]:
        """Of what rank 0 holds, the elements that it shares, by the ranks that hold them too."""
        found: dict[Peers, int] = {}
        for piece in self.segments:
            peers = self.find_peers(piece, 0, ranks)
            if peers.count > 1:
                length = self.local_outer(0, ranks) * piece.local_length(0, ranks)
                found[peers] = found.get(peers, 0) + length
        return found

    def count_replicated(self) -> int:
        """The number of elements that every rank holds."""
        return self.outer * sum(s.length() for s in self.segments if not self.cuts(s))

    def length(self) -> int:
        """The number of elements of the whole dim."""
        return self.outer * sum(s.length() for s in self.segments)

    def local_outer(self, rank: int, ranks: int) -> int:
        """The repetitions that `rank` of `ranks` holds."""
        return prod([e.part(rank, ranks)[1] for e in self.repeats]) if self.repeats else self.outer

    def local_length(self, rank: int, ranks: int) -> int:
        """The number of elements of the dim that `rank` of `ranks` holds; rank 0 has the most."""
        inner = sum(s.local_length(rank, ranks) for s in self.segments)
        return self.local_outer(rank, ranks) * inner

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """The ordered, merged `[start, stop)` intervals of the whole dim that `rank` holds.

        Constraints: no size is -1.
        """
        spans: list[tuple[int, int]] = []
        inner = self.length() // self.outer
        for first, last in Segment(self.repeats or (Extent(self.outer),)).spans(rank, ranks):
            for start in range(first * inner, last * inner, inner):
                at = start
                for piece in self.segments:
                    spans.extend((at + a, at + b) for a, b in piece.spans(rank, ranks))
                    at += piece.length()
        return _merge_spans(spans)

    def encode(self) -> tuple[int, ...]:
        """The flat form that the `autotp` ops take.

        `(outer, n0, size, parts, stride, …, n1, size, parts, stride, …, n2, …)`: the count of the
        repetitions' extents and those, then the same for each segment.
        """
        flat = [self.outer]
        for extents in (self.repeats, *(s.extents for s in self.segments)):
            flat += [len(extents), *(n for e in extents for n in e)]
        return tuple(flat)

    @staticmethod
    def decode(numbers: Sequence[int]) -> "Split":
        """The Split of which `numbers` is the flat form."""
        rows: list[tuple[Extent, ...]] = []
        at = 1
        while at < len(numbers):
            stop = at + 1 + 3 * numbers[at]
            triples = zip(*(iter(numbers[at + 1 : stop]),) * 3, strict=True)
            rows.append(tuple(Extent(*t) for t in triples))
            at = stop
        repeats, *segments = rows or [()]
        return Split(numbers[0], tuple(Segment(extents) for extents in segments), repeats)


def segment(outer: int, axis: int, inner: int) -> Segment:
    """`outer * axis * inner` elements cut along `axis`, one part a rank; whole if `axis` is 0."""
    if not axis:
        return Segment(_plain(outer * inner))
    return Segment((*_plain(outer), Extent(axis, 0), *_plain(inner)))


def block(size: int) -> Split:
    """The plain cut of a dim of `size` elements into consecutive blocks."""
    return Split(1, (segment(1, size, 1),))


def _plain(size: int) -> tuple[Extent, ...]:
    return () if size == 1 else (Extent(size),)


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if stop == start:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
