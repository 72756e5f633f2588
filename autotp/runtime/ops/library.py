"""The ops of `torch.ops.autotp`: one per conversion, with the conjugate as its backward.

    copy, reduce, reduce_copy, keep_first, first_gradient          (x, group)
    scatter, scatter_partial, gather, gather_copy, reduce_scatter  (x, dim, split, group)
    exchange                              (x, dim, split, to_dim, to_split, group)
    own_rows, own_rows_partial, rows_in_place, reduce_rows, reduce_rows_copy
                                          (x, bounds, dim, group)
    share_gradients       (xs, cuts, group): sums their gradients, one bucket per dtype and
    sub-group local_index           (index, size, group, absent=False): localises a lookup in `size`
    rows;
                          `absent`: ids that no rank has stand for no row
    local_bounds          (bounds, group): where each group of rows of this rank ends

`split` is `Split.encode()`, `group` the name of a process group. Ops that sum take `dtype=`, in
which they sum. The table in `algebra.placement` defines all of them: each op runs one primitive
forward and one backward, and because the swapped pair is the derivative of the backward, gradients
of gradients are correct too.

The ops are composites over an autograd.Function: readable nodes in a graph, while tracing sees the
functional collectives inside. The raw collectives are not enough: the backward of an all-reduce is
another all-reduce, which multiplies the gradient of a replicated loss by the size of the group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import FunctionCtx

from autotp.algebra.placement import CONVERSION_OPS, Conversion
from autotp.algebra.split import Peers, Split
from autotp.dtypes import choose_sum_dtype
from autotp.runtime.ops.blocks import list_segments, reorder_segments
from autotp.runtime.ops.communicator import Communicator, Processes
from autotp.runtime.ops.grouped_rows import find_own_bounds, localise_index
from autotp.runtime.ops.primitives import Cut, Wire, run_primitive

LIBRARY = torch.library.Library("autotp", "DEF")
"""Keeps the ops alive: they are deregistered with it."""

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of an op on one rank, by name."""

Op: TypeAlias = Callable[[Sequence[Arguments], Communicator], list[Any]]
"""An op on the ranks of a communicator: the arguments of each rank to the result of each."""

_TYPES = {
    "bounds": "Tensor",
    "dim": "int",
    "split": "int[]",
    "to_dim": "int",
    "to_split": "int[]",
}


def write_schema(conversion: Conversion) -> str:
    """Write the signature of a conversion's op.

    write_schema(CONVERSIONS["R~", "R"])  # first_gradient(Tensor(a) x, str group) -> Tensor(a)
    """
    tensor = "Tensor(a)" if conversion.forward.aliases else "Tensor"
    given = "".join(f", {_TYPES[name]} {name}" for name in conversion.forward.arguments)
    dtype = ", *, ScalarType? dtype=None" if conversion.sums else ""
    return f"{conversion.op}({tensor} x{given}, str group{dtype}) -> {tensor}"


