"""Rules of ops that divide a dim into pieces, and of those that concatenate pieces."""

from dataclasses import replace
from typing import cast

from autotp.algebra.axis import Dim
from autotp.algebra.size import Size
from autotp.oprules.derive.call import Call, move_dims
from autotp.oprules.rule import Factor, FactorKind, NodeRule, Slot


def _pass_others(
    call: Call, at: int, operand: int = 0, result: int = 0, *, shift: int = 0
) -> list[Factor]:
    """Passing factors of every dim except `at`; result dims after `at` are shifted."""
    out: list[Factor] = []
    for i, dim in enumerate(call.operands[operand]):
        if i != at and dim:
            out.append(Factor("pass", dim, ((operand, i), (~result, i + (shift if i > at else 0)))))
    return out


def _replace_dim(call: Call, at: int, dim: Dim) -> tuple[Dim, ...]:
    return tuple(dim if i == at else d for i, d in enumerate(call.operands[0]))


def take(call: Call) -> NodeRule | None:
    """A slice of one dim: a segment of it, or (with a step) its major factor."""
    dims = call.operands[0]
    at = call.axis(call.arguments["dim"], len(dims))
    size = call.forest.size(dims[at])
    bounds = _read_bounds(call, size.static)
    if size.static is None or bounds is None:
        return _make_unshardable(call, at, data=True)
    begin, end, step = bounds
    if step != 1:
        return _take_strided(call, at, begin, end, step, size.static)
    found = _find_piece(call, dims[at], begin, end)
    if found is None:
        return _make_unshardable(call, at, data=False)
    before, piece = found
    factors = [*_pass_others(call, at), Factor("pass", dims[at], ((0, at), (~0, at)))]
    extra = {"before": before, "piece": (piece,)}
    results = (_replace_dim(call, at, piece),)
    return NodeRule(tuple(factors), results, linear=(frozenset({0}),), emit="slice", extra=extra)


def _read_bounds(call: Call, total: int | None) -> tuple[int, int, int] | None:
    """Start, end and step of a piece, counted from 0; None if one is symbolic."""
    start, step = call.arguments.get("start") or 0, call.arguments.get("step", 1)
    length, stop = call.arguments.get("length"), call.arguments.get("end")
    if total is None or not all(isinstance(n, int) for n in (start, step, length or stop or 0)):
        return None
    begin, end, _ = slice(start, stop, 1).indices(total)
    return begin, end if length is None else begin + cast(int, length), cast(int, step)


def _find_piece(call: Call, dim: Dim, begin: int, end: int) -> tuple[tuple[Dim, ...], Dim] | None:
    """The dims before the piece (none or one), and the piece; None if it is not a segment."""
    tail = call.forest.split_at(dim, end) if begin < end else None
    head = None if tail is None else call.forest.split_at(tail[0], begin)
    return None if head is None else ((head[0],) if begin else (), head[1])


def place(call: Call) -> NodeRule | None:
    """A piece of one dim is overwritten: the dim passes, and the written tensor has the piece.

    The dim is unshardable if the piece is not a segment of it (a step, a symbolic size).
    """
    dims, written = call.operands
    at = call.axis(call.arguments["dim"], len(dims))
    bounds = _read_bounds(call, call.forest.size(dims[at]).static)
    known = bounds is not None and bounds[2] == 1
    found = _find_piece(call, dims[at], *bounds[:2]) if bounds is not None and known else None
    if found is None or not call.forest.unify(found[1], written[at]):
        unshardable = [((0, at), dims[at]), ((1, at), written[at])]
        return _overwrite(call, unshardable, {i: i for i in range(len(dims)) if i != at})
    rule = _overwrite(call, [], {i: i for i in range(len(dims)) if i != at})
    passing = Factor("pass", dims[at], ((0, at), (1, at), (~0, at)))
    extra = {"before": found[0], "piece": (found[1],)}
    return replace(rule, factors=(*rule.factors, passing), emit="slice", extra=extra)


