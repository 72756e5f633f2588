"""Rules of ops that move and regroup dims: permutations, views, expansions, repetitions."""

from collections.abc import Sequence
from typing import cast

from autotp.algebra.axis import Atom, Dim
from autotp.algebra.size import ONE, Size
from autotp.oprules.derive.call import Call, move_dims
from autotp.oprules.rule import Factor, NodeRule, Slot

_PAIR = ("dim0", "dim1", "axis0", "axis1")


def permute(call: Call) -> NodeRule | None:
    """Dims are permuted, by `dims` or by a pair of dims (default: all reversed).

    Options: `swap` = the pair, if the op has no argument for it.
    """
    rank = len(call.operands[0])
    pair = cast("Sequence[int]", call.row.options.get("swap", ()))
    pair = pair or [call.arguments[k] for k in _PAIR if k in call.arguments]
    order = call.arguments.get("dims")
    if pair:
        order = list(range(rank))
        i, j = (call.axis(d, rank) for d in pair)
        order[i], order[j] = order[j], order[i]
    if order is None:
        order = list(reversed(range(rank)))
    return move_dims(call, [call.axis(d, rank) for d in order])


def view(call: Call) -> NodeRule | None:
    """Dims are regrouped: aligned from the major end, then the minor end; the rest is unshardable.

    A second operand has the sizes of the result, and is sharded where the result is.
    """
    return _Alignment(call).build_rule()


class _Alignment:
    """Divides operand and result dims into common pieces, each in one dim of either side."""

    def __init__(self, call: Call) -> None:
        self.call, self.forest = call, call.forest
        self.left = [(a, i) for i, d in enumerate(call.operands[0]) for a in self.forest.flatten(d)]
        self.sizes = list(call.sizes[0])
        self.results: list[Dim | None] = [None] * len(self.sizes)
        self.pieces: list[tuple[Atom, int, int]] = []

    def build_rule(self) -> NodeRule:
        """The node rule: a passing factor per piece; what could not be aligned is unshardable."""
        first = 0
        while first < len(self.sizes) and self._match(first, major=True):
            first += 1
        last = len(self.sizes) - 1
        while last >= first and self._match(last, major=False):
            last -= 1
        factors: list[Factor] = []
        for j in range(first, last + 1):
            dim = self.forest.add_dim(self.sizes[j], data=self._is_data(self.sizes[j]))
            self.results[j] = dim
            if dim:
                factors.append(Factor("unshardable", dim, ((~0, j),)))
        factors += [Factor("unshardable", (a,), ((0, i),)) for a, i in self.left]
        results = tuple(r if r is not None else () for r in self.results)
        factors = [*self._pass_pieces(results), *factors]
        return NodeRule(
            tuple(factors), (results,), linear=(frozenset({0}),), emit=self.call.row.emit
        )

    def _is_data(self, size: Size) -> bool:
        """Whether a result dim that could not be aligned is of the data: a static one is not if
        all remaining data dims have symbolic sizes.
        """
        data = [a for a, _ in self.left if a.data]
        return any(size.static is None or a.size.static is not None for a in data)

    def _pass_pieces(self, results: tuple[Dim, ...]) -> list[Factor]:
        """A factor per piece, with its slot in a second operand that has the result's sizes."""
        if len(self.call.operands) == 1:
            return [Factor("pass", (a,), ((0, i), (~0, j))) for a, i, j in self.pieces]
        shape = self.call.operands[1]
        aligned = {j for _, _, j in self.pieces}
        agreed = {j for j in aligned if self.forest.unify(results[j], shape[j])}
        factors = [
            Factor("pass" if j in agreed else "unshardable", (a,), ((0, i), (1, j), (~0, j)))
            for a, i, j in self.pieces
        ]
        rest = [j for j in range(len(shape)) if j not in agreed and shape[j]]
        return factors + [Factor("unshardable", shape[j], ((1, j),)) for j in rest]

    def _match(self, j: int, *, major: bool) -> bool:
        """Whether the operand's next atoms make up result dim `j`; if not, nothing is changed."""
        need, taken, queue = self.sizes[j], list[tuple[Atom, int]](), list(self.left)
        end = 0 if major else -1
        while need != ONE:
            if not queue:
                return False
            atom, i = queue[end]
            quotient = need.over(atom.size)
            if quotient is not None:
                need = quotient
                taken.append(queue.pop(end))
            elif not self._divide(queue, end, atom, i, need):
                return False
        if not major:
            taken.reverse()
        self.left = queue
        self.results[j] = tuple(a for a, _ in taken)
        self.pieces += [(a, i, j) for a, i in taken]
        return True

    def _divide(
        self, queue: list[tuple[Atom, int]], end: int, atom: Atom, i: int, need: Size
    ) -> bool:
        rest = atom.size.over(need)
        if rest is None or not self.forest.split_major(atom, need if end == 0 else rest):
            return False
        del queue[end]
        parts = [(a, i) for a in self.forest.flatten((atom,))]
        queue[0:0] = parts if end == 0 else []
        if end != 0:
            queue.extend(parts)
        return True