def bind_arguments(
    op: OpOverload, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Bind the arguments of a call of `op` to names; those without a value are absent."""
    return {**dict(zip(_list_argument_names(op), positional, strict=False)), **keywords}


@cache
def _list_argument_names(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)  # pyright: ignore[reportPrivateUsage]


def read_wire(arguments: Arguments) -> Wire:
    """Read the arguments of a conversion, besides the tensor and the group."""
    cut = Cut(arguments.get("dim", 0), Split.decode(arguments.get("split", (1,))))
    to = cut
    if "to_dim" in arguments:
        to = Cut(arguments["to_dim"], Split.decode(arguments["to_split"]))
    return Wire(cut, to, arguments.get("dtype"), arguments.get("bounds"))


# ── one autograd node for all ranks at hand ──────────────────────────────────────────────────────


class _Converting(FunctionCtx):
    conversion: Conversion
    wire: Wire
    communicator: Communicator


class _Convert(torch.autograd.Function):
    """Runs a conversion forward; its gradient runs the conversion reversed."""

    @staticmethod
    def forward(
        ctx: _Converting,
        conversion: Conversion,
        wire: Wire,
        communicator: Communicator,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.conversion, ctx.wire, ctx.communicator = conversion, wire, communicator
        return tuple(run_primitive(conversion.forward, xs, wire, communicator))

    @staticmethod
    def backward(ctx: _Converting, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        conversion = ctx.conversion.reverse()
        with ctx.communicator.backward(str(conversion.forward)) as communicator:
            back = _convert(gradients, conversion, ctx.wire.reversed(), communicator)
        return None, None, None, *back


def _convert(
    xs: Sequence[Tensor], conversion: Conversion, wire: Wire, communicator: Communicator
) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = _Convert.apply(conversion, wire, communicator, *xs)
    return results


class _Sharing(FunctionCtx):
    communicator: Communicator
    dtype: torch.dtype | None
    cuts: list[Cut | None]
    needs_input_grad: tuple[bool, ...]


class _ShareGradients(torch.autograd.Function):
    """Aliases of all ranks' inputs; gradients are summed over the ranks with the same values."""

    @staticmethod
    def forward(
        ctx: _Sharing,
        communicator: Communicator,
        dtype: torch.dtype | None,
        cuts: list[Cut | None],
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.communicator, ctx.dtype, ctx.cuts = communicator, dtype, cuts
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: _Sharing, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        width, wants = len(ctx.cuts), ctx.needs_input_grad[3:]
        wanted = [k for k in range(width) if wants[k]]
        rows = [[k + start for k in wanted] for start in range(0, len(gradients), width)]
        given = [[gradients[k] for k in row] for row in rows]
        with ctx.communicator.backward("the sum of gradients") as communicator:
            totals = _share_in_runs(given, [ctx.cuts[k] for k in wanted], ctx.dtype, communicator)
        results: list[Tensor | None] = [None] * len(gradients)
        for row, own in zip(rows, totals, strict=True):
            for k, total in zip(row, own, strict=True):
                results[k] = total
        return None, None, None, *results


def _share_in_runs(
    gradients: Sequence[Sequence[Tensor]],
    cuts: Sequence[Cut | None],
    dtype: torch.dtype | None,
    communicator: Communicator,
) -> list[list[Tensor]]:
    """Sum each rank's gradients, piece by piece, over the ranks that have the same."""
    pieces: list[list[Tensor]] = []
    peers: list[list[Peers]] = []
    for rank, row in zip(communicator.ranks, gradients, strict=True):
        split = [
            _list_pieces(x, cut, rank, communicator.size) for x, cut in zip(row, cuts, strict=True)
        ]
        pieces.append([piece for own, _ in split for piece in own])
        peers.append([among for _, them in split for among in them])
    sums = [iter(own) for own in _sum_gradients(pieces, peers, dtype, communicator)]
    return [
        [
            next(own)
            if cut is None
            else reorder_segments([next(own) for _ in cut.split.segments], cut.dim)
            for cut in cuts
        ]
        for own in sums
    ]


def _list_pieces(
    x: Tensor, cut: Cut | None, rank: int, ranks: int
) -> tuple[Sequence[Tensor], list[Peers]]:
    if cut is None:
        return (x,), [Peers(0, ranks, 1)]
    return list_segments(x, cut.dim, cut.split, rank, ranks)


def _sum_gradients(
    pieces: Sequence[Sequence[Tensor]],
    peers: Sequence[Sequence[Peers]],
    dtype: torch.dtype | None,
    communicator: Communicator,
) -> list[list[Tensor]]:
    """Sum each rank's pieces over their peers, with one all-reduce per dtype and peers."""
    results = [list(own) for own in pieces]
    kinds = [
        (choose_sum_dtype(x.dtype, dtype), p) for x, p in zip(pieces[0], peers[0], strict=True)
    ]
    for kind in dict.fromkeys(k for k in kinds if k[1].count > 1):
        places = [k for k, own in enumerate(kinds) if own == kind]
        inside = communicator.among([own[places[0]] for own in peers])
        flat = [torch.cat([own[k].to(kind[0]).flatten() for k in places]) for own in pieces]
        totals = _convert(flat, CONVERSION_OPS["reduce"], Wire(dtype=dtype), inside)
        for own, total in zip(results, totals, strict=True):
            runs = total.split([own[k].numel() for k in places])
            for k, run in zip(places, runs, strict=True):
                own[k] = run.view(own[k].shape).to(own[k].dtype)
    return results


# ── the ops ──────────────────────────────────────────────────────────────────────────────────────


def _make_conversion_op(conversion: Conversion) -> Op:
    def convert(given: Sequence[Arguments], communicator: Communicator) -> list[Any]:
        xs = [own["x"] for own in given]
        return list(_convert(xs, conversion, read_wire(given[0]), communicator))

    return convert


def _share_gradients(given: Sequence[Arguments], communicator: Communicator) -> list[Any]:
    cuts = [Cut.of(numbers) for numbers in given[0]["cuts"]]
    tensors = [x for own in given for x in own["xs"]]
    shared: tuple[Tensor, ...] = _ShareGradients.apply(
        communicator, given[0].get("dtype"), cuts, *tensors
    )
    starts = range(0, len(tensors), len(cuts))
    return [list(shared[start : start + len(cuts)]) for start in starts]


def _localise_index(given: Sequence[Arguments], communicator: Communicator) -> list[Any]:
    size = communicator.size
    return [
        localise_index(own["index"], own["size"], rank, size, absent=own.get("absent", False))
        for rank, own in zip(communicator.ranks, given, strict=True)
    ]


def _localise_bounds(given: Sequence[Arguments], communicator: Communicator) -> list[Any]:
    return [
        find_own_bounds(own["bounds"], rank, communicator.size)
        for rank, own in zip(communicator.ranks, given, strict=True)
    ]


def _register(signature: str, op: Op) -> Op:
    """Define the op, which runs in this process as one rank of its group."""
    LIBRARY.define(signature)
    name = signature.partition("(")[0]
    overload: OpOverload = getattr(torch.ops.autotp, name).default

    def run(*positional: Any, **keywords: Any) -> Any:
        given = bind_arguments(overload, positional, keywords)
        return op([given], Processes(given["group"]))[0]

    LIBRARY.impl(name, run, "CompositeImplicitAutograd")
    return op


OPS: Mapping[str, Op] = {
    **{
        name: _register(write_schema(of), _make_conversion_op(of))
        for name, of in CONVERSION_OPS.items()
    },
    "share_gradients": _register(
        "share_gradients(Tensor(a)[] xs, int[][] cuts, str group, *, ScalarType? dtype=None)"
        " -> Tensor(a)[]",
        _share_gradients,
    ),
    "local_index": _register(
        "local_index(Tensor index, int size, str group, bool absent=False) -> (Tensor, Tensor)",
        _localise_index,
    ),
    "local_bounds": _register("local_bounds(Tensor bounds, str group) -> Tensor", _localise_bounds),
}
"""Every op of `torch.ops.autotp`, by name, on the ranks of any communicator."""