def put(call: Call) -> NodeRule | None:
    """One index of one dim is overwritten: the dim is unshardable; the written tensor lacks it."""
    dims = call.operands[0]
    at = call.axis(call.arguments["dim"], len(dims))
    places = {i: i - (i > at) for i in range(len(dims)) if i != at}
    return _overwrite(call, [((0, at), dims[at])], places)


def _overwrite(call: Call, unshardable: list[tuple[Slot, Dim]], places: dict[int, int]) -> NodeRule:
    """`places` maps dims of the first operand to those of the written one."""
    dims, written = call.operands
    factors = [
        Factor("unshardable", dim, (slot, (~0, slot[1])) if slot[0] == 0 else (slot,))
        for slot, dim in unshardable
        if dim
    ]
    for i, j in places.items():
        same = call.forest.size(dims[i]) == call.forest.size(written[j]) and call.forest.unify(
            dims[i], written[j]
        )
        if dims[i]:
            kind: FactorKind = "pass" if same else "unshardable"
            factors.append(Factor(kind, dims[i], ((0, i), (1, j), (~0, i))))
    return NodeRule(tuple(factors), (dims,), linear=(frozenset({0, 1}),))


def _take_strided(
    call: Call, at: int, begin: int, end: int, step: int, total: int
) -> NodeRule | None:
    """`x[begin::step]` with begin < step: the major factor of a dim whose minor one is `step`."""
    parts = call.forest.split_dim(call.operands[0][at], Size(step)) if total % step == 0 else None
    if parts is None or begin >= step or end < total:
        return _make_unshardable(call, at, data=False)
    factors = [*_pass_others(call, at), Factor("pass", parts[0], ((0, at), (~0, at)))]
    factors.append(Factor("unshardable", parts[1], ((0, at),)))
    results = _replace_dim(call, at, parts[0])
    return NodeRule(tuple(factors), (results,), linear=(frozenset({0}),), emit="")


def _make_unshardable(call: Call, at: int, *, data: bool) -> NodeRule:
    out = call.fresh(0, at, data=data)
    dim = call.operands[0][at]
    factors = _pass_others(call, at)
    factors += [
        Factor("unshardable", d, (slot,)) for d, slot in ((dim, (0, at)), (out, (~0, at))) if d
    ]
    return NodeRule(tuple(factors), (_replace_dim(call, at, out),), linear=(frozenset({0}),))


def select(call: Call) -> NodeRule | None:
    """One index of one dim: the dim is unshardable, and removed."""
    at = call.axis(call.arguments["dim"], len(call.operands[0]))
    return move_dims(call, [i for i in range(len(call.operands[0])) if i != at])


def divide(call: Call) -> NodeRule | None:
    """One dim is divided among several results (split, chunk)."""
    dims = call.operands[0]
    at = call.axis(call.arguments.get("dim", 0), len(dims))
    pieces: list[Dim] = []
    rest = dims[at]
    for number in range(len(call.sizes) - 1):
        length = call.sizes[number][at].static
        halves = None if length is None else call.forest.split_at(rest, length)
        if halves is None:
            return _make_pieces_unshardable(call, at)
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
    results = tuple(_replace_dim(call, at, p) for p in pieces)
    return NodeRule(
        tuple(factors),
        results,
        linear=(frozenset({0}),),
        emit="sections",
        extra={"pieces": tuple(pieces)},
    )


def _make_pieces_unshardable(call: Call, at: int) -> NodeRule:
    count = len(call.sizes)
    results = tuple(_replace_dim(call, at, call.fresh(k, at, data=True)) for k in range(count))
    factors = [
        Factor("pass", d, ((0, i), *((~k, i) for k in range(count))))
        for i, d in enumerate(call.operands[0])
        if i != at and d
    ]
    factors.append(Factor("unshardable", call.operands[0][at], ((0, at),)))
    return NodeRule(tuple(factors), results, linear=(frozenset({0}),))