def expand(call: Call) -> NodeRule | None:
    """Dims of size 1, and new leading ones, are repeated: new axes that the operand lacks."""
    dims, sizes = call.operands[0], call.sizes[0]
    lead = len(sizes) - len(dims)
    factors: list[Factor] = []
    results: list[Dim] = []
    for j, size in enumerate(sizes):
        dim = dims[j - lead] if j >= lead else ()
        same = bool(call.forest.flatten(dim)) or size == ONE
        out = dim if same else call.fresh(0, j)
        slots: tuple[Slot, ...] = ((0, j - lead), (~0, j)) if same else ((~0, j),)
        results.append(out)
        if call.forest.flatten(out):
            factors.append(Factor("pass", out, slots))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),), emit=call.row.emit)


def repeat(call: Call) -> NodeRule | None:
    """Dims are tiled: the operand's dim is minor, the copies are an unshardable major axis."""
    dims, sizes = call.operands[0], call.sizes[0]
    lead = len(sizes) - len(dims)
    factors: list[Factor] = []
    results: list[Dim] = []
    for j, size in enumerate(sizes):
        dim = dims[j - lead] if j >= lead else ()
        copies = size.over(call.forest.size(dim))
        if copies is None:
            return None
        extra = call.forest.add_dim(copies)
        results.append(extra + dim)
        if extra:
            factors.append(Factor("unshardable", extra, ((~0, j),)))
        if dim:
            factors.append(Factor("pass", dim, ((0, j - lead), (~0, j))))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),), emit=call.row.emit)


def repeat_each(call: Call) -> NodeRule | None:
    """Each element of one dim is repeated in place: the copies are a minor axis."""
    if not isinstance(call.arguments.get("repeats"), int) or call.arguments.get("dim") is None:
        return None
    dims = call.operands[0]
    at = call.axis(call.arguments["dim"], len(dims))
    extra = call.forest.add_dim(Size(call.arguments["repeats"]))
    results = tuple(d + extra if j == at else d for j, d in enumerate(dims))
    factors = [Factor("pass", d, ((0, j), (~0, j))) for j, d in enumerate(dims) if d]
    if extra:
        factors.append(Factor("pass", extra, ((~0, at),)))
    return NodeRule(
        tuple(factors),
        (results,),
        linear=(frozenset({0}),),
        emit=call.row.emit,
        extra={"copies": (extra,)},
    )


def pair(call: Call) -> NodeRule | None:
    """The last dim, of real and imaginary part, is merged into complex numbers: unshardable."""
    return move_dims(call, range(len(call.operands[0]) - 1))


def unpair(call: Call) -> NodeRule | None:
    """Real and imaginary part become a new last dim, which is unshardable."""
    dims = call.operands[0]
    new = call.fresh(0, len(dims))
    factors = [Factor("pass", d, ((0, i), (~0, i))) for i, d in enumerate(dims) if d]
    factors.append(Factor("unshardable", new, ((~0, len(dims)),)))
    return NodeRule(tuple(factors), ((*dims, new),), linear=(frozenset({0}),))
