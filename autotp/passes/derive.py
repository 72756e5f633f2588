"""Rules that depend on an op's arguments: views, permutations, slices, reductions over named dims.

`RULES` is a closed list; a row of rules/ picks one by name. Each takes a `Call` and returns a
`NodeRule`, or None where it cannot say (the node is then whole). Nothing here knows an op by name:
arguments are found by their names in the op's schema.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autotp.core.axis import Atom, Dim, Forest
from autotp.core.notation import ELLIPSIS, Pattern, Signature, parse
from autotp.core.rule import Factor, FactorKind, NodeRule, Row, Slot
from autotp.core.size import ONE, Size

__all__ = ["RULES", "Call", "apply"]


@dataclass(slots=True)
class Call:
    """One node as a rule sees it.

    - `operands`: dims of each tensor operand that is there; `sizes`: sizes of each result's dims.
    - `positions`: for each tensor argument of the schema, its operand number, None if absent, -1 if
      it is a literal.
    - `arguments`: all arguments by schema name, defaults filled in; `dims`: the forest.
    """

    forest: Forest
    operands: list[tuple[Dim, ...]]
    sizes: list[tuple[Size, ...]]
    positions: tuple[int | None, ...]
    arguments: Mapping[str, Any]
    row: Row

    def axis(self, value: int, rank: int) -> int:
        """`value` as a dim counted from 0."""
        return value % rank if rank else 0

    def fresh(self, result: int, dim: int, *, data: bool = False) -> Dim:
        """A fresh dim of the size of a result's dim."""
        return self.forest.dim(self.sizes[result][dim], data=data)


Builder = Callable[[Call], NodeRule | None]


def apply(call: Call) -> NodeRule | None:
    """The rule of one node, by its row's signature or derived rule."""
    if call.row.signature is not None:
        return notation(call, call.row.signature)
    return RULES[call.row.derive](call)


# ── the notation ─────────────────────────────────────────────────────────────────────────────────


def notation(call: Call, signature: Signature) -> NodeRule | None:
    """The node rule that a signature gives, or None if the ranks do not fit it."""
    present = [(k, i) for k, i in enumerate(call.positions[: len(signature.operands)])]
    binding = _Binding(call, signature)
    for position, index in present:
        if index is None or index < 0:
            continue
        if not binding.operand(signature.operands[position], index):
            return None
    return binding.rule()


