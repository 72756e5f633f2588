"""What one rank does for each primitive of the conversion table: one function each.

A primitive maps one tensor of each rank to one tensor of each. If ranks have to communicate, the
function yields its input to the collective and is sent the result; the communicator decides whether
real processes run it or one process with all ranks.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from autotp.algebra.placement import Collective, Primitive
from autotp.algebra.split import Split
from autotp.dtypes import choose_sum_dtype
from autotp.errors import PlanError
from autotp.runtime.ops.blocks import (
    concatenate_shards,
    fit_local_split,
    keep_first_copy,
    slice_block,
    write_block,
)
from autotp.runtime.ops.communicator import Communicator, Message
from autotp.runtime.ops.grouped_rows import move_rows_back, move_rows_first

Steps: TypeAlias = Generator[Message, Tensor, Tensor]
"""One rank's part of a primitive with a collective: yields its message, is sent the result."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim and how it is split."""

    dim: int
    split: Split

    @staticmethod
    def of(numbers: Sequence[int]) -> "Cut | None":
        """Decode what `encode` wrote; None for no numbers."""
        return Cut(numbers[0], Split.decode(numbers[1:])) if numbers else None

    def encode(self) -> list[int]:
        """Encode the dim, followed by the flat form of the split."""
        return [self.dim, *self.split.encode()]

    def is_in_rank_order(self, num_dims: int, ranks: int) -> bool:
        """Whether the shards in rank order, one after the other in memory, are the full tensor."""
        split = self.split
        blocks = split.is_block(ranks) and split.is_even(ranks) and split.is_exact(ranks)
        return self.dim % num_dims == 0 and blocks

    def list_lengths(self, x: Tensor, rank: int, ranks: int) -> list[int]:
        """List the local sizes of the split dim on all ranks, if `x` is the shard of `rank`."""
        cut = fit_local_split(self.split, x.size(self.dim), self.dim, rank, ranks)
        return [cut.local_length(r, ranks) for r in range(ranks)]


_NOWHERE = Cut(0, Split(1, ()))


@dataclass(frozen=True, slots=True)
class Wire:
    """The arguments of a primitive besides its tensor.

    - `cut`: of the sliced, gathered or scattered dim; for all_to_all, of its input.
    - `to`: for all_to_all, of its result; otherwise the same as `cut`.
    - `dtype`: the least dtype of sums; None for the tensor's own.
    - `bounds`: where each group of the rows along `cut` ends.
    """

    cut: Cut = _NOWHERE
    to: Cut = _NOWHERE
    dtype: torch.dtype | None = None
    bounds: Tensor | None = None

    def widen(self, x: Tensor) -> Tensor:
        """Convert `x` to the dtype of the sum."""
        return x.to(choose_sum_dtype(x.dtype, self.dtype))

    def reversed(self) -> "Wire":
        """Give the arguments of the backward pass."""
        return replace(self, cut=self.to, to=self.cut)

    @property
    def rows(self) -> tuple[Tensor, int]:
        """The bounds of grouped rows, and the dim along which they are grouped."""
        assert self.bounds is not None, "rows are grouped by their bounds"
        return self.bounds, self.cut.dim


def run_primitive(
    primitive: Primitive, xs: Sequence[Tensor], wire: Wire, communicator: Communicator
) -> Sequence[Tensor]:
    """Run `primitive` on `xs`, the tensors of the communicator's ranks."""
    ranks, size = communicator.ranks, communicator.size
    if primitive.before:
        run = LOCAL[primitive.before]
        xs = [run(x, wire, rank, size) for rank, x in zip(ranks, xs, strict=True)]
    if primitive.collective:
        begin = _COLLECTIVE[primitive.collective]
        steps = [begin(x, wire, rank, size) for rank, x in zip(ranks, xs, strict=True)]
        answers = communicator.exchange(primitive.collective, [next(step) for step in steps])
        xs = [_finish(step, answer) for step, answer in zip(steps, answers, strict=True)]
    if primitive.after:
        run = LOCAL[primitive.after]
        xs = [run(x, wire, rank, size) for rank, x in zip(ranks, xs, strict=True)]
    return xs


def _finish(step: Steps, answer: Tensor) -> Tensor:
    try:
        step.send(answer)
    except StopIteration as end:
        return end.value
    raise AssertionError("a primitive runs one collective")


