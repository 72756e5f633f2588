"""Runs the ops that need the group on all ranks of a group in one process.

The ops are those of `runtime.ops.library` and `runtime.ops.primitives`, as in real processes; only
the communication differs. A verification thus covers that code, but not the backend. The
collectives here are independent of it: sums in the order of the ranks, and concatenations. One
autograd node represents an op on all ranks, so that the backward pass runs in lockstep as well.
Ranks that request different collectives are an error: processes would hang.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
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

Tally: TypeAlias = Counter[str]
"""Collectives run so far: `"forward all_reduce"` to its count."""

NAMESPACES = ("autotp", "_c10d_functional")
"""Ops of these namespaces need a group: they run jointly or not at all."""

_RANK_ARGUMENTS = {
    "x",
    "xs",
    "index",
    "bounds",
    "input",
    "tensor",
    "input_split_sizes",
    "output_split_sizes",
}
"""Arguments that differ between ranks; bounds are compared by value, sizes when exchanged."""


@dataclass(frozen=True, slots=True)
class Lockstep:
    """All ranks of a group of `size` in one process, as a communicator that checks everything.

    - `tally`: counts the collectives, by `phase`.
    - `peers`: for each rank, the ranks that it sums with; empty: all.
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
        """The same ranks, each of which sums with its peers only."""
        return replace(self, peers=tuple(peers))

    @contextmanager
    def backward(self, what: str) -> Generator["Lockstep"]:
        """The same ranks in their backward pass."""
        yield replace(self, phase="backward")

    def exchange(self, collective: Collective, messages: Sequence[Message]) -> list[Tensor]:
        """The result of the collective on each rank; VerifyError if processes would hang."""
        self.tally[f"{self.phase} {collective}"] += 1
        xs = [message.x for message in messages]
        if collective == "all_to_all":
            return _exchange_rows(messages)
        groups = dict.fromkeys(self.peers or [Peers(0, self.size, 1)])
        for peers in groups:
            _check_alike([xs[rank] for rank in peers.ranks])
        match collective:
            case "all_reduce":
                return _sum_peers(xs, groups)
            case "all_gather":
                rows = torch.cat(xs)
                return [rows, *(rows.clone() for _ in xs[1:])]
            case "reduce_scatter":
                return [row.clone() for row in _sum_tensors(xs).chunk(self.size)]


def _sum_peers(xs: Sequence[Tensor], groups: Iterable[Peers]) -> list[Tensor]:
    sums = list(xs)
    for peers in groups:
        total = _sum_tensors([xs[rank] for rank in peers.ranks])
        for rank in peers.ranks:
            sums[rank] = total if rank == peers.first else total.clone()
    return sums


def _sum_tensors(xs: Sequence[Tensor]) -> Tensor:
    first, *others = xs
    total = first.clone()
    for other in others:
        total += other
    return total


def _exchange_rows(messages: Sequence[Message]) -> list[Tensor]:
    """For each rank, the rows that all ranks send to it, in the order of the ranks."""
    sent = [list(message.sent) for message in messages]
    received = [list(message.received) for message in messages]
    if received != [list(column) for column in zip(*sent, strict=True)]:
        raise VerifyError(
            f"in an all-to-all of {len(messages)} ranks, the ranks send {sent} rows to each other "
            f"but expect {received}. Make each rank expect what the others send to it"
        )
    rows = [message.x.split(sizes) for message, sizes in zip(messages, sent, strict=True)]
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _check_alike(xs: Sequence[Tensor]) -> None:
    if len({(tuple(x.shape), x.dtype) for x in xs}) > 1:
        found = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in xs)
        raise VerifyError(
            f"the {len(xs)} ranks pass different tensors to one collective: {found}; processes "
            "would hang or corrupt memory. Make the local sizes equal"
        )


def _check_agreement(given: Sequence[Arguments]) -> None:
    """Raise VerifyError unless all ranks pass the same arguments, apart from their own tensors."""
    first, *others = [{k: v for k, v in own.items() if k not in _RANK_ARGUMENTS} for own in given]
    for rank, other in enumerate(others, 1):
        if other != first:
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} pass different arguments to one collective: "
                f"{first} and {other}. Give every rank the same graph"
            )
    bounds = [own["bounds"] for own in given if "bounds" in own]
    for rank, other in enumerate(bounds):
        if not torch.equal(bounds[0], other):
            raise VerifyError(
                f"ranks 0 and {rank} of {len(given)} group their rows differently: the groups end "
                f"at {bounds[0].tolist()} and {other.tolist()}. Make every rank choose the same "
                "groups"
            )


def _run_functional(
    collective: Collective, given: Sequence[Arguments], lockstep: Lockstep
) -> list[Tensor]:
    """Run a functional collective of torch, with torch's own backward."""
    if given[0].get("group_size", len(given)) != len(given):
        raise VerifyError(
            f"a collective for {given[0]['group_size']} ranks is run by {len(given)}. Build all "
            "ranks for the same tp"
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
    **{
        f"_c10d_functional::{name}": partial(_run_functional, kind)
        for name, kind in FUNCTIONAL.items()
    },
    "_c10d_functional::wait_tensor": _wait_tensor,
}
"""Every op that needs a group, by name: the closed list of those in rewritten graphs."""


def run_jointly(name: str, given: Sequence[Arguments], tally: Tally) -> list[Any]:
    """The result on each rank of the op called `name`, for the arguments of each rank.

    Raises VerifyError for an op that is not in JOINT, and if the ranks disagree.
    """
    if name not in JOINT:
        raise VerifyError(
            f"the simulator knows no joint op {name} for {len(given)} ranks. It knows "
            f"{', '.join(sorted(JOINT))}"
        )
    _check_agreement(given)
    return JOINT[name](given, Lockstep(len(given), tally))