class _Binding:
    """Factor words bound to dims while one signature is matched against one call."""

    def __init__(self, call: Call, signature: Signature) -> None:
        self.call, self.signature = call, signature
        self.dims: dict[str, Dim] = {}
        self.slots: dict[str, list[Slot]] = {}
        self.broken: set[str] = set()

    def operand(self, pattern: Pattern, index: int) -> bool:
        """Whether operand `index` fits `pattern`; binds its factors."""
        dims = self.call.operands[index]
        words = self._words(pattern, len(dims))
        if words is None or len(words) != len(dims):
            return False
        for at, (names, dim) in enumerate(zip(words, dims, strict=True)):
            if not self._bind(names, dim, (index, at)):
                return False
        return True

    def _words(self, pattern: Pattern, rank: int) -> list[tuple[str, ...]] | None:
        if pattern[:1] != ((ELLIPSIS,),):
            return list(pattern[max(0, len(pattern) - rank) :])  # fewer dims: broadcast
        count = rank - len(pattern) + 1
        if count < 0:
            return None
        leading = [(f"{ELLIPSIS}{k}",) for k in reversed(range(count))]  # aligned from the right
        return [*leading, *pattern[1:]]

    def _bind(self, names: tuple[str, ...], dim: Dim, slot: Slot) -> bool:
        forest = self.call.forest
        if not forest.flat(dim):
            return True  # size 1: broadcast, or every factor of the group has size 1
        if len(names) == 1:
            return self._bind_one(names[0], dim, slot)
        return self._bind_group(names, dim, slot)

    def _bind_one(self, name: str, dim: Dim, slot: Slot) -> bool:
        self.slots.setdefault(name, []).append(slot)
        if name not in self.dims:
            self.dims[name] = dim
        elif self.call.forest.size(self.dims[name]) != self.call.forest.size(dim) or not (
            self.call.forest.unify(self.dims[name], dim)
        ):
            self.broken.add(name)
        return True

    def _bind_group(self, names: tuple[str, ...], dim: Dim, slot: Slot) -> bool:
        forest = self.call.forest
        known = [n for n in names if n in self.dims]
        unknown = [n for n in names if n not in self.dims]
        if len(unknown) > 1:
            return False
        if unknown:
            rest = forest.size(dim)
            for name in known:
                quotient = rest.over(forest.size(self.dims[name]))
                if quotient is None:
                    return False
                rest = quotient
            self.dims[unknown[0]] = forest.dim(rest)
        whole = tuple(atom for name in names for atom in self.dims[name])
        united = forest.unify(whole, dim)
        for name in names:
            self.slots.setdefault(name, []).append(slot)
            if not united:
                self.broken.add(name)
        return True

    def rule(self) -> NodeRule:
        """The node rule of everything bound."""
        results = tuple(self._result(k, p) for k, p in enumerate(self.signature.results))
        row = self.call.row
        return NodeRule(
            factors=tuple(self._factor(name) for name in self.slots),
            results=results,
            linear=_renumbered(self.call, row.linear),
            bias=frozenset(i for b in row.bias if (i := _position(self.call, b)) is not None and i >= 0),
            emit=row.emit,
            loss=row.loss,
        )

    def _result(self, number: int, pattern: Pattern) -> tuple[Dim, ...]:
        words = self._words(pattern, len(self.call.sizes[number]))
        assert words is not None
        out: list[Dim] = []
        for at, names in enumerate(words):
            size = self.call.sizes[number][at]
            dim = tuple(a for n in names for a in self.dims.get(n, ()))
            if self.call.forest.size(dim) != size:  # sizes that only agree symbolically
                self.broken.update(names)
                dim = self.call.forest.dim(size)
            for name in names:
                if name in self.slots:
                    self.slots[name].append((~number, at))
            out.append(dim)
        return tuple(out)

    def _factor(self, name: str) -> Factor:
        join = self.call.row.reduce.get(name, "")
        kind: FactorKind = "pass"
        if name in self.broken or name in self.call.row.whole or join in ("max", "none"):
            kind = "whole"
        elif join:
            kind = "reduce"
        return Factor(kind, self.dims[name], tuple(self.slots[name]), join if kind == "reduce" else "")


def _position(call: Call, number: int) -> int | None:
    return call.positions[number] if number < len(call.positions) else None


def _renumbered(call: Call, sets: Sequence[frozenset[int]]) -> tuple[frozenset[int], ...]:
    """Linear sets over present operands; a set that needs a literal (`x + 1.0`) is gone."""
    out: list[frozenset[int]] = []
    for operands in sets:
        numbers = [_position(call, n) for n in sorted(operands)]
        if -1 not in numbers and any(n is not None for n in numbers):
            found = frozenset(n for n in numbers if n is not None)
            if found not in out:
                out.append(found)
    return tuple(out)


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────


def _mapped(call: Call, source: Sequence[int | None], **changes: Any) -> NodeRule:
    """One operand whose dims move to a result: `source[j]` is the operand dim of result dim j."""
    dims = call.operands[0]
    results = tuple(() if s is None else dims[s] for s in source)
    factors = [
        Factor("pass", dims[s], ((0, s), (~0, j))) for j, s in enumerate(source) if s is not None and dims[s]
    ]
    factors += [Factor("whole", dims[i], ((0, i),)) for i in range(len(dims)) if i not in source and dims[i]]
    return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit=call.row.emit, **changes)


