"""Rules of products that depend on ranks or arguments: matmul, attention, convolution."""

import re
from dataclasses import replace

from autotp.algebra.size import ONE, Size
from autotp.oprules.derive.call import Binding, Call, apply_notation, find_operand
from autotp.oprules.notation import Signature, parse_rule
from autotp.oprules.rule import Factor, NodeRule

_LETTER = re.compile(r"\.\.\.|\w")


def product(call: Call) -> NodeRule | None:
    """A matrix product of any ranks, with the broadcasting of torch.matmul."""
    ranks = min(len(call.operands[0]), 3), min(len(call.operands[1]), 3)
    forms = {
        (1, 1): "i, i -> ",
        (1, 2): "i, i o -> o",
        (1, 3): "i, ... i o -> ... o",
        (2, 1): "... i, i -> ...",
        (3, 1): "... i, i -> ...",
    }
    return apply_notation(call, parse_rule(forms.get(ranks, "... m i, ... i o -> ... m o")))


def attention(call: Call) -> NodeRule | None:
    """Scaled dot-product attention: heads and the head size of values pass, also with GQA."""
    head = "(h g)" if call.arguments.get("enable_gqa") else "h"
    number = find_operand(call, 3)
    flat = number is not None and number >= 0 and len(call.operands[number]) < 3
    mask = "q k" if flat else f"... {head} q k"
    return _attention(call, f"... {head} q e, ... h k e, ... h k v, {mask} -> ... {head} q v")


def _attention(call: Call, text: str) -> NodeRule | None:
    signature = parse_rule(text)
    binding = Binding(call, signature)
    for at in (1, 2, 0, 3):  # keys first: their heads give the size of `h` in `(h g)`
        number = find_operand(call, at)
        if number is None or number < 0:
            continue
        if not binding.bind_operand(signature.operands[at], number):
            return None
    return binding.build_rule()


def einsum(call: Call) -> NodeRule | None:
    """An equation with one letter per dim: letters that the result lacks are contracted."""
    left, arrow, right = str(call.arguments["equation"]).replace(" ", "").partition("->")
    operands = [_LETTER.findall(part) for part in left.split(",")]
    result = _LETTER.findall(right)
    every = [*operands, result]
    if not arrow or any("..." in dims[1:] or len(set(dims)) < len(dims) for dims in every):
        return None  # a diagonal, or an implicit result
    signature = parse_rule(f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}")
    contracted = dict.fromkeys({n for dims in operands for n in dims} - set(result), "sum")
    linear = tuple(frozenset({k}) for k in range(len(operands)))
    row = replace(call.row, reduce=contracted, linear=linear)
    positions = tuple(range(len(operands)))
    return apply_notation(replace(call, row=row, positions=positions), signature)


def convolution(call: Call) -> NodeRule | None:
    """Input channels are contracted within their group; spatial dims are unshardable."""
    if len(call.operands[0]) != len(call.sizes[0]):
        return None  # without a batch
    signature, spatial = _write_convolution(call)
    names = frozenset(f"{letter}{k}" for letter in "sk" for k in range(spatial))
    binding = Binding(replace(call, row=replace(call.row, whole=names)), signature)
    shared = call.forest.add_dim(Size(call.arguments["groups"]))
    if shared:
        binding.dims["g"] = shared  # no dim has the size of a group
    for k, pattern in enumerate(signature.operands[: len(call.operands)]):
        if not binding.bind_operand(pattern, k):
            return None
    rule = binding.build_rule()
    fresh = tuple(call.fresh(0, 2 + k, data=True) for k in range(spatial))
    factors = [Factor("unshardable", d, ((~0, 2 + k),)) for k, d in enumerate(fresh) if d]
    results = ((*rule.results[0], *fresh),)
    factors = (*rule.factors, *factors)
    return replace(rule, factors=factors, results=results, extra={"groups": (shared,)})


def _write_convolution(call: Call) -> tuple[Signature, int]:
    """The signature of a convolution, and the number of its spatial dims."""
    groups, spatial = call.arguments["groups"], len(call.operands[0]) - 2
    places = " ".join(f"s{k}" for k in range(spatial))
    window = " ".join(f"k{k}" for k in range(spatial))
    each = call.forest.size(call.operands[1][1])  # input channels of a group
    made = call.sizes[0][1].over(Size(groups))  # output channels of a group
    taken = "i" if groups == 1 or each != ONE else "1"
    ins = "i" if groups == 1 else "g" if each == ONE else "(g i)"
    outs = "o" if groups == 1 else "g" if made == ONE else "(g o)"
    text = f"b {ins} {places}, {outs} {taken} {window}, {outs} -> b {outs}"
    return parse_rule(text), spatial
