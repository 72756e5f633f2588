"""Captured, analysed and matched models of `tests.models`, one capture a session and model."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from autotp.algebra.axis import Atom, Dim
from autotp.capture.capture import capture
from autotp.oprules.rulebook import load_rulebook
from autotp.planner.analysis import Analysis, AxisPair, Matching
from autotp.planner.match import match
from autotp.planner.propagate import propagate
from tests import models


@dataclass(frozen=True)
class Analysed:
    """One model's analysis and pairs."""

    analysis: Analysis
    matching: Matching

    def dims(self, name: str) -> tuple[Dim, ...]:
        """The dims of a parameter."""
        return self.analysis.dims[(self.analysis.parameters[name], 0)]

    def layout(self, name: str, dim: int = 0) -> str:
        """One dim of a parameter in the notation, atoms called by their sizes."""
        return self.analysis.forest.format(self.dims(name)[dim])

    def pair(self, name: str) -> AxisPair:
        """The pair of a parameter."""
        return self.matching.pair_of[name]

    def sizes(self, name: str) -> list[int | None]:
        """The sizes of the axes of a parameter's pair."""
        return [axis.size.static for axis in self.pair(name).axes]

    def same(self, one: str, two: str, dims: tuple[int, int]) -> bool:
        """Whether two dims of two parameters are one expression."""
        forest = self.analysis.forest
        return forest.flatten(self.dims(one)[dims[0]]) == forest.flatten(self.dims(two)[dims[1]])

    def leaves(self, name: str, dim: int) -> set[Atom]:
        """The axes in one dim of a parameter."""
        return set(self.analysis.forest.list_leaves(self.dims(name)[dim]))


def analysed(model: nn.Module, inputs: dict[str, Any]) -> Analysed:
    """The analysis of one model."""
    program = capture(model, inputs)
    found = propagate(program, [name for name, _ in model.named_parameters()], load_rulebook())
    return Analysed(found, match(found, load_rulebook()))


_KNOWN: dict[str, Analysed] = {}


def family(name: str, **overrides: Any) -> Analysed:
    """The analysis of one of `tests.models`."""
    key = f"{name} {sorted(overrides.items())}"
    if key not in _KNOWN:
        _KNOWN[key] = analysed(*models.build(name, **overrides))
    return _KNOWN[key]