def permute(call: Call) -> NodeRule | None:
    """Dims change places, by `dims` or by a pair of dims (default: all reversed)."""
    rank = len(call.operands[0])
    order = call.arguments.get("dims")
    if order is None and "dim0" in call.arguments:
        order = list(range(rank))
        i, j = (call.axis(call.arguments[k], rank) for k in ("dim0", "dim1"))
        order[i], order[j] = order[j], order[i]
    source = [call.axis(d, rank) for d in order] if order is not None else list(reversed(range(rank)))
    return _mapped(call, source)


def view(call: Call) -> NodeRule | None:
    """Dims are regrouped: aligned from the major end, then from the minor end; the rest is whole."""
    aligned = _Alignment(call)
    return aligned.rule()


class _Alignment:
    """Operand and result dims cut into common pieces, each in one dim of either side."""

    def __init__(self, call: Call) -> None:
        self.call, self.forest = call, call.forest
        self.left = [(a, i) for i, d in enumerate(call.operands[0]) for a in self.forest.flat(d)]
        self.sizes = list(call.sizes[0])
        self.results: list[Dim | None] = [None] * len(self.sizes)
        self.pieces: list[tuple[Atom, int, int]] = []

    def rule(self) -> NodeRule:
        """The node rule: a passing factor a piece, whatever could not be aligned whole."""
        first = 0
        while first < len(self.sizes) and self._match(first, major=True):
            first += 1
        last = len(self.sizes) - 1
        while last >= first and self._match(last, major=False):
            last -= 1
        factors = [Factor("pass", (a,), ((0, i), (~0, j))) for a, i, j in self.pieces]
        for j in range(first, last + 1):
            dim = self.forest.dim(self.sizes[j], data=any(a.data for a, _ in self.left))
            self.results[j] = dim
            if dim:
                factors.append(Factor("whole", dim, ((~0, j),)))
        factors += [Factor("whole", (a,), ((0, i),)) for a, i in self.left]
        results = tuple(r if r is not None else () for r in self.results)
        return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit=self.call.row.emit)

    def _match(self, j: int, *, major: bool) -> bool:
        """Whether result dim `j` could be built of the operand's next atoms; undone if not."""
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

    def _divide(self, queue: list[tuple[Atom, int]], end: int, atom: Atom, i: int, need: Size) -> bool:
        rest = atom.size.over(need)
        if rest is None or not self.forest.split_major(atom, need if end == 0 else rest):
            return False
        del queue[end]
        parts = [(a, i) for a in self.forest.flat((atom,))]
        queue[0:0] = parts if end == 0 else []
        if end != 0:
            queue.extend(parts)
        return True


def expand(call: Call) -> NodeRule | None:
    """Dims of size 1, and new leading ones, are repeated: fresh axes that the operand lacks."""
    dims, sizes = call.operands[0], call.sizes[0]
    lead = len(sizes) - len(dims)
    factors: list[Factor] = []
    results: list[Dim] = []
    for j, size in enumerate(sizes):
        dim = dims[j - lead] if j >= lead else ()
        same = bool(call.forest.flat(dim)) or size == ONE
        out = dim if same else call.fresh(0, j)
        slots: tuple[Slot, ...] = ((0, j - lead), (~0, j)) if same else ((~0, j),)
        results.append(out)
        if call.forest.flat(out):
            factors.append(Factor("pass", out, slots))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),), emit=call.row.emit)


def repeat(call: Call) -> NodeRule | None:
    """Dims are tiled: the operand's dim is minor, the number of copies a whole major axis."""
    dims, sizes = call.operands[0], call.sizes[0]
    lead = len(sizes) - len(dims)
    factors: list[Factor] = []
    results: list[Dim] = []
    for j, size in enumerate(sizes):
        dim = dims[j - lead] if j >= lead else ()
        copies = size.over(call.forest.size(dim))
        if copies is None:
            return None
        extra = call.forest.dim(copies)
        results.append(extra + dim)
        if extra:
            factors.append(Factor("whole", extra, ((~0, j),)))
        if dim:
            factors.append(Factor("pass", dim, ((0, j - lead), (~0, j))))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),), emit=call.row.emit)


