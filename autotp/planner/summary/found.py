"""What an account is made of: what was asked, and what the stages found out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autotp.capture.sizes import Pricing
from autotp.cost.machine import Machine
from autotp.planner.analysis import Analysis, Decision, Emitted, Matching
from autotp.planner.strategy import Strategy
from autotp.records.plan import Plan
from autotp.solver.problem import Solution

__all__ = ["Asked", "Found"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the plan was asked for.

    - `longest`: the sizes at which a cache is at its largest. `beside`: the plan of the call that
      this one was planned together with, which has all weights.
    """

    tp: int
    training: bool
    variant: str
    machine: Machine
    sizes: Mapping[str, int]
    optimizer: str
    state_dtype: str | None
    shard_threshold: float
    overrides: Mapping[str, str]
    reduce_dtype: str | None
    longest: Pricing | None = None
    beside: Plan | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What the stages found out; `ways` are the strategies among which each op's was chosen."""

    analysis: Analysis
    matching: Matching
    decision: Decision
    solution: Solution
    collectives: Sequence[Emitted]
    ways: Mapping[fx.Node, tuple[Strategy, ...]]
