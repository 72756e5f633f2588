"""The keyword arguments that `plan`, `parallelize` and `verify` have in common, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch

from autotp.core.machine import Machine
from autotp.core.plan import Plan
from autotp.errors import PlanError

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

    @staticmethod
    def of(**given: Unpack[Keywords]) -> "Options":
        """The options that a caller's keywords spell; PlanError for one that no option has."""
        known = [option.name for option in fields(Options)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise PlanError(f"option {name!r}: is unknown; known are {', '.join(known)}.{hint}")
        options = Options(**given)
        if options.plan is not None and options.overrides:
            raise PlanError(
                f"options plan and overrides: a plan says all, {len(options.overrides)} overrides "
                "are given beside it. Give one of the two."
            )
        return options.read()

    def read(self) -> "Options":
        """The same options, with the plan that a path names."""
        if self.plan is None or isinstance(self.plan, Plan):
            return self
        return replace(self, plan=Plan.from_json(Path(self.plan)))

    def __post_init__(self) -> None:
        """Refuse values that no plan can have."""
        for name in ("example_inputs", "overrides"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise PlanError(
                    f"option {name}: is of type {type(value).__name__}. Give a mapping, "
                    f"such as {_EXAMPLES[name]}."
                )
        given = cast(object, self.plan)  # whatever a caller without types passed
        if not isinstance(given, Plan | str | Path | None):
            raise PlanError(
                f"option plan: is of type {type(given).__name__}. Give a Plan, or the path of one."
            )
        if not 0 <= self.shard_threshold <= 1:
            raise PlanError(
                f"option shard_threshold: is {self.shard_threshold}. Give a part of the largest "
                "parameter's bytes, from 0 to 1."
            )
        self.reduce()

    def reduce(self) -> torch.dtype | None:
        """The dtype that sums over the group are made in, None for the values' own."""
        if self.reduce_dtype is None or isinstance(self.reduce_dtype, torch.dtype):
            return self.reduce_dtype
        found: object = getattr(torch, self.reduce_dtype, None)
        if not isinstance(found, torch.dtype):
            raise PlanError(
                f"option reduce_dtype: {self.reduce_dtype!r} is no dtype of torch. Give one "
                "such as 'float32', or None for the values' own."
            )
        return found


_EXAMPLES = {"example_inputs": "{'input_ids': ids}", "overrides": "{'*.down_proj': 'row'}"}
