"""All ranks of a group in one process, and the ops that they run together.

What ranks do is `runtime.ops.library` and `runtime.ops.primitives`, as in real processes; only
what carries their tensors differs. So a verification covers that code, and not the backend. The
collectives here are written without the backend's: sums in the order of the ranks, rows put one
after the other. One autograd node stands for an op on all ranks, so that the backward pass runs in
lockstep as well. Ranks that ask for different things are an error: processes would hang.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autotp.algebra.placement import FUNCTIONAL, Collective
from autotp.algebra.split import Peers
from autotp.errors import VerifyError
from autotp.runtime.ops.communicator import Message
from autotp.runtime.ops.library import OPS, Arguments

__all__ = ["JOINT", "NAMESPACES", "Lockstep", "Tally", "run_jointly"]

Tally: TypeAlias = Counter[str]
"""Collectives run so far: `"forward all_reduce"` to its count."""

NAMESPACES = ("autotp", "_c10d_functional")
"""Ops of these namespaces ask for a group: they run jointly or not at all."""

_RANK_ARGUMENTS = {"x", "xs", "index", "bounds", "input", "tensor", "input_split_sizes", "output_split_sizes"}
"""The arguments that are a rank's own; bounds are compared by value, and sizes when exchanged."""


@dataclass(frozen=True, slots=True)
class Lockstep:
    """All ranks of a group of `size`, in one process: a communicator that trusts nothing.

    - `tally`: counts the collectives, by `phase`.
    - `peers`: of each rank, those that it sums with; empty: all.
    """

    size: int
    tally: Tally
    phase: str = "forward"
    peers: tuple[Peers, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """All of them."""
        return range(self.size)

    def among(self, peers: Sequence[Peers]) -> "Lockstep":
        """All ranks, each of which sums with its peers alone."""
        return replace(self, peers=tuple(peers))

    @contextmanager
    def backward(self, what: str) -> Generator["Lockstep"]:
        """All ranks in their backward pass."""
        yield replace(self, phase="backward")

    def exchange(self, collective: Collective, messages: Sequence[Message]) -> list[Tensor]:
        """What the collective gives each rank; VerifyError where processes would hang."""
        self.tally[f"{self.phase} {collective}"] += 1
        xs = [message.x for message in messages]
        if collective == "all_to_all":
            return _exchange_rows(messages)
        _check_alike(xs)
        match collective:
            case "all_reduce":
                return self._sums(xs)
            case "all_gather":
                rows = torch.cat(xs)
                return [rows, *(rows.clone() for _ in xs[1:])]
            case "reduce_scatter":
                return [row.clone() for row in _sum_tensors(xs).chunk(self.size)]

    def _sums(self, xs: Sequence[Tensor]) -> list[Tensor]:
        sums = list(xs)
        for them in dict.fromkeys(self.peers or [Peers(0, self.size, 1)]):
            total = _sum_tensors([xs[rank] for rank in them.ranks])
            for rank in them.ranks:
                sums[rank] = total if rank == them.first else total.clone()
        return sums


def _sum_tensors(xs: Sequence[Tensor]) -> Tensor:
    first, *others = xs
    total = first.clone()
    for other in others:
        total += other
    return total


def _exchange_rows(messages: Sequence[Message]) -> list[Tensor]:
    """Of every rank, the rows that are for each of the others, in the order of their ranks."""
    sent = [list(message.sent) for message in messages]
    received = [list(message.received) for message in messages]
    if received != [list(column) for column in zip(*sent, strict=True)]:
        raise VerifyError(
            f"an all-to-all of {len(messages)} ranks sends pieces of {sent} rows and expects "
            f"{received}. Make each rank expect what the others send it"
        )
    rows = [message.x.split(sizes) for message, sizes in zip(messages, sent, strict=True)]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _check_alike(xs: Sequence[Tensor]) -> None:
    if len({(tuple(x.shape), x.dtype) for x in xs}) > 1:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in xs)
        raise VerifyError(
            f"the {len(xs)} ranks bring different tensors to one collective: {found}; processes "
            "would hang or mix memory. Make the local sizes equal"
        )


def _check_agreement(given: Sequence[Arguments]) -> None:
    """Raises VerifyError unless all ranks give the same arguments, but for their own tensors."""
    first, *others = [{k: v for k, v in own.items() if k not in _RANK_ARGUMENTS} for own in given]
    for rank, other in enumerate(others, 1):
        if other != first:
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} give one collective different arguments: "
                f"{first} and {other}. Give every rank the same graph"
            )
    bounds = [own["bounds"] for own in given if "bounds" in own]
    for rank, other in enumerate(bounds):
        if not torch.equal(bounds[0], other):
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} have their rows grouped otherwise: groups end "
                f"at {bounds[0].tolist()} and {other.tolist()}. Give every rank the same choice of "
                "groups"
            )


def _run_functional(collective: Collective, given: Sequence[Arguments], lockstep: Lockstep) -> list[Tensor]:
    """A plain functional collective, whose backward is torch's own choice."""
    if given[0].get("group_size", len(given)) != len(given):
        raise VerifyError(
            f"a collective is written for {given[0]['group_size']} ranks and run by {len(given)}. "
            "Build all ranks for one tp"
        )
    if given[0].get("reduce_op", "sum") != "sum":
        raise VerifyError(
            f"a collective reduces by {given[0]['reduce_op']!r}; only 'sum' has a placement (P). "
            "Write it as a sum"
        )
    sizes = [(own.get("input_split_sizes", ()), own.get("output_split_sizes", ())) for own in given]
    messages = [Message(own["input"], *n) for own, n in zip(given, sizes, strict=True)]
    return lockstep.exchange(collective, messages)


def _wait_tensor(given: Sequence[Arguments], lockstep: Lockstep) -> list[Tensor]:
    return [own["tensor"] for own in given]


Joint: TypeAlias = Callable[[Sequence[Arguments], Lockstep], list[Any]]

JOINT: Mapping[str, Joint] = {
    **{f"autotp::{name}": op for name, op in OPS.items()},
    **{f"_c10d_functional::{name}": partial(_run_functional, kind) for name, kind in FUNCTIONAL.items()},
    "_c10d_functional::wait_tensor": _wait_tensor,
}
"""Every op that asks for a group, by name: the closed list of what a rewritten graph may hold."""


def run_jointly(name: str, given: Sequence[Arguments], tally: Tally) -> list[Any]:
    """Each rank's result of the op called `name`, for each rank's arguments.

    Constraints: raises VerifyError for an op that is not in JOINT, and where ranks disagree.
    """
    if name not in JOINT:
        raise VerifyError(
            f"the simulator knows no op of this name that {len(given)} ranks run together. "
            f"It knows {', '.join(sorted(JOINT))}"
        )
    _check_agreement(given)
    return JOINT[name](given, Lockstep(len(given), tally))
