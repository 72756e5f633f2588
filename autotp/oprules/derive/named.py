"""Rules of ops with an argument that names contracted or unshardable dims."""

from typing import cast

from autotp.algebra.axis import Dim
from autotp.oprules.derive.call import Call, apply_notation
from autotp.oprules.notation import parse_rule
from autotp.oprules.rule import Factor, FactorKind, NodeRule


def along(call: Call) -> NodeRule | None:
    """The dims that an argument names are contracted or unshardable; every other dim passes.

    Options: `kind` = whole | sum | mean | max; `argument` = its name (default "dim"), or `dims` =
    the dims themselves; `keep` = True if the dims remain (softmax), otherwise the op's `keepdim`
    decides; `linear` = True if the op is linear.
    """
    options = call.row.options
    rank = len(call.operands[0])
    named = options.get("dims", call.arguments.get(str(options.get("argument", "dim"))))
    if named is None or named == []:
        chosen = set(range(rank))
    else:
        listed = cast("list[int]", named if isinstance(named, list | tuple) else [named])
        chosen = {call.axis(d, rank) for d in listed}
    keep = bool(options.get("keep", False))
    kept = keep or bool(call.arguments.get("keepdim", False))
    return _apply_along(call, chosen, str(options.get("kind", "whole")), keep=keep, kept=kept)


def _apply_along(call: Call, chosen: set[int], join: str, *, keep: bool, kept: bool) -> NodeRule:
    factors: list[Factor] = []
    results: list[list[Dim]] = [[] for _ in call.sizes]
    for i, dim in enumerate(call.operands[0]):
        j = len(results[0])
        if i in chosen:
            kind: FactorKind = "reduce" if join in ("sum", "mean") else "unshardable"
            if dim:
                factors.append(Factor(kind, dim, ((0, i),), join if kind == "reduce" else ""))
            for k, dims in enumerate(results):
                if kept:
                    dims.append(_keep_dim(call, dim, k, j, same=keep))
            continue
        if dim:
            factors.append(Factor("pass", dim, ((0, i), *((~k, j) for k in range(len(results))))))
        for dims in results:
            dims.append(dim)
    linear = (frozenset({0}),) if join in ("sum", "mean") or call.row.options.get("linear") else ()
    emit = call.row.emit or ("rescale" if join == "mean" else "")
    return NodeRule(
        tuple(factors),
        tuple(tuple(r) for r in results),
        linear=linear,
        emit=emit,
        loss=call.row.loss,
    )


def _keep_dim(call: Call, dim: Dim, result: int, at: int, *, same: bool) -> Dim:
    if same and call.forest.size(dim) == call.sizes[result][at]:
        return dim
    return call.fresh(result, at, data=any(a.data for a in call.forest.flatten(dim)))


def unshardable(call: Call) -> NodeRule | None:
    """No dim can be sharded: the op is known, and no sharding of it is correct."""
    factors = [
        Factor("unshardable", d, ((k, i),))
        for k, dims in enumerate(call.operands)
        for i, d in enumerate(dims)
    ]
    results = tuple(
        tuple(call.fresh(k, j, data=True) for j in range(len(s))) for k, s in enumerate(call.sizes)
    )
    return NodeRule(tuple(factors), results, loss=call.row.loss)


def trailing(call: Call) -> NodeRule | None:
    """The last dims, as many as `normalized_shape` has, are unshardable in every operand."""
    count = len(cast("list[int]", call.arguments["normalized_shape"]))
    names = " ".join(f"n{k}" for k in range(count))
    others = ", ".join([names] * (len(call.positions) - 1))
    rule = apply_notation(call, parse_rule(f"... {names}, {others} -> ... {names}"))
    if rule is None:
        return None
    rank = len(call.operands[0])
    last = {(0, rank - 1 - k) for k in range(count)}
    factors = tuple(
        Factor("unshardable", f.dim, f.slots) if last & set(f.slots) else f for f in rule.factors
    )
    return NodeRule(factors, rule.results)