def repeat_each(call: Call) -> NodeRule | None:
    """Elements of one dim are repeated next to each other: the copies are a whole minor axis."""
    if not isinstance(call.arguments.get("repeats"), int) or call.arguments.get("dim") is None:
        return None
    dims = call.operands[0]
    at = call.axis(call.arguments["dim"], len(dims))
    extra = call.forest.dim(Size(call.arguments["repeats"]))
    results = tuple(d + extra if j == at else d for j, d in enumerate(dims))
    factors = [Factor("pass", d, ((0, j), (~0, j))) for j, d in enumerate(dims) if d]
    if extra:
        factors.append(Factor("whole", extra, ((~0, at),)))
    return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit=call.row.emit)


# ── pieces of a dim ──────────────────────────────────────────────────────────────────────────────


def _others(call: Call, at: int, operand: int = 0, result: int = 0, *, shift: int = 0) -> list[Factor]:
    """Passing factors of every dim but `at`; result dims after `at` are shifted."""
    out: list[Factor] = []
    for i, dim in enumerate(call.operands[operand]):
        if i != at and dim:
            out.append(Factor("pass", dim, ((operand, i), (~result, i + (shift if i > at else 0)))))
    return out


def _replaced(call: Call, at: int, dim: Dim) -> tuple[Dim, ...]:
    return tuple(dim if i == at else d for i, d in enumerate(call.operands[0]))


def take(call: Call) -> NodeRule | None:
    """A slice of one dim: a segment of it, or (with a step) its major factor."""
    dims = call.operands[0]
    at = call.axis(call.arguments["dim"], len(dims))
    size = call.forest.size(dims[at])
    start, step = call.arguments.get("start") or 0, call.arguments.get("step", 1)
    stop = call.arguments.get("end")
    linear = (frozenset({0}),)
    if size.static is None or not all(isinstance(n, int) for n in (start, step, stop or 0)):
        return _whole_dim(call, at, data=True)
    total = size.static
    begin, end, _ = slice(start, stop, 1).indices(total)
    if step != 1:
        return _strided(call, at, begin, end, step, total)
    if begin >= end:
        return _whole_dim(call, at, data=False)
    tail = call.forest.cut(dims[at], end)
    head = None if tail is None else call.forest.cut(tail[0], begin)
    if tail is None or head is None:
        return _whole_dim(call, at, data=False)
    piece = head[1]
    factors = [*_others(call, at), Factor("pass", dims[at], ((0, at), (~0, at)))]
    extra = {"before": (head[0],) if begin else (), "piece": (piece,)}
    results = (_replaced(call, at, piece),)
    return NodeRule(tuple(factors), results, linear=linear, emit="slice", extra=extra)


def _strided(call: Call, at: int, begin: int, end: int, step: int, total: int) -> NodeRule | None:
    """`x[begin::step]` with begin < step: the major factor of a product whose minor one is `step`."""
    parts = call.forest.split_dim(call.operands[0][at], Size(step)) if total % step == 0 else None
    if parts is None or begin >= step or end < total:
        return _whole_dim(call, at, data=False)
    factors = [*_others(call, at), Factor("pass", parts[0], ((0, at), (~0, at)))]
    factors.append(Factor("whole", parts[1], ((0, at),)))
    results = _replaced(call, at, parts[0])
    return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit="")


def _whole_dim(call: Call, at: int, *, data: bool) -> NodeRule:
    out = call.fresh(0, at, data=data)
    dim = call.operands[0][at]
    factors = _others(call, at)
    factors += [Factor("whole", d, (slot,)) for d, slot in ((dim, (0, at)), (out, (~0, at))) if d]
    return NodeRule(tuple(factors), (_replaced(call, at, out),), linear=(frozenset({0}),))


