"""How long made-up inputs are: as long as the model takes, unless its forward loops over them.

A forward that takes its words one by one has a graph for each length, with all its steps written
out. Nobody asked for the longest of them, which would take minutes and is right for no other call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autotp.capture.inputs import example_inputs, positions
from autotp.capture.program import Program, broken_guard

__all__ = ["made_up"]

SHORT, LONGER = 8, 12


def made_up(
    model: nn.Module, training: bool, captured: Callable[[Mapping[str, Any]], Program]
) -> tuple[Mapping[str, Any], Program]:
    """Inputs to price a plan with, and the program that `captured` makes of them.

    They are the longest that the model takes (at most 4096), or short where the graph grows with
    each word. Raises as `example_inputs` and `captured` do.
    """
    longest = example_inputs(model, training)
    if (positions(model) or LONGER) < LONGER or not _longer(longest, SHORT):
        return longest, captured(longest)
    short, longer = (example_inputs(model, training, sequence=n) for n in (SHORT, LONGER))
    program = captured(short)
    if program.dynamic and broken_guard(program, longest) is None:
        return longest, program
    if not program.dynamic and _ops(captured(longer)) - _ops(program) >= LONGER - SHORT:
        return short, program
    return longest, captured(longest)


def _longer(inputs: Mapping[str, Any], length: int) -> bool:
    """Whether there are words, and more than `length` of them."""
    words = inputs.get("input_ids")
    return isinstance(words, torch.Tensor) and words.shape[1] > length


def _ops(program: Program) -> int:
    return len(program.graph.nodes)
