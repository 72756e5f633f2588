"""Symbolic sizes: read from FakeTensors as monomials, and evaluated at the sizes of real inputs."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from autotp.algebra.size import Size
from autotp.capture.program import Program
from autotp.dtypes import choose_sum_dtype


class Sizes:
    """Converts shapes to sizes; each distinct symbolic expression is read once."""

    def __init__(self) -> None:
        self.known: dict[Any, Size] = {}

    def read(self, meta: torch.Tensor) -> tuple[Size, ...]:
        """The sizes of a (fake or meta) tensor's dims."""
        return tuple(self.read_number(s) for s in meta.shape)

    def read_number(self, number: int | torch.SymInt) -> Size:
        """The size that a plain or symbolic number is."""
        return Size(number) if type(number) is int else self._read_symbolic(number)

    def _read_symbolic(self, size: int | torch.SymInt) -> Size:
        expression = cast(torch.SymInt, size).node.expr
        found = self.known.get(expression)
        if found is None:
            found = self.known[expression] = _read_monomial(_find_proven(cast(torch.SymInt, size)))
        return found


class Pricing:
    """The bytes of a program's values at the sizes of given inputs."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """For `program`, which reduces over the group in `reduce_dtype`."""
        self.reduce_dtype = reduce_dtype
        self.symbols: dict[Any, Any] = {}
        self.known: dict[Any, int] = {}
        placeholders = program.graph.find_nodes(op="placeholder")
        for name, node in zip(program.inputs, placeholders, strict=True):
            if name in inputs:
                shapes = node.meta["val"].shape, inputs[name].shape
                for size, real in zip(*shapes, strict=True):
                    if type(size) is not int and size.node.expr.is_Symbol:
                        self.symbols[size.node.expr] = real

    def count_bytes(self, meta: torch.Tensor) -> int:
        """The bytes of the unsharded tensor."""
        count = meta.element_size()
        for size in meta.shape:
            count *= self.evaluate(size)
        return count

    def evaluate(self, size: int | torch.SymInt) -> int:
        """The number that a size is."""
        return size if type(size) is int else self._evaluate_symbolic(size)

    def count_sum_bytes(self, meta: torch.Tensor) -> int:
        """The bytes of the unsharded tensor in the dtype in which the group sums it."""
        wide = choose_sum_dtype(meta.dtype, self.reduce_dtype)
        return self.count_bytes(meta) // meta.element_size() * wide.itemsize

    def _evaluate_symbolic(self, size: int | torch.SymInt) -> int:
        expression = cast(torch.SymInt, size).node.expr
        found = self.known.get(expression)
        if found is None:
            priced = expression.subs(self.symbols)
            found = int(priced) if priced.is_Integer else cast(torch.SymInt, size).node.hint or 1
            self.known[expression] = found
        return found


def read_data_sizes(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The batch and sequence sizes that costs are estimated for, and the `past` of a cache."""
    sizes: dict[str, int] = {}
    taken = {carried.taken for carried in program.carried.values()}
    for name in program.inputs:
        dims = program.data_dims.get(name, ())
        if name in taken:
            if len(dims) > 1:
                past = inputs[name].shape[dims[-1]]
                sizes["past"] = max(past, sizes.get("past", 0))
            continue
        for dim, kind in zip(dims, ("batch", "sequence"), strict=False):
            size = inputs[name].shape[dim]
            if sizes.setdefault(kind, size) != size:
                sizes[f"{name} {kind}"] = size
    return sizes


def _find_proven(size: torch.SymInt) -> Any:
    """The expression of a size, with the subexpressions replaced that a guard equates to numbers.

    Example: where a view required `8*s1 // s0 == 8`, `2*(8*s1 // s0)` becomes 16.
    """
    expression = size.node.expr
    if not expression.is_Symbol:
        for guard in size.node.shape_env.guards:
            known = guard.expr
            if known.is_Relational and known.rel_op == "==" and known.rhs.is_Integer:
                expression = expression.xreplace({known.lhs: known.rhs})
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
