"""Rules that depend on an op's arguments: views, permutations, slices, reductions over named dims.

`RULES` is a closed list; a row of rules/ names one of them. Each takes a `Call` and returns a
`NodeRule`, or None if it has no rule for the call (the node is then replicated). Nothing here knows
an op by name: arguments are found by their names in the op's schema.
"""

from collections.abc import Mapping

from autotp.errors import RuleError
from autotp.oprules.derive.call import Builder, Call, apply_notation
from autotp.oprules.derive.grouped import grouped_product
from autotp.oprules.derive.lookup import assign, embedding, index, lookup
from autotp.oprules.derive.named import along, trailing, unshardable
from autotp.oprules.derive.piece import (
    concatenate,
    divide,
    halves,
    place,
    put,
    select,
    stack,
    take,
    unbind,
)
from autotp.oprules.derive.product import attention, convolution, einsum, product
from autotp.oprules.derive.shape import expand, pair, permute, repeat, repeat_each, unpair, view
from autotp.oprules.derive.window import channels, grouped, pad, patches, windows
from autotp.oprules.rule import NodeRule


def apply_row(call: Call) -> NodeRule | None:
    """The rule of one node, by the signature or `derive` of its row; None if it does not fit.

    Raises RuleError if the row and the op differ in the number of results.
    """
    row = call.row
    rule = RULES[row.derive](call) if row.signature is None else apply_notation(call, row.signature)
    if rule is not None and len(rule.results) != len(call.sizes):
        raise RuleError(
            f"{row.source}, {row.op}: the row has {len(rule.results)} results, but the op returns "
            f"{len(call.sizes)}. Write one pattern per result after '->'"
        )
    return rule if rule is not None and _has_right_sizes(call, rule) else None


def _has_right_sizes(call: Call, rule: NodeRule) -> bool:
    """Whether the results of a rule have the sizes of the op's results."""
    sizes = [tuple(call.forest.size(dim) for dim in dims) for dims in rule.results]
    return sizes == call.sizes


RULES: Mapping[str, Builder] = {
    "along": along,
    "assign": assign,
    "attention": attention,
    "channels": channels,
    "concatenate": concatenate,
    "convolution": convolution,
    "divide": divide,
    "einsum": einsum,
    "expand": expand,
    "grouped": grouped,
    "grouped_product": grouped_product,
    "halves": halves,
    "index": index,
    "lookup": lookup,
    "pad": pad,
    "pair": pair,
    "patches": patches,
    "permute": permute,
    "place": place,
    "product": product,
    "put": put,
    "repeat": repeat,
    "repeat_each": repeat_each,
    "select": select,
    "stack": stack,
    "embedding": embedding,
    "take": take,
    "trailing": trailing,
    "unbind": unbind,
    "unpair": unpair,
    "view": view,
    "unshardable": unshardable,
    "windows": windows,
}