def halves(call: Call) -> NodeRule | None:
    """One half of a dim gates the other: both are sharded alike, and so is the result."""
    at = call.axis(call.arguments["dim"], len(call.operands[0]))
    dim = call.operands[0][at]
    length = call.sizes[0][at].static
    pieces = None if length is None else call.forest.split_at(dim, length)
    if pieces is None or not call.forest.unify(*pieces):
        return replace(_make_unshardable(call, at, data=False), linear=())
    factors = (*_pass_others(call, at), Factor("pass", dim, ((0, at), (~0, at))))
    return NodeRule(factors, (_replace_dim(call, at, pieces[0]),))


def unbind(call: Call) -> NodeRule | None:
    """One dim is unbound into results that lack it: it is unshardable."""
    dims = call.operands[0]
    at = call.axis(call.arguments.get("dim", 0), len(dims))
    kept = [(i, d) for i, d in enumerate(dims) if i != at]
    count = len(call.sizes)
    factors = [
        Factor("pass", d, ((0, i), *((~k, j) for k in range(count))))
        for j, (i, d) in enumerate(kept)
        if d
    ]
    if dims[at]:
        factors.append(Factor("unshardable", dims[at], ((0, at),)))
    return NodeRule(tuple(factors), (tuple(d for _, d in kept),) * count, linear=(frozenset({0}),))


def concatenate(call: Call) -> NodeRule | None:
    """Tensors are concatenated along one dim, the sum of their dims; empty ones contribute none."""
    full = max(range(len(call.operands)), key=lambda k: len(call.operands[k]))
    at = call.axis(call.arguments.get("dim", 0), len(call.operands[full]))
    rank = len(call.sizes[0])
    joined = [k for k, dims in enumerate(call.operands) if len(dims) == rank]
    if len(joined) != len(call.operands):
        return None
    factors: list[Factor] = []
    results: list[Dim] = []
    for i in range(rank):
        dim, factor = _concatenate_dim(call, joined, i, at)
        results.append(dim)
        factors += factor
    linear = (frozenset(range(len(call.operands))),)
    return NodeRule(tuple(factors), (tuple(results),), linear=linear)


def _concatenate_dim(call: Call, joined: list[int], i: int, at: int) -> tuple[Dim, list[Factor]]:
    forest = call.forest
    there = [k for k in joined if i != at or forest.size(call.operands[k][i]) != Size(0)]
    dims = [call.operands[k][i] for k in there]
    slots: tuple[Slot, ...] = (*((k, i) for k in there), (~0, i))
    if i == at:
        static = all(forest.size(d).static is not None for d in dims)
        if len(dims) == 1:
            out = dims[0]
        else:
            out = (forest.make_sum(dims),) if static else call.fresh(0, i, data=True)
        kind: FactorKind = "pass" if static else "unshardable"
        return out, [Factor(kind, out, slots)]
    ok = all(forest.size(d) == forest.size(dims[0]) and forest.unify(dims[0], d) for d in dims[1:])
    return dims[0], [Factor("pass" if ok else "unshardable", dims[0], slots)] if dims[0] else []


def stack(call: Call) -> NodeRule | None:
    """Tensors are stacked along a new dim, which is unshardable."""
    at = call.axis(call.arguments.get("dim", 0), len(call.sizes[0]))
    joined = list(range(len(call.operands)))
    factors: list[Factor] = []
    results: list[Dim] = []
    for i in range(len(call.operands[0])):
        dim, factor = _concatenate_dim(call, joined, i, -1)
        j = i + (i >= at)
        results.append(dim)
        factors += [Factor(f.kind, f.dim, (*f.slots[:-1], (~0, j))) for f in factor]
    new = call.fresh(0, at)
    results.insert(at, new)
    if new:
        factors.append(Factor("unshardable", new, ((~0, at),)))
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset(joined),))
