"""Rules of ops over positions: windows, resizing, padding, and statistics per channel."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from autotp.algebra.axis import Dim
from autotp.algebra.size import ONE, Size
from autotp.oprules.derive.call import Binding, Call, apply_notation, renumber_sets
from autotp.oprules.notation import parse_rule
from autotp.oprules.rule import Factor, NodeRule


def windows(call: Call) -> NodeRule | None:
    """Windows over the last dims (pooling, resizing): unshardable, with new sizes; others pass.

    Options: `dims` = how many dims.
    """
    rank, count = len(call.operands[0]), cast(int, call.row.options["dims"])
    linear = renumber_sets(call, call.row.linear)
    return _resize_dims(call, range(rank - count, rank), linear)


def pad(call: Call) -> NodeRule | None:
    """Padded dims are unshardable, with new sizes; `pad` has two numbers per dim, last dim first.

    Padding with zeros or with copies of elements is linear; padding with another constant is not.
    """
    pad = cast("Sequence[Any]", call.arguments["pad"])
    rank = len(call.operands[0])
    grown = {
        rank - 1 - k // 2 for k, count in enumerate(pad) if not (type(count) is int and count == 0)
    }
    constant = call.arguments.get("mode", "constant") == "constant"
    linear = not constant or call.arguments.get("value") in (None, 0)
    return _resize_dims(call, grown, (frozenset({0}),) if linear else ())


def _resize_dims(
    call: Call, chosen: Iterable[int], linear: tuple[frozenset[int], ...]
) -> NodeRule | None:
    """The dims `chosen` are unshardable and have new sizes in the results; the others pass."""
    dims, count, new = call.operands[0], len(call.sizes), set(chosen)
    if any(len(sizes) != len(dims) for sizes in call.sizes):
        return None
    results: list[list[Dim]] = [[] for _ in range(count)]
    factors: list[Factor] = []
    for i, dim in enumerate(dims):
        own = [call.fresh(k, i, data=True) if i in new else dim for k in range(count)]
        for result, one in zip(results, own, strict=True):
            result.append(one)
        if i in new:
            places = [((0, i), dim), *(((~k, i), one) for k, one in enumerate(own))]
            factors += [Factor("unshardable", one, (slot,)) for slot, one in places if one]
        elif dim:
            factors.append(Factor("pass", dim, ((0, i), *((~k, i) for k in range(count)))))
    return NodeRule(tuple(factors), tuple(map(tuple, results)), linear=linear)


def channels(call: Call) -> NodeRule | None:
    """Each channel (dim 1) has its own numbers; the dims of a statistic are unshardable.

    Options: `training` = the argument that says whether statistics over all dims but the channels
    are computed. Further results, which are statistics or empty, are unshardable.
    """
    rest = _name_positions(call)
    unshardable = (
        ["b", *rest] if call.arguments.get(str(call.row.options.get("training", ""))) else []
    )
    shape = " ".join(["b", "c", *rest])
    numbers = ", ".join(["c"] * (len(call.positions) - 1))
    row = replace(call.row, whole=frozenset(unshardable))
    rule = apply_notation(replace(call, row=row), parse_rule(f"{shape}, {numbers} -> {shape}"))
    if rule is None:
        return None
    further = [
        tuple(call.fresh(k, i) for i in range(len(call.sizes[k])))
        for k in range(1, len(call.sizes))
    ]
    factors = [
        Factor("unshardable", dim, ((~k, i),))
        for k, dims in enumerate(further, 1)
        for i, dim in enumerate(dims)
    ]
    return replace(rule, factors=(*rule.factors, *factors), results=(*rule.results, *further))


def grouped(call: Call) -> NodeRule | None:
    """Statistics over groups of channels (dim 1) and positions: groups pass, the rest does not."""
    rest, count = _name_positions(call), Size(call.arguments["num_groups"])
    channels = "c" if count == ONE else "(g c)"
    shape = " ".join(["b", channels, *rest])
    row = replace(call.row, whole=frozenset(["c", *rest]))
    signature = parse_rule(f"{shape}, {channels}, {channels} -> {shape}")
    binding = Binding(replace(call, row=row), signature)
    shared = call.forest.add_dim(count)
    if shared:
        binding.dims["g"] = shared
    fits = [binding.bind_operand(signature.operands[k], k) for k in range(len(call.operands))]
    if not all(fits):
        return None
    return replace(binding.build_rule(), extra={"groups": (shared,)})


def patches(call: Call) -> NodeRule | None:
    """Windows next to each other: channels are major in a dim, elements of a window minor."""
    if len(call.operands[0]) != 4:
        return None  # without a batch
    batch, channels, *positions = call.operands[0]
    window = call.sizes[0][1].over(call.forest.size(channels))
    if window is None:
        return None
    inner, places = call.forest.add_dim(window), call.fresh(0, 2, data=True)
    factors = [
        Factor("pass", batch, ((0, 0), (~0, 0))),
        Factor("pass", channels, ((0, 1), (~0, 1))),
        Factor("unshardable", inner, ((~0, 1),)),
        *(Factor("unshardable", dim, ((0, 2 + k),)) for k, dim in enumerate(positions)),
        Factor("unshardable", places, ((~0, 2),)),
    ]
    result = (batch, (*channels, *inner), places)
    return NodeRule(tuple(f for f in factors if f.dim), (result,), linear=(frozenset({0}),))


def _name_positions(call: Call) -> list[str]:
    """A factor name for each dim after the channels."""
    return [f"s{k}" for k in range(len(call.operands[0]) - 2)]