def select(call: Call) -> NodeRule | None:
    """One index of one dim: that dim is whole, and gone."""
    at = call.axis(call.arguments["dim"], len(call.operands[0]))
    return _mapped(call, [i for i in range(len(call.operands[0])) if i != at])


def divide(call: Call) -> NodeRule | None:
    """One dim cut into several results (split, chunk, unbind with kept dim)."""
    dims = call.operands[0]
    at = call.axis(call.arguments.get("dim", 0), len(dims))
    pieces: list[Dim] = []
    rest = dims[at]
    for number in range(len(call.sizes) - 1):
        length = call.sizes[number][at].static
        halves = None if length is None else call.forest.cut(rest, length)
        if halves is None:
            return _whole_pieces(call, at)
        pieces.append(halves[0])
        rest = halves[1]
    pieces.append(rest)
    count = len(pieces)
    factors = [
        Factor("pass", d, ((0, i), *((~k, i) for k in range(count))))
        for i, d in enumerate(dims)
        if i != at and d
    ]
    factors.append(Factor("pass", dims[at], ((0, at), *((~k, at) for k in range(count)))))
    results = tuple(_replaced(call, at, p) for p in pieces)
    return NodeRule(
        tuple(factors), results, linear=(frozenset({0}),), emit="sections", extra={"pieces": tuple(pieces)}
    )


def _whole_pieces(call: Call, at: int) -> NodeRule:
    count = len(call.sizes)
    results = tuple(_replaced(call, at, call.fresh(k, at, data=True)) for k in range(count))
    factors = [
        Factor("pass", d, ((0, i), *((~k, i) for k in range(count))))
        for i, d in enumerate(call.operands[0])
        if i != at and d
    ]
    factors.append(Factor("whole", call.operands[0][at], ((0, at),)))
    return NodeRule(tuple(factors), results, linear=(frozenset({0}),))


def unbind(call: Call) -> NodeRule | None:
    """One dim taken apart into results that lack it: whole in it."""
    dims = call.operands[0]
    at = call.axis(call.arguments.get("dim", 0), len(dims))
    kept = [(i, d) for i, d in enumerate(dims) if i != at]
    count = len(call.sizes)
    factors = [
        Factor("pass", d, ((0, i), *((~k, j) for k in range(count)))) for j, (i, d) in enumerate(kept) if d
    ]
    if dims[at]:
        factors.append(Factor("whole", dims[at], ((0, at),)))
    return NodeRule(tuple(factors), (tuple(d for _, d in kept),) * count, linear=(frozenset({0}),))


def concatenate(call: Call) -> NodeRule | None:
    """Tensors joined along one dim: a sum of their dims; empty tensors join nothing."""
    full = max(range(len(call.operands)), key=lambda k: len(call.operands[k]))
    at = call.axis(call.arguments.get("dim", 0), len(call.operands[full]))
    rank = len(call.sizes[0])
    joined = [k for k, dims in enumerate(call.operands) if len(dims) == rank]
    if len(joined) != len(call.operands):
        return None
    factors: list[Factor] = []
    results: list[Dim] = []
    for i in range(rank):
        dim, factor = _joined(call, joined, i, at)
        results.append(dim)
        factors += factor
    linear = (frozenset(range(len(call.operands))),)
    return NodeRule(tuple(factors), (tuple(results),), linear=linear)


def _joined(call: Call, joined: list[int], i: int, at: int) -> tuple[Dim, list[Factor]]:
    forest = call.forest
    dims = [call.operands[k][i] for k in joined]
    slots: tuple[Slot, ...] = (*((k, i) for k in joined), (~0, i))
    if i == at:
        parts = [d for d in dims if forest.size(d) != Size(0)]
        static = all(forest.size(d).static is not None for d in parts)
        out = parts[0] if len(parts) == 1 else (forest.sum_of(parts),) if static else call.fresh(0, i, data=True)
        kind: FactorKind = "pass" if static else "whole"
        return out, [Factor(kind, out, slots)]
    ok = all(forest.size(d) == forest.size(dims[0]) and forest.unify(dims[0], d) for d in dims[1:])
    return dims[0], [Factor("pass" if ok else "whole", dims[0], slots)] if dims[0] else []


