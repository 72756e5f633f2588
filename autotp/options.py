"""The keyword arguments that `plan`, `parallelize` and `verify` have in common, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch

from autotp.core.machine import Machine
from autotp.core.plan import Plan

__all__ = ["Keywords", "Options"]


class Keywords(TypedDict, total=False):
    """The keywords as callers write them."""

    example_inputs: Mapping[str, Any] | None
    training: bool | None
    machine: str | Machine
    optimizer: str
    state_dtype: str | None
    overrides: Mapping[str, str]
    shard_threshold: float
    reduce_dtype: torch.dtype | str | None
    strict: bool
    plan: Plan | str | Path | None


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan may be asked for; see `autotp.plan` for each."""

    example_inputs: Mapping[str, Any] | None = None
    training: bool | None = None
    machine: str | Machine = "h100"
    optimizer: str = "adamw"
    state_dtype: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    shard_threshold: float = 0.001
    reduce_dtype: torch.dtype | str | None = None
    strict: bool = False
    plan: Plan | str | Path | None = None

    def reduce(self) -> torch.dtype | None:
        """The dtype that sums over the group are made in, None for the values' own."""
        if isinstance(self.reduce_dtype, str):
            return getattr(torch, self.reduce_dtype)
        return self.reduce_dtype
