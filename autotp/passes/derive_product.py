"""Rules of products whose form depends on ranks or arguments: matmul, attention."""

from autotp.core.notation import parse
from autotp.core.rule import NodeRule
from autotp.passes.derive_call import Binding, Call, notation, position

__all__ = ["attention", "product"]


def product(call: Call) -> NodeRule | None:
    """A matrix product of any ranks, as torch.matmul broadcasts it."""
    ranks = tuple(min(len(d), 3) for d in call.operands[:2])
    forms = {
        (1, 1): "i, i -> ",
        (1, 2): "i, i o -> o",
        (2, 1): "... i, i -> ...",
        (3, 1): "... i, i -> ...",
    }
    return notation(call, parse(forms.get(ranks, "... m i, ... i o -> ... m o")))


def attention(call: Call) -> NodeRule | None:
    """Scaled dot product attention: heads and the value's head size pass; grouped heads share."""
    mask = "... h q k"
    if call.arguments.get("enable_gqa"):
        key = "... h k e, ... h k v"
        query, mask, out = "... (h g) q e", "... (h g) q k", "... (h g) q v"
        return _attention(call, f"{query}, {key}, {mask} -> {out}")
    return _attention(call, f"... h q e, ... h k e, ... h k v, {mask} -> ... h q v")


def _attention(call: Call, text: str) -> NodeRule | None:
    signature = parse(text)
    binding = Binding(call, signature)
    for at in (1, 2, 0, 3):  # keys first: a group of the query's heads needs their size
        number = position(call, at)
        if number is None or number < 0:
            continue
        if not binding.operand(signature.operands[at], number):
            return None
    return binding.rule()
