"""What answers further calls of a sharded model: the same layouts, another graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotp.capture.cache import widened
from autotp.capture.heap import give_back
from autotp.capture.program import Program
from autotp.capture.source_model import device_of, valueless, whole_of
from autotp.options import Options
from autotp.planner.constraints import within
from autotp.records.plan import CacheRecord, Plan
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel, add_variant
from autotp.runtime.variant import Graphs

__all__ = ["Answer", "Asking", "Further"]


@dataclass(frozen=True, slots=True)
class Asking:
    """A call to be captured: of which model without memory, with what, for which rank.

    - `caches`: how tensors of a cache lie already.
    """

    model: nn.Module
    options: Options
    inputs: Mapping[str, Any]
    caches: Mapping[str, CacheRecord]
    where: Group
    device: torch.device


@dataclass(frozen=True, slots=True)
class Answer:
    """The captured call: the key that it answers to, its graphs and its plan."""

    key: str
    program: Program
    layers: Graphs
    plan: Plan


class Further:
    """Captures further calls of one rank's model, or of a part of it, with its layouts kept."""

    def __init__(
        self,
        bare: nn.Module,
        options: Options,
        plan: Plan,
        where: Group,
        device: torch.device,
        answer: Callable[[Asking], Answer],
    ) -> None:
        """Of `bare`, a model without memory, whose parameters lie as `plan` says."""
        self.bare, self.options, self.plan = bare, options, plan
        self.where, self.device, self.answer = where, device, answer
        self.caches = dict(plan.caches)

    def variant(self, sharded: ShardedModel, inputs: Mapping[str, Any]) -> None:
        """Adds the graph that answers `inputs` in the present mode of `sharded`."""
        modes = {path: module.training for path, module in sharded.named_modules()}
        for path, module in self.bare.named_modules():
            module.training = modes.get(path, sharded.training)
        given = valueless(widened(inputs, self.caches), device_of(self.bare))
        options = replace(self.options, plan=self.plan, training=self.plan.training)
        asked = Asking(self.bare, options, given, self.caches, self.where, self.device)
        found = self.answer(asked)
        # of a tensor that was empty nothing is known: another class of cache may fill that path
        known = {path: record for path, record in found.plan.caches.items() if record.bytes}
        self.caches = known | self.caches
        add_variant(sharded, found.key, found.program, found.layers, found.plan)
        del found
        give_back()

    def part(self, path: str) -> "tuple[Further, Plan]":
        """The same for the module at `path`, and the plan of its parameters."""
        bare = self.bare.get_submodule(path)
        plan = within(self.plan, whole_of(self.bare), whole_of(bare))
        return Further(bare, self.options, plan, self.where, self.device, self.answer), plan
