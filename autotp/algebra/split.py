"""How one dim of a tensor is sharded: the arithmetic of local slices.

A dim is a row-major product of extents, or a concatenation (segments) of such products. A sharded
extent gives each rank, within every repetition of the extents before it, consecutive units, as
evenly as possible (7 over 3 ranks: 3, 2, 2). A fused dim is a list of segments, each sharded on its
own; a segment without the axis is replicated.

    column of Llama's gate (dim f, axis f):           Split(1, (segment(1, f, 1),))
    GPT-2's c_attn (dim (H*d + H*d + H*d), axis H):   Split(1, (segment(1, H, d),) * 3)
    head_dim of a per-head fused QKV (H*(d+d+d), d):  Split(H, (segment(1, d, 1),) * 3)

Most splits have one shard per rank. With fewer key-value heads than ranks the group is factored:
q's heads `kv*g` are sharded in both factors, 2 x 4 over 8 ranks, and k's `kv` in 2 shards with 4
copies each:

    q  Extent(kv, 2, stride 4), Extent(g, 4, stride 1), Extent(d)
    k  Extent(kv, 2, stride 4), Extent(d)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


def share(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of `size` units in `parts`; the first ones get one more.

    [share(7, 3, k) for k in range(3)] == [(0, 3), (3, 2), (5, 2)]
    """
    least, more = size // parts, size % parts
    return index * least + min(index, more), least + (index < more)


class Extent(NamedTuple):
    """A factor of a segment: `size` units in `parts`, of which rank r has `r // stride % parts`.

    Constraints:
    - `parts` 0 is one per rank, 1 is replicated.
    - `size` is -1 where it is unknown until run time.
    """

    size: int
    parts: int = 1
    stride: int = 1

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Start and length of the units of `rank` of `ranks`."""
        return share(self.size, self.parts or ranks, self.at(rank, ranks))

    def at(self, rank: int, ranks: int) -> int:
        """The number of the part of `rank` of `ranks`."""
        return rank // self.stride % (self.parts or ranks)

    def is_even(self, ranks: int) -> bool:
        """Whether all parts have one length."""
        return self.size == -1 or self.size % (self.parts or ranks) == 0


@dataclass(frozen=True, slots=True)
class Peers:
    """Ranks that have the same elements: `count` of them from `first` on, `stride` apart."""

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
        """The sharded extents."""
        return tuple(e for e in self.extents if e.parts != 1)

    def length(self) -> int:
        """The number of elements on all ranks together."""
        return prod([e.size for e in self.extents])

    def local_length(self, rank: int, ranks: int) -> int:
        """The number of elements of `rank` of `ranks`."""
        return prod([e.part(rank, ranks)[1] for e in self.extents])

    def spans(self, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """The [start, stop) intervals of `rank`, in order."""
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
    """The split of one dim: `outer` repetitions of the concatenated `segments`.

    - `repeats`: the extents whose product is `outer`, if some are sharded.

    Constraints: at most one size is -1, in a Split of one segment with `outer` 1.
    """

    outer: int
    segments: tuple[Segment, ...]
    repeats: tuple[Extent, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether all sizes are static."""
        return all(e.size != -1 for s in self.segments for e in s.extents)

    def extents(self, piece: Segment) -> tuple[Extent, ...]:
        """All extents of a segment: those of its repetitions, then its own."""
        return (*(self.repeats or (Extent(self.outer),)), *piece.extents)

    def cuts(self, piece: Segment) -> tuple[Extent, ...]:
        """Those extents of a segment that are sharded."""
        return tuple(e for e in self.extents(piece) if e.parts != 1)

    def is_block(self, ranks: int) -> bool:
        """Whether each shard is one contiguous run."""
        if self.outer != 1 or len(self.segments) != 1:
            return False
        extents = self.segments[0].extents
        last = max((k for k, e in enumerate(extents) if e.parts != 1), default=0)
        return all(e.size == (e.parts or ranks) for e in extents[:last])

    def is_even(self, ranks: int) -> bool:
        """Whether all ranks have equally many elements."""
        return all(e.is_even(ranks) for s in self.segments for e in self.cuts(s))

    def is_exact(self, ranks: int) -> bool:
        """Whether each element is on one rank only."""
        return all(self.count_copies(s, ranks) == 1 for s in self.segments)

    def count_copies(self, piece: Segment, ranks: int) -> int:
        """The number of ranks that have each element of a segment."""
        return ranks // prod([e.parts or ranks for e in self.cuts(piece)])

    def find_peers(self, piece: Segment, rank: int, ranks: int) -> Peers:
        """The ranks with the same elements of a segment as `rank`."""
        cuts = self.cuts(piece)
        own = [e.at(rank, ranks) for e in cuts]
        same = [r for r in range(ranks) if [e.at(r, ranks) for e in cuts] == own]
        return Peers(same[0], len(same), same[1] - same[0] if len(same) > 1 else 1)

    def count_shared(self, ranks: int) -> dict[Peers, int]:
        """The number of elements of rank 0 that have copies, by their ranks."""
        found: dict[Peers, int] = {}
        for piece in self.segments:
            peers = self.find_peers(piece, 0, ranks)
            if peers.count > 1:
                length = self.local_outer(0, ranks) * piece.local_length(0, ranks)
                found[peers] = found.get(peers, 0) + length
        return found

    def count_replicated(self) -> int:
        """The number of elements that are replicated on every rank."""
        return self.outer * sum(s.length() for s in self.segments if not self.cuts(s))

    def length(self) -> int:
        """The number of elements of the unsharded dim."""
        return self.outer * sum(s.length() for s in self.segments)

    def local_outer(self, rank: int, ranks: int) -> int:
        """The number of repetitions on `rank` of `ranks`."""
        return prod([e.part(rank, ranks)[1] for e in self.repeats]) if self.repeats else self.outer

    def local_length(self, rank: int, ranks: int) -> int:
        """The number of elements in the shard of `rank` of `ranks`; rank 0 has the most."""
        inner = sum(s.local_length(rank, ranks) for s in self.segments)
        return self.local_outer(rank, ranks) * inner

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """The sorted `[start, stop)` intervals of the unsharded dim in the shard of `rank`.

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
    """`outer * axis * inner` elements sharded along `axis`; replicated if it is 0."""
    if not axis:
        return Segment(_plain(outer * inner))
    return Segment((*_plain(outer), Extent(axis, 0), *_plain(inner)))


def block(size: int) -> Split:
    """The split of a dim of `size` elements into contiguous blocks."""
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
