"""Logits of the last few words: a count that differs from call to call, as a tensor of positions.

A number is part of what a graph is chosen by, so that each count would be a graph of its own.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from autotp.capture.program import LOGITS_TO_KEEP, TOKEN_INPUTS

__all__ = ["select_positions", "takes_positions"]


def takes_positions(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a forward says that it takes positions as well as a count."""
    return LOGITS_TO_KEEP in parameters and "Tensor" in str(parameters[LOGITS_TO_KEEP].annotation)


def select_positions(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs with the positions of the last words, (count,), in place of their count.

    Constraints: a count of 0 (all words) or 1 (the next word) stays: those are fixed kinds of call.
    """
    count = inputs.get(LOGITS_TO_KEEP)
    words = next((inputs[name] for name in TOKEN_INPUTS if inputs.get(name) is not None), None)
    if type(count) is not int or count < 2 or words is None or not _is_line(words):
        return inputs
    length = words.shape[1]
    return {**inputs, LOGITS_TO_KEEP: torch.arange(max(length - count, 0), length, device=words.device)}


def _is_line(words: torch.Tensor) -> bool:
    """Whether they are words (batch, length) or vectors (batch, length, size)."""
    return words.dim() == (3 if words.is_floating_point() else 2)
