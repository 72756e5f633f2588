"""What a summary is made of: the call that was planned, and what the stages found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx

from autotp.capture.sizes import Pricing
from autotp.options import Request
from autotp.planner.analysis import Analysis, Decision, EmittedCollective, Matching
from autotp.planner.strategy import Strategy
from autotp.records.plan import Plan
from autotp.solver.problem import Solution

__all__ = ["Call", "Findings"]


@dataclass(frozen=True, slots=True)
class Call:
    """The call that was planned.

    - `variant`: its key; `sizes`: of its data, by name.
    - `longest`: the sizes at which a cache is at its largest.
    - `prefill`: the plan of the call that this one was planned together with, which lists all
      weights.
    """

    tp: int
    training: bool
    variant: str
    sizes: Mapping[str, int]
    request: Request
    longest: Pricing | None = None
    prefill: Plan | None = None

    @property
    def overrides(self) -> Mapping[str, str]:
        """The overrides requested; a plan that is followed keeps its own, as its reasons."""
        plan = self.request.plan
        given = plan.options.get("overrides") if plan else None
        return self.request.overrides if given is None else cast("Mapping[str, str]", given)

    @property
    def shard_threshold(self) -> float:
        """The threshold requested; a plan that is followed keeps its own."""
        plan = self.request.plan
        given = plan.options.get("shard_threshold") if plan else None
        return self.request.shard_threshold if given is None else cast("float", given)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the stages found; `ways` are the strategies among which each op's was chosen."""

    analysis: Analysis
    matching: Matching
    decision: Decision
    solution: Solution
    collectives: Sequence[EmittedCollective]
    ways: Mapping[fx.Node, tuple[Strategy, ...]]
