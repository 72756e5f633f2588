"""Logits of the last few tokens: a count that varies between calls, as a tensor of positions.

A number is part of the variant key, so each count would need a graph of its own.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from autotp.capture.program import LOGITS_TO_KEEP, TOKEN_INPUTS


def takes_positions(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the annotation of a forward allows positions as well as a count."""
    return LOGITS_TO_KEEP in parameters and "Tensor" in str(parameters[LOGITS_TO_KEEP].annotation)


def select_positions(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the count of last tokens by their positions, (count,).

    Constraints: a count of 0 (all tokens) or 1 (the last token) stays: those are fixed kinds of
    call.
    """
    count = inputs.get(LOGITS_TO_KEEP)
    tokens = next((inputs[name] for name in TOKEN_INPUTS if inputs.get(name) is not None), None)
    if type(count) is not int or count < 2 or tokens is None or not _is_sequence(tokens):
        return inputs
    length = tokens.shape[1]
    return {
        **inputs,
        LOGITS_TO_KEEP: torch.arange(max(length - count, 0), length, device=tokens.device),
    }


def _is_sequence(tokens: torch.Tensor) -> bool:
    """Whether the shape is (batch, length) for token ids, or (batch, length, size) for vectors."""
    return tokens.dim() == (3 if tokens.is_floating_point() else 2)
