"""The inputs of a summary: the planned call, and the results of the stages."""

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


@dataclass(frozen=True, slots=True)
class Call:
    """The call that was planned.

    - `variant`: its key; `sizes`: of its data, by name.
    - `longest`: the sizes at which a cache is at its largest.
    - `prefill`: the plan of the prefill that was planned together with this call; it lists all
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
        """The overrides requested; a followed plan keeps its own."""
        plan = self.request.plan
        given = plan.options.get("overrides") if plan else None
        return self.request.overrides if given is None else cast("Mapping[str, str]", given)

    @property
    def shard_threshold(self) -> float:
        """The threshold requested; a followed plan keeps its own."""
        plan = self.request.plan
        given = plan.options.get("shard_threshold") if plan else None
        return self.request.shard_threshold if given is None else cast("float", given)


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of the stages; `ways` are the possible strategies of each op."""

    analysis: Analysis
    matching: Matching
    decision: Decision
    solution: Solution
    collectives: Sequence[EmittedCollective]
    ways: Mapping[fx.Node, tuple[Strategy, ...]]