def stack(call: Call) -> NodeRule | None:
    """Tensors joined along a new dim, which is whole."""
    at = call.axis(call.arguments.get("dim", 0), len(call.sizes[0]))
    joined = list(range(len(call.operands)))
    factors: list[Factor] = []
    results: list[Dim] = []
    for i in range(len(call.operands[0])):
        dim, factor = _joined(call, joined, i, -1)
        j = i + (i >= at)
        results.append(dim)
        factors += [Factor(f.kind, f.dim, (*f.slots[:-1], (~0, j))) for f in factor]
    new = call.fresh(0, at)
    results.insert(at, new)
    if new:
        factors.append(Factor("whole", new, ((~0, at),)))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset(joined),))


# ── dims named by an argument ────────────────────────────────────────────────────────────────────


def along(call: Call) -> NodeRule | None:
    """The dims that an argument names are contracted or whole; every other dim passes.

    Options: `kind` = whole | sum | mean | max; `argument` = its name (default "dim"); `keep` = True if
    the dim stays (softmax), else it follows the op's own `keepdim`; `linear` = True if linear.
    """
    options = call.row.options
    dims = call.operands[0]
    named = call.arguments.get(str(options.get("argument", "dim")))
    if named is None or named == []:
        chosen = set(range(len(dims)))
    else:
        listed = cast("list[int]", named if isinstance(named, list | tuple) else [named])
        chosen = {call.axis(d, len(dims)) for d in listed}
    keep = bool(options.get("keep", False))
    kept = keep or bool(call.arguments.get("keepdim", False))
    return _along(call, chosen, str(options.get("kind", "whole")), keep=keep, kept=kept)


def _along(call: Call, chosen: set[int], join: str, *, keep: bool, kept: bool) -> NodeRule:
    factors: list[Factor] = []
    results: list[list[Dim]] = [[] for _ in call.sizes]
    for i, dim in enumerate(call.operands[0]):
        j = len(results[0])
        if i in chosen:
            kind: FactorKind = "reduce" if join in ("sum", "mean") else "whole"
            if dim:
                factors.append(Factor(kind, dim, ((0, i),), join if kind == "reduce" else ""))
            for k, dims in enumerate(results):
                if kept:
                    dims.append(_stay(call, dim, k, j, same=keep))
            continue
        if dim:
            factors.append(Factor("pass", dim, ((0, i), *((~k, j) for k in range(len(results))))))
        for dims in results:
            dims.append(dim)
    linear = (frozenset({0}),) if join in ("sum", "mean") or call.row.options.get("linear") else ()
    emit = call.row.emit or ("rescale" if join == "mean" else "")
    return NodeRule(tuple(factors), tuple(tuple(r) for r in results), linear=linear, emit=emit)


def _stay(call: Call, dim: Dim, result: int, at: int, *, same: bool) -> Dim:
    if same and call.forest.size(dim) == call.sizes[result][at]:
        return dim
    return call.fresh(result, at, data=any(a.data for a in call.forest.flat(dim)))


# ── lookups, products, attention ─────────────────────────────────────────────────────────────────


