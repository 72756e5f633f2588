"""How ranks communicate: the one place where real processes and simulated ranks differ.

A communicator has the tensors of one rank, if every rank is a process of its own (`Processes`), or
of all ranks, if one process runs them in lockstep (`verification.simulate`). The primitives and the
ops are written once for both.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autotp.algebra.placement import Collective
from autotp.algebra.split import Peers
from autotp.runtime.group.failures import note_wait
from autotp.runtime.group.process_group import check_group, find_rank, find_size, name_subgroup

_ops = torch.ops._c10d_functional


class Message(NamedTuple):
    """The input of one rank to a collective.

    - `sent`, `received`: for an all-to-all, the rows of dim 0 sent to and received from each rank.
    """

    x: Tensor
    sent: Sequence[int] = ()
    received: Sequence[int] = ()


class Communicator(Protocol):
    """The local ranks of a group, and how they communicate with the others."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose tensors are here."""
        ...

    def exchange(self, collective: Collective, messages: Sequence[Message]) -> list[Tensor]:
        """Run a collective along dim 0; the result of each of `ranks` has its own memory."""
        ...

    def among(self, peers: Sequence[Peers]) -> "Communicator":
        """Restrict the sums of each rank to its `peers`."""
        ...

    def backward(self, what: str) -> AbstractContextManager["Communicator"]:
        """Give the communicator of the backward pass, which runs `what` in the block."""
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """The rank of this process in the process group called `group`.

    Each exchange is exactly one functional collective and a wait for it, so that torch.compile and
    dispatch modes see both.
    """

    group: str

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return find_size(self.group)

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of this process."""
        return (find_rank(self.group),)

    def exchange(self, collective: Collective, messages: Sequence[Message]) -> list[Tensor]:
        """Run the collective in this process."""
        (message,) = messages
        x, group = message.x.contiguous(), check_group(self.group)
        match collective:
            case "all_reduce":
                started = _ops.all_reduce(x, "sum", group)
            case "all_gather":
                started = _ops.all_gather_into_tensor(x, self.size, group)
            case "reduce_scatter":
                started = _ops.reduce_scatter_tensor(x, "sum", self.size, group)
            case "all_to_all":
                received, sent = list(message.received), list(message.sent)
                started = _ops.all_to_all_single(x, received, sent, group)
        return [_ops.wait_tensor(started)]

    def among(self, peers: Sequence[Peers]) -> "Processes":
        """Give the communicator of the sub-group of its peers."""
        return Processes(name_subgroup(self.group, peers[0]))

    @contextmanager
    def backward(self, what: str) -> Generator["Processes"]:
        """Give the same communicator; errors about lost ranks name the backward pass of `what`."""
        with note_wait(self.group, f"the backward pass, {what}"):
            yield self
