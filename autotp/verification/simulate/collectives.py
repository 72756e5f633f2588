"""The ops that ask for the group, each as one function on all ranks' arguments.

One autograd node stands for an op on all ranks, so that the backward pass runs in lockstep as well.
Ranks that ask for different things are an error: processes would hang.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from autotp.algebra.placement import CONVERSIONS, Conversion, Primitive
from autotp.algebra.split import Peers, Split, block
from autotp.cost.conversions import COLLECTIVES
from autotp.dtypes import sum_dtype
from autotp.errors import VerifyError
from autotp.runtime.ops.blocks import rejoined, segments
from autotp.runtime.ops.grouped_rows import local_index, own_bounds
from autotp.runtime.ops.primitives import Cut, Wire
from autotp.verification.simulate.primitives import PRIMITIVES

__all__ = ["JOINT", "NAMESPACES", "Arguments", "Joint", "Tally"]

Tally: TypeAlias = Counter[str]
"""Collectives run so far: `"forward all_reduce"` to its count."""

Arguments: TypeAlias = Mapping[str, Any]
"""What one rank gives an op: the op's argument names to values."""

Joint: TypeAlias = Callable[[Sequence[Arguments], Tally], list[Any]]
"""An op on all ranks: each rank's arguments to each rank's result."""

NAMESPACES = ("autotp", "_c10d_functional")
"""Ops of these namespaces ask for a group: they run jointly or not at all."""

_BLOCKS = Cut(0, block(-1))


# ── one autograd node for all ranks ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Move:
    """One direction of an op: `kind` is what is counted where it is a collective."""

    kind: str
    run: Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class _Step:
    """An op on all ranks under way, with its conjugate."""

    forward: _Move
    backward: _Move
    phase: str
    tally: Tally

    def reversed(self) -> "_Step":
        return _Step(self.backward, self.forward, "backward", self.tally)


class _Stepping(FunctionCtx):
    step: _Step


class _JointStep(torch.autograd.Function):
    """Runs a step on all ranks' tensors; its gradient runs the step reversed, on all ranks."""

    @staticmethod
    def forward(ctx: _Stepping, step: _Step, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        if step.forward.kind in COLLECTIVES:
            step.tally[f"{step.phase} {COLLECTIVES[step.forward.kind]}"] += 1
        return tuple(step.forward.run(xs))

    @staticmethod
    def backward(ctx: _Stepping, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_stepped(gradients, ctx.step.reversed())


class _Sharing(FunctionCtx):
    size: int
    dtype: torch.dtype | None
    cuts: list[Cut | None]
    tally: Tally
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _JointShareGradients(torch.autograd.Function):
    """Aliases of all ranks' tensors; gradients are summed over the ranks that hold the same."""

    @staticmethod
    def forward(
        ctx: _Sharing,
        size: int,
        dtype: torch.dtype | None,
        cuts: list[Cut | None],
        tally: Tally,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.size, ctx.dtype, ctx.cuts, ctx.tally = size, dtype, cuts, tally
        ctx.save_for_backward(*xs)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: _Sharing, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        if all(gradient is None for gradient in gradients):
            return None, None, None, None, *(None for _ in gradients)
        full = [
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(ctx.saved_tensors, gradients, strict=True)
        ]
        width = len(full) // ctx.size
        kinds: set[tuple[torch.dtype, Peers]] = set()
        sums: list[list[Tensor]] = []
        for k, cut in enumerate(ctx.cuts):
            total, peers = _shared(full[k::width], cut, ctx.dtype)
            sums.append(total)
            kinds |= {(sum_dtype(full[k].dtype, ctx.dtype), p) for p in peers if wanted[k]}
        ctx.tally["backward all_reduce"] += len(kinds)
        results = [sums[k][rank] for rank in range(ctx.size) for k in range(width)]
        kept = (r if w else None for r, w in zip(results, wanted, strict=True))
        return None, None, None, None, *kept


def _shared(
    xs: Sequence[Tensor], cut: Cut | None, dtype: torch.dtype | None
) -> tuple[list[Tensor], set[Peers]]:
    """One parameter's gradients summed over the ranks that hold the same, and rank 0's peers."""
    wire, ranks = Wire("", _BLOCKS, _BLOCKS, dtype), len(xs)
    if cut is None:
        return PRIMITIVES["all_reduce"](xs, wire), {Peers(0, ranks, 1)}
    rows = [segments(x, cut.dim, cut.split, rank, ranks) for rank, x in enumerate(xs)]
    results: list[list[Tensor]] = [[] for _ in xs]
    for k in range(len(cut.split.segments)):
        for rank, (_, peers) in enumerate(rows):
            total = PRIMITIVES["all_reduce"]([rows[r][0][k] for r in peers[k].ranks], wire)
            results[rank].append(total[0])
    shared = {p for p in rows[0][1] if p.count > 1}
    return [rejoined(pieces, cut.dim) for pieces in results], shared


def _stepped(xs: Sequence[Tensor], step: _Step) -> list[Tensor]:
    results: tuple[Tensor, ...] = _JointStep.apply(step, *xs)
    return list(results)


# ── the ops ──────────────────────────────────────────────────────────────────────────────────────


def _conversion(conversion: Conversion) -> Joint:
    """The joint form of `torch.ops.autotp.<conversion.op>`."""

    def joint(given: Sequence[Arguments], tally: Tally) -> list[Any]:
        wire = replace(_wire(_agreed(given, "x", "bounds")), bounds=_bounds(given))
        forward = _move(conversion.forward, wire)
        backward = _move(conversion.backward, wire.reversed())
        return _stepped([g["x"] for g in given], _Step(forward, backward, "forward", tally))

    return joint


def _bounds(given: Sequence[Arguments]) -> Tensor | None:
    """Where the groups of the rows end: every rank must say the same."""
    bounds = [g["bounds"] for g in given if "bounds" in g]
    for rank, other in enumerate(bounds):
        if not torch.equal(bounds[0], other):
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} have their rows grouped otherwise: groups end "
                f"at {bounds[0].tolist()} and {other.tolist()}. Give every rank the same choice of "
                "groups"
            )
    return bounds[0] if bounds else None


def _wire(agreed: Arguments) -> Wire:
    cut = Cut(agreed.get("dim", 0), Split.decode(agreed.get("split", (1,))))
    to = Cut(agreed["to_dim"], Split.decode(agreed["to_split"])) if "to_dim" in agreed else cut
    return Wire(agreed["group"], cut, to, agreed.get("dtype"))


def _move(primitive: Primitive, wire: Wire) -> _Move:
    run = PRIMITIVES[primitive]
    return _Move(primitive, lambda xs: run(xs, wire))


def _agreed(given: Sequence[Arguments], *own: str) -> Arguments:
    """The arguments that must be the same on all ranks: all but `own`."""
    shared = [{k: v for k, v in arguments.items() if k not in own} for arguments in given]
    for rank, arguments in enumerate(shared):
        if arguments != shared[0]:
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} give one collective different arguments: "
                f"{shared[0]} and {arguments}. Give every rank the same graph"
            )
    return shared[0]


