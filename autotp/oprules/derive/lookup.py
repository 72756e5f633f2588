"""Rules of ops that read or write at integer indices: indexing, gather, scatter."""

from dataclasses import replace
from typing import Any, cast

import torch

from autotp.algebra.axis import Dim
from autotp.oprules.derive.call import Call, apply_notation, find_operand, renumber_sets
from autotp.oprules.notation import parse_rule
from autotp.oprules.rule import Factor, FactorKind, NodeRule, Slot

_EMBEDDING = parse_rule("v h, ... -> ... h")


def embedding(call: Call) -> NodeRule | None:
    """One embedding row per token id; rows of other ranks contribute zero.

    If gradients are divided by the frequency of each token id, the rows are unshardable, because a
    rank must then see all tokens.
    """
    rule = apply_notation(call, _EMBEDDING)
    if rule is None or not call.arguments.get("scale_grad_by_freq", False):
        return rule
    factors = (
        replace(f, kind="unshardable", join="") if f.kind == "reduce" else f for f in rule.factors
    )
    return replace(rule, factors=tuple(factors), emit="")


def index(call: Call) -> NodeRule | None:
    """`x[:, i, j]`: consecutive indexed dims become the dims of the index, the others pass.

    `embedding[ids]`, one index of the first dim, is a lookup that may be sharded along its rows; if
    `ids` are sorted positions that group rows, it may be sharded together with the groups. A mask
    of several dims has no rule.
    """
    listed = cast("list[Any]", call.arguments["indices"])
    used = _find_indexed_dims(listed)
    if not used:
        return None
    source = call.operands[0]
    rank = len(call.sizes[0]) - (len(source) - len(used))
    table = used == [0] and bool(source[0]) and _is_integer(listed[0].meta["val"])
    groups = call.forest.size(source[0]).static if table else None
    bounds = call.orders.find_bounds(listed[0], groups) if groups and rank == 1 else ""
    factors = [_build_indexed_factor(source[k], k, bounds, table=table) for k in used if source[k]]
    middle: list[Dim] = []
    for j in range(rank):
        middle.append(call.fresh(0, used[0] + j, data=True))
    results: list[Dim] = [*source[: used[0]], *middle, *source[used[-1] + 1 :]]
    for i, dim in enumerate(source):
        if i not in used and dim:
            j = i if i < used[0] else i - len(used) + rank
            factors.append(Factor("pass", dim, ((0, i), (~0, j))))
    factors += [
        Factor("unshardable", d, ((~0, used[0] + j),), grouped=bounds)
        for j, d in enumerate(middle)
        if d
    ]
    emit = "lookup" if table else ""
    return NodeRule(tuple(factors), (tuple(results),), linear=(frozenset({0}),), emit=emit)


def assign(call: Call) -> NodeRule | None:
    """`x[:, i, j] = y`: the indexed dims are unshardable; the others pass if `y` has them too.

    `y` is broadcast to the selected elements. If an index repeats, ranks may store different values
    of `y`, so the op is linear only if it accumulates.
    """
    used = _find_indexed_dims(cast("list[Any]", call.arguments["indices"]))
    if not used:
        return None
    source, *indices, written = call.operands
    chosen = (
        len(source) - len(used) + max(map(len, indices))
    )  # how many dims the selected elements have
    factors = [Factor("unshardable", source[k], ((0, k), (~0, k))) for k in used if source[k]]
    results, places = list(source), set[int]()
    for i in (i for i in range(len(source)) if i not in used):
        j = i if i < used[0] else i + chosen - len(source)
        at = j + len(written) - chosen
        places.add(at)
        if at < 0 or call.forest.size(written[at]).static == 1:  # broadcast
            factors += [Factor("pass", source[i], ((0, i), (~0, i)))] if source[i] else []
        else:
            results[i], passing = _pass_dim(call, i, [(0, i), (len(indices) + 1, at)])
            factors += passing
    others = [(k + 1, i, d) for k, dims in enumerate(indices) for i, d in enumerate(dims)]
    others += [(len(indices) + 1, i, d) for i, d in enumerate(written) if i not in places]
    factors += [Factor("unshardable", d, ((k, i),)) for k, i, d in others if d]
    linear = (frozenset({0, len(indices) + 1}),) if call.arguments.get("accumulate") else ()
    return NodeRule(tuple(factors), (tuple(results),), linear=linear)


