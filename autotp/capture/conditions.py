"""What a shorter graph assumes of a call, checked on each call.

Each condition is cheap compared with the graph: a comparison of sizes, or one reduction over an
attention mask. Where values cannot be read (while a compiler traces or CUDA captures, or in a
tensor subclass), the condition is false, and the graph without assumptions runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

Pattern: TypeAlias = Literal["ones", "counting"]
PATTERNS: Final[tuple[Pattern, ...]] = ("ones", "counting")
_KINDS: Final[dict[Pattern, tuple[torch.dtype, ...]]] = {
    "ones": (torch.bool, torch.int32, torch.int64),
    "counting": (torch.int32, torch.int64),
}


@dataclass(frozen=True, slots=True)
class AtMost:
    """An input has at most `most` elements along `dim`.

    Example: `str(AtMost("input_ids", 1, 4096))` is `input_ids.size(1) <= 4096`.
    """

    name: str
    dim: int
    most: int

    def holds(self, leaves: Mapping[str, Any]) -> bool:
        """Whether the condition is true for a call with these inputs, by leaf name."""
        return leaves[self.name].shape[self.dim] <= self.most

    def __str__(self) -> str:
        """The condition as code."""
        return f"{self.name}.size({self.dim}) <= {self.most}"


@dataclass(frozen=True, slots=True)
class Plain:
    """An input has the values of `make_plain_values`: a mask of ones, or consecutive positions.

    Example: `str(Plain("attention_mask", "ones"))` is `attention_mask is ones`.
    """

    name: str
    pattern: Pattern

    def holds(self, leaves: Mapping[str, Any]) -> bool:
        """Whether the condition is true for a call with these inputs, by leaf name."""
        if torch.compiler.is_compiling():
            return False
        value = leaves[self.name]
        if not _can_be_read(value):
            return False
        if self.pattern == "ones":
            return bool((value if value.dtype is torch.bool else value == 1).all())
        return bool((value == torch.arange(value.shape[-1], device=value.device)).all())

    def __str__(self) -> str:
        """The condition in words."""
        return f"{self.name} is {self.pattern}"


Condition: TypeAlias = AtMost | Plain


def make_plain_values(
    pattern: Pattern, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """A CPU tensor with the values of a pattern: 1 everywhere, or 0, 1, 2 … along the last dim.

    None if a tensor of this shape and dtype cannot have them.
    """
    if not shape or dtype not in _KINDS[pattern]:
        return None
    if pattern == "ones":
        return torch.ones(shape, dtype=dtype)
    return torch.arange(shape[-1], dtype=dtype).expand(shape)


def _can_be_read(value: torch.Tensor) -> bool:
    """Whether the values can be read without side effects on gradients or CUDA graphs."""
    plain = type(value) is torch.Tensor and not value.is_meta and not value.requires_grad
    return plain and not (value.is_cuda and torch.cuda.is_current_stream_capturing())
