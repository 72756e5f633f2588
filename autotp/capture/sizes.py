"""Symbolic sizes: read off FakeTensors into monomials, and priced at the sizes of real inputs."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from autotp.algebra.size import Size
from autotp.capture.program import Program
from autotp.dtypes import choose_sum_dtype

__all__ = ["Pricing", "Sizes", "read_data_sizes"]


class Sizes:
    """Turns shapes into sizes; each distinct symbolic expression is read once."""

    def __init__(self) -> None:
        self.known: dict[Any, Size] = {}

    def of(self, meta: torch.Tensor) -> tuple[Size, ...]:
        """The sizes of a (fake or meta) tensor's dims."""
        return tuple(self.of_number(s) for s in meta.shape)

    def of_number(self, number: int | torch.SymInt) -> Size:
        """The size that a number is, in the same symbols."""
        return Size(number) if type(number) is int else self._symbolic(number)

    def _symbolic(self, size: int | torch.SymInt) -> Size:
        expression = cast(torch.SymInt, size).node.expr
        found = self.known.get(expression)
        if found is None:
            found = self.known[expression] = _read_monomial(_find_proven(cast(torch.SymInt, size)))
        return found


class Pricing:
    """The bytes of a program's values when its inputs have the sizes of `inputs`."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Of `program`, whose sums over the group are made in `reduce_dtype`."""
        self.reduce_dtype = reduce_dtype
        self.symbols: dict[Any, Any] = {}
        self.known: dict[Any, int] = {}
        placeholders = program.graph.find_nodes(op="placeholder")
        for name, node in zip(program.inputs, placeholders, strict=True):
            if name in inputs:
                given = inputs[name]
                for size, real in zip(node.meta["val"].shape, given.shape, strict=True):
                    if type(size) is not int and size.node.expr.is_Symbol:
                        self.symbols[size.node.expr] = real

    def bytes(self, meta: torch.Tensor) -> int:
        """The bytes of the whole tensor."""
        count = meta.element_size()
        for size in meta.shape:
            count *= self.number(size)
        return count

    def number(self, size: int | torch.SymInt) -> int:
        """What a size is."""
        return size if type(size) is int else self._value(size)

    def summed(self, meta: torch.Tensor) -> int:
        """The bytes of the whole tensor in the dtype in which it is summed over the group."""
        wide = choose_sum_dtype(meta.dtype, self.reduce_dtype)
        return self.bytes(meta) // meta.element_size() * wide.itemsize

    def _value(self, size: int | torch.SymInt) -> int:
        expression = cast(torch.SymInt, size).node.expr
        found = self.known.get(expression)
        if found is None:
            priced = expression.subs(self.symbols)
            found = int(priced) if priced.is_Integer else cast(torch.SymInt, size).node.hint or 1
            self.known[expression] = found
        return found


def read_data_sizes(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Batch and sequence of the inputs that the plan is priced for; how much `past` a cache has."""
    sizes: dict[str, int] = {}
    taken = {carried.taken for carried in program.carried.values()}
    for name in program.inputs:
        dims = program.data_dims.get(name, ())
        if name in taken:
            if len(dims) > 1:
                past = inputs[name].shape[dims[-1]]
                sizes["past"] = max(past, sizes.get("past", 0))
            continue
        for dim, word in zip(dims, ("batch", "sequence"), strict=False):
            size = inputs[name].shape[dim]
            if sizes.setdefault(word, size) != size:
                sizes[f"{name} {word}"] = size
    return sizes


def _find_proven(size: torch.SymInt) -> Any:
    """An expression in which what a guard of the capture says is a number is that number.

    Example: `8*s1 // s0` is 8 where a view of the forward needed that, and twice it is 16.
    """
    expression = size.node.expr
    if not expression.is_Symbol:
        for guard in size.node.shape_env.guards:
            told = guard.expr
            if told.is_Relational and told.rel_op == "==" and told.rhs.is_Integer:
                expression = expression.xreplace({told.lhs: told.rhs})
    return expression


def _read_monomial(expression: Any) -> Size:
    if expression.is_Integer:
        return Size(int(expression))
    coefficient, symbols = 1, list[str]()
    for factor in expression.args if expression.is_Mul else (expression,):
        if factor.is_Integer:
            coefficient *= int(factor)
        elif factor.is_Pow and factor.exp.is_Integer and factor.exp > 0:
            symbols += [str(factor.base)] * int(factor.exp)
        else:
            symbols.append(str(factor))
    return Size(coefficient, tuple(sorted(symbols)))