# ── without communication ────────────────────────────────────────────────────────────────────────


def _identity(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return x.view_as(x)


def _slice(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return slice_block(x, wire.cut.dim, wire.cut.split, rank, ranks)


def _pad(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return write_block(x, wire.cut.dim, wire.cut.split, rank, ranks)


def _slice_first(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    own = _slice(x, wire, rank, ranks)
    return keep_first_copy(own, wire.cut.dim, wire.cut.split, rank, ranks)


def _keep_first(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return torch.zeros_like(x) if rank else x.view_as(x)


def _rows_first(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return move_rows_first(x, *wire.rows, rank, ranks)


def _rows_back(x: Tensor, wire: Wire, rank: int, ranks: int) -> Tensor:
    return move_rows_back(x, *wire.rows, rank, ranks)


LOCAL: Mapping[str, Callable[[Tensor, Wire, int, int], Tensor]] = {
    "identity": _identity,
    "slice": _slice,
    "pad": _pad,
    "slice_first": _slice_first,
    "keep_first": _keep_first,
    "rows_first": _rows_first,
    "rows_back": _rows_back,
}
"""The primitives without communication: (tensor, arguments, rank, ranks) to tensor."""


# ── with communication ───────────────────────────────────────────────────────────────────────────


def _all_reduce(x: Tensor, wire: Wire, rank: int, ranks: int) -> Steps:
    total = yield Message(wire.widen(x))
    return total.to(x.dtype)


def _all_gather(x: Tensor, wire: Wire, rank: int, ranks: int) -> Steps:
    cut = wire.cut
    if cut.is_in_rank_order(x.dim(), ranks):
        return (yield Message(x))
    if cut.split.is_even(ranks):
        rows = yield Message(x)
        return concatenate_shards(rows.chunk(ranks), cut.dim, cut.split)
    lengths = cut.list_lengths(x, rank, ranks)
    rows = yield Message(_pad_to(x, cut.dim, max(lengths)))
    parts = zip(rows.chunk(ranks), lengths, strict=True)
    return concatenate_shards([part.narrow(cut.dim, 0, n) for part, n in parts], cut.dim, cut.split)


def _pad_to(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad `x` with zeros to `length`: collectives need one shape on all ranks."""
    after = x.dim() - 1 - dim % x.dim()
    return functional.pad(x, [0, 0] * after + [0, length - x.size(dim)])


def _reduce_scatter(x: Tensor, wire: Wire, rank: int, ranks: int) -> Steps:
    dim = wire.cut.dim
    if wire.cut.is_in_rank_order(x.dim(), ranks):
        local = yield Message(wire.widen(x))
        return local.to(x.dtype)
    pieces = [slice_block(x, dim, wire.cut.split, r, ranks) for r in range(ranks)]
    longest = max(piece.size(dim) for piece in pieces)
    stacked = torch.cat([_pad_to(piece, dim, longest) for piece in pieces])
    local = yield Message(wire.widen(stacked))
    return local.to(x.dtype).narrow(dim, 0, pieces[rank].size(dim))


def _all_to_all(x: Tensor, wire: Wire, rank: int, ranks: int) -> Steps:
    cut, to = wire.cut, wire.to
    at = cut.dim % x.dim()
    if at == to.dim % x.dim():
        raise PlanError(
            f"an all-to-all of {list(x.shape)} cannot gather and shard the same dim {at}. "
            "Gather it with an all-gather first, then shard the result."
        )
    pieces = [slice_block(x, to.dim, to.split, r, ranks) for r in range(ranks)]
    own = list(pieces[rank].shape)
    shapes = [[*own[:at], n, *own[at + 1 :]] for n in cut.list_lengths(x, rank, ranks)]
    sent, expected = [p.numel() for p in pieces], [prod(shape) for shape in shapes]
    flat = yield Message(torch.cat([p.flatten() for p in pieces]), sent, expected)
    received = [p.view(s) for p, s in zip(flat.split(expected), shapes, strict=True)]
    return concatenate_shards(received, cut.dim, cut.split)


_COLLECTIVE: Mapping[Collective, Callable[[Tensor, Wire, int, int], Steps]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
