"""The ops of `torch.ops.autotp`: one a change of placement, backward its conjugate.

    copy, reduce, reduce_copy, keep_first, first_gradient          (x, group)
    scatter, scatter_partial, gather, gather_copy, reduce_scatter  (x, dim, split, group)
    exchange                              (x, dim, split, to_dim, to_split, group)
    own_rows, own_rows_partial, rows_in_place, reduce_rows, reduce_rows_copy
                                          (x, bounds, dim, group)
    share_gradients       (xs, cuts, group): their gradients in one bucket a dtype and sub-group
    local_index           (index, size, group, absent=False): this rank's rows of a lookup in `size`
                          rows; `absent`: ids that no rank has stand for no row
    local_bounds          (bounds, group): where each of this rank's groups of rows ends

`split` is `Split.encode()`, `group` the name of a process group. Ops that sum take `dtype=`, in
which they sum. All is read off the table in `algebra.placement`: each op runs one primitive forward
and one backward, and since that pair swapped is the op's own derivative, gradients of gradients
hold too.

They are composite ops over an autograd.Function: readable nodes in a graph, yet tracing sees the
functional collectives inside. The raw collectives would not do: their own backward of an all-reduce
is another all-reduce, which multiplies the gradient of a replicated loss by the group's size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from autotp.algebra.placement import CONVERSIONS, Conversion, Primitive
from autotp.algebra.split import Peers, Split
from autotp.dtypes import sum_dtype
from autotp.runtime.group.failures import waiting
from autotp.runtime.group.process_group import among, rank_of, size_of
from autotp.runtime.ops.blocks import rejoined, segments
from autotp.runtime.ops.grouped_rows import local_index, own_bounds
from autotp.runtime.ops.primitives import PRIMITIVES, Cut, Wire

__all__ = ["LIBRARY", "schema"]

LIBRARY = torch.library.Library("autotp", "DEF")
"""Keeps the ops alive: they are deregistered with it."""

_ALIASING = {"identity", "slice", "keep_first"}
_CUTTING = {"slice", "pad", "all_gather", "reduce_scatter", "slice_first", "pad_reduce"}
_GROUPED = {"rows_first", "rows_back", "rows_back_reduce", "reduce_rows_first"}
_SUMMING = {"all_reduce", "reduce_scatter", "pad_reduce", "rows_back_reduce", "reduce_rows_first"}
_NOWHERE = Cut(0, Split(1, ()))


@dataclass(frozen=True, slots=True)
class _Step:
    """One conversion under way: the primitives of both directions, and what they need."""

    forward: Primitive
    backward: Primitive
    wire: Wire

    def reversed(self) -> "_Step":
        return _Step(self.backward, self.forward, self.wire.reversed())


class _Stepping(FunctionCtx):
    step: _Step


class _Sharing(FunctionCtx):
    wire: Wire
    cuts: list[Cut | None]
    likes: list[tuple[torch.Size, torch.dtype, torch.device]]
    needs_input_grad: tuple[bool, ...]


class _Convert(torch.autograd.Function):
    """Runs a step forward; its gradient runs the step reversed."""

    @staticmethod
    def forward(ctx: _Stepping, x: Tensor, step: _Step) -> Tensor:
        ctx.step = step
        return PRIMITIVES[step.forward](x, step.wire)

    @staticmethod
    def backward(ctx: _Stepping, *gradients: Tensor) -> tuple[Tensor, None]:
        step = ctx.step.reversed()
        with waiting(step.wire.group, f"the backward pass, {step.forward}"):
            return _converted(gradients[0], step), None


class _ShareGradients(torch.autograd.Function):
    """Aliases of the inputs; their gradients are summed over the ranks that hold the same."""

    @staticmethod
    def forward(
        ctx: _Sharing, wire: Wire, cuts: list[Cut | None], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.wire, ctx.cuts = wire, cuts
        ctx.likes = [(x.shape, x.dtype, x.device) for x in xs]
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: _Sharing, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [k for k, wants in enumerate(ctx.needs_input_grad[2:]) if wants]
        results: list[Tensor | None] = [None] * len(gradients)
        if any(gradients[k] is not None for k in wanted):
            full = [_materialized(gradients[k], *ctx.likes[k]) for k in wanted]
            with waiting(ctx.wire.group, "the backward pass, the sum of gradients"):
                totals = _shared(full, [ctx.cuts[k] for k in wanted], ctx.wire)
            for k, total in zip(wanted, totals, strict=True):
                results[k] = total
        return None, None, *results


def schema(conversion: Conversion) -> str:
    """The signature of a conversion's op.

    schema(CONVERSIONS["R~", "R"])  # first_gradient(Tensor(a) x, str group) -> Tensor(a)
    """
    primitives = {conversion.forward, conversion.backward}
    tensor = "Tensor(a)" if conversion.forward in _ALIASING else "Tensor"
    cut = ", int dim, int[] split" if primitives & (_CUTTING | {"all_to_all"}) else ""
    rows = ", Tensor bounds, int dim" if primitives & _GROUPED else ""
    to = ", int to_dim, int[] to_split" if "all_to_all" in primitives else ""
    dtype = ", *, ScalarType? dtype=None" if primitives & _SUMMING else ""
    return f"{conversion.op}({tensor} x{rows}{cut}{to}, str group{dtype}) -> {tensor}"


def _converted(x: Tensor, step: _Step) -> Tensor:
    result: Tensor = _Convert.apply(x, step)
    return result


def _implementation(conversion: Conversion) -> Callable[..., Tensor]:
    """The function of a conversion's op, with the arguments of `schema`."""

    def converted(x: Tensor, wire: Wire) -> Tensor:
        return _converted(x, _Step(conversion.forward, conversion.backward, wire))

    def plain(x: Tensor, group: str, *, dtype: torch.dtype | None = None) -> Tensor:
        return converted(x, Wire(group, _NOWHERE, _NOWHERE, dtype))

    def cut(
        x: Tensor, dim: int, split: list[int], group: str, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        place = Cut(dim, Split.decode(split))
        return converted(x, Wire(group, place, place, dtype))

    def exchange(
        x: Tensor, dim: int, split: list[int], to_dim: int, to_split: list[int], group: str
    ) -> Tensor:
        first, last = Cut(dim, Split.decode(split)), Cut(to_dim, Split.decode(to_split))
        return converted(x, Wire(group, first, last))

    def grouped(
        x: Tensor, bounds: Tensor, dim: int, group: str, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        place = Cut(dim, _NOWHERE.split)
        return converted(x, Wire(group, place, place, dtype, bounds))

    primitives = {conversion.forward, conversion.backward}
    if primitives & _GROUPED:
        return grouped
    if "all_to_all" in primitives:
        return exchange
    return cut if primitives & _CUTTING else plain


def _materialized(
    gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if gradient is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return gradient


def _shared(gradients: list[Tensor], cuts: Sequence[Cut | None], wire: Wire) -> list[Tensor]:
    """The gradients summed over the ranks that hold the same of a parameter, piece by piece."""
    rank, ranks = rank_of(wire.group), size_of(wire.group)
    everyone = Peers(0, ranks, 1)
    pieces: list[Tensor] = []
    peers: list[Peers] = []
    for gradient, cut in zip(gradients, cuts, strict=True):
        own, among_whom = ((gradient,), [everyone])
        if cut is not None:
            own, among_whom = segments(gradient, cut.dim, cut.split, rank, ranks)
        pieces += own
        peers += among_whom
    sums = iter(_summed(pieces, peers, wire))
    return [
        next(sums) if cut is None else rejoined([next(sums) for _ in cut.split.segments], cut.dim)
        for cut in cuts
    ]


def _summed(pieces: Sequence[Tensor], peers: Sequence[Peers], wire: Wire) -> list[Tensor]:
    """Each piece summed over its peers, by one all-reduce for each dtype and set of peers."""
    results = list(pieces)
    kinds = [(sum_dtype(x.dtype, wire.dtype), p) for x, p in zip(pieces, peers, strict=True)]
    for kind in dict.fromkeys(k for k in kinds if k[1].count > 1):
        places = [k for k, own in enumerate(kinds) if own == kind]
        flat = torch.cat([pieces[k].to(kind[0]).flatten() for k in places])
        inside = replace(wire, group=among(wire.group, kind[1]))
        total = _converted(flat, _Step("all_reduce", "identity", inside))
        runs = total.split([pieces[k].numel() for k in places])
        for k, run in zip(places, runs, strict=True):
            results[k] = run.view(pieces[k].shape).to(pieces[k].dtype)
    return results


def _share_gradients(
    xs: list[Tensor], cuts: list[list[int]], group: str, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    wire = Wire(group, _NOWHERE, _NOWHERE, dtype)
    shared: tuple[Tensor, ...] = _ShareGradients.apply(wire, [Cut.of(c) for c in cuts], *xs)
    return list(shared)


def _local_index(
    index: Tensor, size: int, group: str, absent: bool = False
) -> tuple[Tensor, Tensor]:
    return local_index(index, size, rank_of(group), size_of(group), absent=absent)


def _local_bounds(bounds: Tensor, group: str) -> Tensor:
    return own_bounds(bounds, rank_of(group), size_of(group))


def _register(signature: str, function: Callable[..., object]) -> None:
    LIBRARY.define(signature)
    name = signature.partition("(")[0]
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")


for _conversion in {c.op: c for c in CONVERSIONS.values()}.values():
    _register(schema(_conversion), _implementation(_conversion))
_register(
    "share_gradients(Tensor(a)[] xs, int[][] cuts, str group, *, ScalarType? dtype=None)"
    " -> Tensor(a)[]",
    _share_gradients,
)
_register(
    "local_index(Tensor index, int size, str group, bool absent=False) -> (Tensor, Tensor)",
    _local_index,
)
_register("local_bounds(Tensor bounds, str group) -> Tensor", _local_bounds)