def _raw(forward: Primitive, backward: Primitive) -> Joint:
    """The joint form of a plain functional collective, whose backward is torch's own choice."""

    def joint(given: Sequence[Arguments], tally: Tally) -> list[Any]:
        agreed = _agreed(given, "input")
        if agreed.get("group_size", len(given)) != len(given):
            raise VerifyError(
                f"a collective is written for {agreed['group_size']} ranks and run by "
                f"{len(given)}. Build all ranks for one tp"
            )
        if agreed.get("reduce_op", "sum") != "sum":
            raise VerifyError(
                f"a collective reduces by {agreed['reduce_op']!r}; only 'sum' has a placement (P). "
                "Write it as a sum"
            )
        wire = Wire("", _BLOCKS, _BLOCKS)
        step = _Step(_move(forward, wire), _move(backward, wire), "forward", tally)
        return _stepped([g["input"] for g in given], step)

    return joint


def _exchange(given: Sequence[Arguments], tally: Tally) -> list[Any]:
    """The joint form of the plain all-to-all: piece k of dim 0 goes to rank k."""
    sent = [list(g["input_split_sizes"]) for g in given]
    received = [list(g["output_split_sizes"]) for g in given]
    if received != [list(column) for column in zip(*sent, strict=True)]:
        raise VerifyError(
            f"an all-to-all of {len(given)} ranks sends pieces of {sent} rows and expects "
            f"{received}. Make each rank expect what the others send it"
        )
    forward = _Move("all_to_all", partial(_exchanged, sizes=sent))
    backward = _Move("all_to_all", partial(_exchanged, sizes=received))
    return _stepped([g["input"] for g in given], _Step(forward, backward, "forward", tally))


def _exchanged(xs: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    rows = [x.split(list(pieces)) for x, pieces in zip(xs, sizes, strict=True)]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _wait(given: Sequence[Arguments], tally: Tally) -> list[Any]:
    return [g["tensor"] for g in given]


def _share_gradients(given: Sequence[Arguments], tally: Tally) -> list[Any]:
    agreed = _agreed(given, "xs")
    tensors = [x for g in given for x in g["xs"]]
    cuts = [Cut.of(numbers) for numbers in agreed["cuts"]]
    shared: tuple[Tensor, ...] = _JointShareGradients.apply(
        len(given), agreed.get("dtype"), cuts, tally, *tensors
    )
    width = len(tensors) // len(given)
    return [list(shared[rank * width : (rank + 1) * width]) for rank in range(len(given))]


def _local_index(given: Sequence[Arguments], tally: Tally) -> list[Any]:
    agreed = _agreed(given, "index")
    size, absent = agreed["size"], agreed.get("absent", False)
    return [
        local_index(g["index"], size, rank, len(given), absent=absent)
        for rank, g in enumerate(given)
    ]


def _local_bounds(given: Sequence[Arguments], tally: Tally) -> list[Any]:
    return [own_bounds(g["bounds"], rank, len(given)) for rank, g in enumerate(given)]


JOINT: Mapping[str, Joint] = {
    **{f"autotp::{conversion.op}": _conversion(conversion) for conversion in CONVERSIONS.values()},
    "autotp::share_gradients": _share_gradients,
    "autotp::local_index": _local_index,
    "autotp::local_bounds": _local_bounds,
    "_c10d_functional::all_reduce": _raw("all_reduce", "all_reduce"),
    "_c10d_functional::all_gather_into_tensor": _raw("all_gather", "reduce_scatter"),
    "_c10d_functional::reduce_scatter_tensor": _raw("reduce_scatter", "all_gather"),
    "_c10d_functional::all_to_all_single": _exchange,
    "_c10d_functional::wait_tensor": _wait,
}
"""Every op that asks for a group, by name: the closed list of what a rewritten graph may hold."""