def index(call: Call) -> NodeRule | None:
    """`x[:, i, j]`: consecutive indexed dims become the index's dims, the rest passes."""
    listed = cast("list[Any]", call.arguments["indices"])
    used = [k for k, item in enumerate(listed) if item is not None]
    if not used or used != list(range(used[0], used[-1] + 1)):
        return None
    source = call.operands[0]
    rank = len(call.sizes[0]) - (len(source) - len(used))
    factors = [Factor("whole", source[k], ((0, k),)) for k in used if source[k]]
    middle: list[Dim] = []
    for j in range(rank):
        middle.append(call.fresh(0, used[0] + j, data=True))
    results: list[Dim] = [*source[: used[0]], *middle, *source[used[-1] + 1 :]]
    for i, dim in enumerate(source):
        if i not in used and dim:
            j = i if i < used[0] else i - len(used) + rank
            factors.append(Factor("pass", dim, ((0, i), (~0, j))))
    factors += [Factor("whole", d, ((~0, used[0] + j),)) for j, d in enumerate(middle) if d]
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),))


def like(call: Call) -> NodeRule | None:
    """The first operand as it is; the others give no more than a dtype."""
    dims = call.operands[0]
    factors = tuple(Factor("pass", d, ((0, i), (~0, i))) for i, d in enumerate(dims) if d)
    return NodeRule(factors, (dims,), linear=_renumbered(call, call.row.linear))


def whole(call: Call) -> NodeRule | None:
    """Every dim whole: the op is known, and no split of it is right."""
    factors = [
        Factor("whole", d, ((k, i),)) for k, dims in enumerate(call.operands) for i, d in enumerate(dims)
    ]
    results = tuple(
        tuple(call.fresh(k, j, data=True) for j in range(len(s))) for k, s in enumerate(call.sizes)
    )
    return NodeRule(tuple(factors), results)


def product(call: Call) -> NodeRule | None:
    """A matrix product of any ranks, as torch.matmul broadcasts it."""
    ranks = tuple(min(len(d), 3) for d in call.operands[:2])
    forms = {(1, 1): "i, i -> ", (1, 2): "i, i o -> o", (2, 1): "... i, i -> ...", (3, 1): "... i, i -> ..."}
    return notation(call, parse(forms.get(ranks, "... m i, ... i o -> ... m o")))


def attention(call: Call) -> NodeRule | None:
    """Scaled dot product attention: heads pass, as does the value's head size; grouped heads share."""
    mask = "... h q k"
    if call.arguments.get("enable_gqa"):
        key = "... h k e, ... h k v"
        query, mask, out = "... (h g) q e", "... (h g) q k", "... (h g) q v"
        return _attention(call, f"{query}, {key}, {mask} -> {out}")
    return _attention(call, f"... h q e, ... h k e, ... h k v, {mask} -> ... h q v")


def _attention(call: Call, text: str) -> NodeRule | None:
    signature = parse(text)
    binding = _Binding(call, signature)
    for position in (1, 2, 0, 3):  # keys first: a group of the query's heads needs their size
        number = _position(call, position)
        if number is None or number < 0:
            continue
        if not binding.operand(signature.operands[position], number):
            return None
    return binding.rule()


def trailing(call: Call) -> NodeRule | None:
    """The last dims, as many as `normalized_shape` has, are whole in every operand."""
    count = len(cast("list[int]", call.arguments["normalized_shape"]))
    words = " ".join(f"n{k}" for k in range(count))
    others = ", ".join([words] * (len(call.positions) - 1))
    rule = notation(call, parse(f"... {words}, {others} -> ... {words}"))
    if rule is None:
        return None
    rank = len(call.operands[0])
    whole = {(0, rank - 1 - k) for k in range(count)}
    factors = tuple(
        Factor("whole", f.dim, f.slots) if whole & set(f.slots) else f for f in rule.factors
    )
    return NodeRule(factors, rule.results)


RULES: Mapping[str, Builder] = {
    "along": along,
    "attention": attention,
    "concatenate": concatenate,
    "divide": divide,
    "expand": expand,
    "index": index,
    "like": like,
    "permute": permute,
    "product": product,
    "repeat": repeat,
    "repeat_each": repeat_each,
    "select": select,
    "stack": stack,
    "take": take,
    "trailing": trailing,
    "unbind": unbind,
    "view": view,
    "whole": whole,
}