def _find_indexed_dims(listed: list[Any]) -> list[int]:
    """The indexed dims; none if they are not consecutive, or if a mask indexes several."""
    if any(item is not None and _is_mask(item.meta["val"]) for item in listed):
        return []
    used = [k for k, item in enumerate(listed) if item is not None]
    return used if used and used == list(range(used[0], used[-1] + 1)) else []


def _build_indexed_factor(dim: Dim, at: int, bounds: str, *, table: bool) -> Factor:
    """The factor of an indexed dim: a sum over ranks for rows, otherwise unshardable."""
    slots: tuple[Slot, ...] = ((0, at),)
    if table:
        return Factor("reduce", dim, slots, "sum", block=True, grouped=bounds)
    return Factor("unshardable", dim, slots)


def _is_integer(index: torch.Tensor) -> bool:
    """Whether an index has positions, not booleans."""
    return index.dtype in (torch.int32, torch.int64)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8) and index.dim() > 1


def lookup(call: Call) -> NodeRule | None:
    """Elements of one dim are read or written at an index: it is unshardable, the others pass.

    Options: `like` = number of the tensor argument whose sizes the result has; `passes` = True if
    the indexed dim of that one passes (gather). An index of one dim belongs to the indexed dim.
    """
    like = find_operand(call, cast(int, call.row.options["like"]))
    if like is None or like < 0:
        return None
    at = call.axis(call.arguments["dim"], len(call.operands[0]))
    slots = [_list_slots(call, i, at) for i in range(len(call.operands[0]))]
    factors: list[Factor] = []
    results: list[Dim] = []
    for i, own in enumerate(slots):
        dim, new = _pass_dim(call, i, own) if i != at else _look_up_dim(call, i, own, like)
        results.append(dim)
        factors += new
    linear = renumber_sets(call, call.row.linear)
    return NodeRule(tuple(factors), (tuple(results),), linear=linear)


def _list_slots(call: Call, i: int, at: int) -> list[Slot]:
    """The slots of dim `i` of the indexed tensor in all operands."""
    rank = len(call.operands[0])
    slots: list[Slot] = []
    for k, dims in enumerate(call.operands):
        if len(dims) == rank:
            slots.append((k, i))
        elif len(dims) == 1 and i == at:
            slots.append((k, 0))
    return slots


def _pass_dim(call: Call, i: int, slots: list[Slot]) -> tuple[Dim, list[Factor]]:
    """A dim other than the indexed one: it passes if all operands have the same size there."""
    dims = [call.operands[k][d] for k, d in slots]
    size = call.sizes[0][i]
    same = all(call.forest.size(d) == size and call.forest.unify(dims[0], d) for d in dims)
    if same:
        return dims[0], [Factor("pass", dims[0], (*slots, (~0, i)))] if dims[0] else []
    out = call.fresh(0, i)
    unshardable = [*zip(dims, slots, strict=True), (out, (~0, i))]
    return out, [Factor("unshardable", d, (slot,)) for d, slot in unshardable if d]


def _look_up_dim(call: Call, i: int, slots: list[Slot], like: int) -> tuple[Dim, list[Factor]]:
    factors: list[Factor] = []
    own: Dim = ()
    for k, d in slots:
        dim = call.operands[k][d]
        places: tuple[Slot, ...] = ((k, d),)
        kind: FactorKind = "unshardable"
        if k == like:
            own, places = dim, ((k, d), (~0, i))
            kind = "pass" if call.row.options.get("passes") else "unshardable"
        if dim:
            factors.append(Factor(kind, dim, places))
    return own, factors
