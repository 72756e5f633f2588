"""The dim algebra: every dim of every value is an expression over axes, refined op by op.

A dim is a product of atoms, major to minor; an atom is a leaf, or stands for a product of atoms, or
for a sum (concatenated segments, each a dim of its own):

    Llama's q output       kv*g*d
    GPT-2's fused qkv      (H*d + H*d + H*d)
    Falcon's fused qkv     (H + 1 + 1)*d

A `Forest` holds the atoms in union-find trees, so a refinement found late (a view of o_proj's
input) reaches every dim that uses the atom (q_proj's output). Leaves that are
united are one *axis*.

Constraints:
- Atoms of size 1 are dropped: a dim of size 1 is the empty product.
- Refinement never orders symbolic sizes; what cannot be aligned is reported, never guessed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from math import prod
from typing import TypeAlias

from autotp.algebra.grouped_rows import Groups
from autotp.algebra.partition import Partition
from autotp.algebra.size import ONE, Size, product
from autotp.algebra.split import Extent, Segment, Split


@dataclass(slots=True, eq=False)
class Atom:
    """A node of the forest. `parts` is its product, `segments` its sum; a leaf has neither.

    `data` marks a size that belongs to the data (batch, sequence): never split over the group;
    `groups` describes grouped rows, which a grouped product reads.
    """

    number: int
    size: Size
    parent: "Atom | None" = None
    parts: "tuple[Atom, ...] | None" = None
    segments: "tuple[Dim, ...] | None" = None
    data: bool = False
    groups: Groups | None = None

    @property
    def name(self) -> str:
        """A short unique name, `a17`."""
        return f"a{self.number}"

    @property
    def units(self) -> int:
        """Its size; 0 where that is symbolic."""
        return self.size.static or 0

    @property
    def is_splittable(self) -> bool:
        """Whether it is an axis of a static size above 1 that is not a size of the data."""
        return self.units > 1 and self.segments is None and not self.data


Dim = tuple[Atom, ...]
Extents: TypeAlias = tuple[Extent, ...]


@dataclass(slots=True)
class Forest:
    """All atoms of one program, and the operations that refine them."""

    atoms: list[Atom] = field(default_factory=list)

    def add_atom(self, size: Size, *, data: bool = False) -> Atom:
        """A fresh leaf."""
        atom = Atom(len(self.atoms), size, data=data)
        self.atoms.append(atom)
        return atom

    def add_dim(self, size: Size, *, data: bool = False) -> Dim:
        """A fresh dim: one leaf, or the empty product if the size is 1."""
        return () if size == ONE else (self.add_atom(size, data=data),)

    def find(self, atom: Atom) -> Atom:
        """The representative of `atom`."""
        while atom.parent is not None:
            if atom.parent.parent is not None:
                atom.parent = atom.parent.parent
            atom = atom.parent
        return atom

    def flatten(self, dim: Iterable[Atom]) -> Dim:
        """The product as leaves and sums, products expanded, size 1 dropped."""
        out: list[Atom] = []
        for atom in dim:
            atom = self.find(atom)
            if atom.parts is not None:
                out.extend(self.flatten(atom.parts))
            elif atom.size != ONE:
                out.append(atom)
        return tuple(out)

    def size(self, dim: Iterable[Atom]) -> Size:
        """The number of elements of `dim`."""
        return product(self.find(a).size for a in dim)

    def list_segments(self, atom: Atom) -> tuple[Dim, ...]:
        """The segments of a sum, nested sums spliced in."""
        out: list[Dim] = []
        for segment in atom.segments or ():
            flat = self.flatten(segment)
            if len(flat) == 1 and flat[0].segments is not None:
                out.extend(self.list_segments(flat[0]))
            else:
                out.append(flat)
        return tuple(out)

    def list_leaves(self, dim: Iterable[Atom]) -> Iterator[Atom]:
        """The leaf atoms of `dim`, those inside sums included, in order, repeats included."""
        for atom in self.flatten(dim):
            if atom.segments is None:
                yield atom
            else:
                for section in self.list_segments(atom):
                    yield from self.list_leaves(section)

    # ── uniting ──────────────────────────────────────────────────────────────────────────────

    def unify(self, one: Dim, other: Dim) -> bool:
        """Unite two dims of one size; return whether that worked. Refinements stay either way."""
        left, right = list(self.flatten(one)), list(self.flatten(other))
        while left and right:
            a, b = self.find(left[0]), self.find(right[0])
            if a.parts is not None or b.parts is not None:
                left, right = list(self.flatten(left)), list(self.flatten(right))
            elif a is b or (a.size == b.size and self._merge_atoms(a, b)):
                left.pop(0)
                right.pop(0)
            elif a.size != b.size and self._refine_larger(a, b):
                left, right = list(self.flatten(left)), list(self.flatten(right))
            else:
                return False
        return not left and not right

    def _refine_larger(self, a: Atom, b: Atom) -> bool:
        """Split the larger of two atoms so that its major part has the size of the smaller."""
        if b.size.over(a.size) is not None:
            return self.split_major(b, a.size)
        return a.size.over(b.size) is not None and self.split_major(a, b.size)

    def split_major(self, atom: Atom, major: Size) -> bool:
        """Make `atom` a product whose first factor has size `major`; return whether that worked."""
        minor = atom.size.over(major)
        if minor is None:
            return False
        if atom.segments is not None:
            return self._split_sum(atom, major, minor)
        atom.parts = (self.add_atom(major, data=atom.data), self.add_atom(minor, data=atom.data))
        return True

    def _split_sum(self, atom: Atom, major: Size, minor: Size) -> bool:
        sections = self.list_segments(atom)
        cuts = [self.split_dim(section, minor) for section in sections]
        if any(cut is None for cut in cuts):
            return False
        pairs = [cut for cut in cuts if cut is not None]
        first = pairs[0][1]
        if not all(self.unify(first, pair[1]) for pair in pairs[1:]):
            return False
        atom.segments = None
        if all(not self.flatten(pair[0]) for pair in pairs):
            head = self.add_atom(major)
        else:
            head = self.make_sum([pair[0] for pair in pairs])
        atom.parts = (head, *self.flatten(first))
        return True

    def split_dim(self, dim: Dim, minor: Size) -> tuple[Dim, Dim] | None:
        """`dim` as (major, minor), where the minor factor has size `minor`; None if impossible."""
        tail: list[Atom] = []
        rest = list(self.flatten(dim))
        while (left := minor.over(self.size(tail))) is not None and left != ONE:
            if not rest:
                return None
            last = rest.pop()
            if left.over(last.size) is not None:
                tail.insert(0, last)
            elif (major := last.size.over(left)) is not None and self.split_major(last, major):
                rest.extend(self.flatten((last,)))
            else:
                return None
        return (tuple(rest), tuple(tail)) if self.size(tail) == minor else None

    def make_sum(self, segments: Iterable[Dim]) -> Atom:
        """A fresh atom that is the concatenation of `segments`."""
        parts = tuple(segments)
        sizes = [self.size(p) for p in parts]
        atom = self.add_atom(_add_sizes(sizes))
        atom.segments = parts
        return atom

    def _merge_atoms(self, a: Atom, b: Atom) -> bool:
        """Unite two atoms of one size; return whether their structures allow it."""
        if a.groups and b.groups and a.groups.bounds != b.groups.bounds:
            return False
        if a.segments is not None and b.segments is not None and not self._align_sums(a, b):
            return False
        a, b = self.find(a), self.find(b)
        if a is b:
            return True
        keep, drop = (b, a) if a.segments is None and b.segments is not None else (a, b)
        if keep.parts is not None or drop.parts is not None:
            return self.unify((keep,), (drop,))
        drop.parent, keep.groups = keep, keep.groups or drop.groups
        self._mark_data(keep, keep.data or drop.data)
        return True

    def _mark_data(self, atom: Atom, data: bool) -> None:
        if data:
            atom.data = True
            for leaf in self.list_leaves((atom,)):
                leaf.data = True

    def _align_sums(self, a: Atom, b: Atom) -> bool:
        """Split two sums at the same offsets and unite their segments one by one."""
        for offset in _list_boundaries(self, b):
            if not self.split_atom_at(a, offset):
                return False
        for offset in _list_boundaries(self, a):
            if not self.split_atom_at(b, offset):
                return False
        ones, others = self.list_segments(a), self.list_segments(b)
        if [self.size(s) for s in ones] != [self.size(s) for s in others]:
            return False
        return all(self.unify(s, t) for s, t in zip(ones, others, strict=True))

    # ── splitting ──────────────────────────────────────────────────────────────────────────────

    def split_at(self, dim: Dim, offset: int) -> tuple[Dim, Dim] | None:
        """`dim` as two concatenated dims, the first of static size `offset`; None if impossible.

        The atoms are refined so that the dim itself is the sum of the two.
        """
        flat = self.flatten(dim)
        total = self.size(flat).static
        if not flat or total is None:
            return None
        if offset in (0, total):
            return (self.add_dim(Size(0)), flat) if offset == 0 else (flat, self.add_dim(Size(0)))
        first, *rest = flat
        if rest:
            return self._split_product_at(flat, offset)
        return self._list_halves(first, offset) if self.split_atom_at(first, offset) else None

    def _split_product_at(self, flat: Dim, offset: int) -> tuple[Dim, Dim] | None:
        rest = self.size(flat[1:]).static
        if rest is None or offset % rest:
            return None
        halves = self.split_at((flat[0],), offset // rest)
        return None if halves is None else (halves[0] + flat[1:], halves[1] + flat[1:])

    def _list_halves(self, atom: Atom, offset: int) -> tuple[Dim, Dim] | None:
        atom = self.find(atom)
        if atom.parts is not None:
            return self.split_at(self.flatten((atom,)), offset)
        left: list[Dim] = []
        right: list[Dim] = []
        position = 0
        for section in self.list_segments(atom):
            (left if position < offset else right).append(section)
            position += self.size(section).static or 0
        return self._concatenate(left), self._concatenate(right)

    def _concatenate(self, sections: list[Dim]) -> Dim:
        return sections[0] if len(sections) == 1 else (self.make_sum(sections),)

    def split_atom_at(self, atom: Atom, offset: int) -> bool:
        """Make `atom` a sum with a boundary at `offset`; return whether that worked."""
        atom = self.find(atom)
        total = atom.size.static
        if total is None or not 0 < offset < total:
            return False
        if atom.parts is not None:
            return self._split_product_at(self.flatten((atom,)), offset) is not None
        if atom.segments is None:
            sizes = (Size(offset), Size(total - offset))
            atom.segments = tuple(self.add_dim(s, data=atom.data) for s in sizes)
            return True
        return self._split_sum_at(atom, offset)

    def _split_sum_at(self, atom: Atom, offset: int) -> bool:
        sections: list[Dim] = []
        position = 0
        for section in self.list_segments(atom):
            length = self.size(section).static or 0
            if position < offset < position + length:
                halves = self.split_at(section, offset - position)
                if halves is None:
                    return False
                sections.extend(halves)
            else:
                sections.append(section)
            position += length
        atom.segments = tuple(sections)
        return True

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def contains(self, dim: Dim, axis: Atom) -> bool:
        """Whether `axis` is a leaf of `dim`."""
        return any(leaf is axis for leaf in self.list_leaves(dim))

    def find_axis(self, name: str) -> Atom:
        """The axis called `name`."""
        return self.find(self.atoms[int(name[1:])])

    def restrict(self, dims: Iterable[Dim], partition: Partition) -> Partition:
        """`partition` restricted to the axes that some of `dims` contain."""
        leaves = {leaf.name for dim in dims for leaf in self.list_leaves(dim)}
        return partition.among(leaves)

    def find_grouped_rows(self, partition: Partition) -> Atom | None:
        """The axis of grouped rows in `partition`, or None."""
        axes = (self.find_axis(name) for name in partition.axes)
        return next((axis for axis in axes if axis.groups), None)

    def find_row_groups(self, partition: Partition) -> Groups | None:
        """The grouping of the rows of `partition`, or None."""
        rows = self.find_grouped_rows(partition)
        return rows.groups if rows else None

    def compute_padding(self, partition: Partition, tp: int) -> Fraction:
        """The longest of `tp` shards times their number, relative to the unsharded size."""
        ratio = Fraction(1)
        for part in (p for p in partition.parts if not self.find_axis(p.axis).groups):
            size, parts = self.find_axis(part.axis).size.coefficient, part.parts or tp
            ratio *= Fraction(-(-size // parts) * parts, size)
        return ratio

    def split(self, dim: Dim, partition: Partition) -> Split | None:
        """How `dim` is sharded; None if it has no axis, one axis twice, or a form that Split lacks.

        Constraints: an axis has a static size.
        """
        flat = self.flatten(dim)
        holders = [a for a in flat if self.restrict(((a,),), partition).parts]
        sums = [a for a in holders if a.segments is not None]
        if not holders or len(set(holders)) != len(holders) or len(sums) > 1:
            return None
        if not sums:
            extents = self._list_extents(flat, partition)
            return None if extents is None else Split(1, (Segment(extents),))
        at = flat.index(sums[0])
        before = self._list_extents(flat[:at], partition)
        after = self._list_extents(flat[at + 1 :], partition)
        return self._split_sections(sums[0], partition, before, after)

    def _list_extents(self, flat: Dim, partition: Partition) -> tuple[Extent, ...] | None:
        """A product without sums: its sharded axes, with the factors between them as one extent."""
        extents: list[Extent] = []
        for part, atoms in groupby(flat, lambda atom: partition.part(atom.name)):
            size = self.size(atoms).static
            if part is not None and size is None:
                return None
            number = -1 if size is None else size
            extents.append(Extent(number, part.parts, part.stride) if part else Extent(number))
        unknown = sum(e.size == -1 for e in extents)
        return None if unknown > 1 else tuple(extents)

    def _split_sections(
        self, atom: Atom, partition: Partition, before: Extents | None, after: Extents | None
    ) -> Split | None:
        if before is None or after is None or any(e.size == -1 for e in (*before, *after)):
            return None
        segments: list[Segment] = []
        for section in self.list_segments(atom):
            length = self.size(section).static
            if length is None:
                return None
            if not self.restrict((section,), partition).parts:
                segments.append(Segment((Extent(length), *after)))
                continue
            cut = self.split(section, partition)
            if cut is None or not cut.is_known or cut.repeats:
                return None
            deeper = [Segment((*s.extents, *after)) for s in cut.segments]
            segments.extend(deeper * cut.outer)
        outer = prod(e.size for e in before)
        return Split(outer, tuple(segments), before if any(e.parts != 1 for e in before) else ())

    def format(self, dim: Dim, names: dict[Atom, str] | None = None) -> str:
        """The dim in the notation, `(H*d + H*d)`; a leaf without a name prints its size."""
        return "*".join(self._format_atom(a, names or {}) for a in self.flatten(dim)) or "1"

    def _format_atom(self, atom: Atom, names: dict[Atom, str]) -> str:
        if atom.segments is not None:
            return "(" + " + ".join(self.format(s, names) for s in self.list_segments(atom)) + ")"
        return names.get(atom, str(atom.size))


def _list_boundaries(forest: Forest, atom: Atom) -> list[int]:
    """The inner boundaries of a sum of static segments."""
    out: list[int] = []
    position = 0
    for section in forest.list_segments(atom)[:-1]:
        position += forest.size(section).static or 0
        out.append(position)
    return out


def _add_sizes(sizes: list[Size]) -> Size:
    first = sizes[0]
    if all(s.symbols == first.symbols for s in sizes):
        return Size(sum(s.coefficient for s in sizes), first.symbols)
    return Size(1, ("+".join(sorted(str(s) for s in sizes)),))
