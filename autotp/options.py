"""The keyword arguments that `plan`, `parallelize` and `verify` have in common, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.cost.machine import Machine
from autotp.errors import PlanError
from autotp.records.plan import Plan

__all__ = ["Keywords", "Options", "check_module", "check_proof", "check_rank", "check_ranks"]


class Keywords(TypedDict, total=False):
    """The keywords as callers write them."""

    example_inputs: Mapping[str, Any] | None
    training: bool | None
    machine: str | Machine
    optimizer: str
    state_dtype: torch.dtype | str | None
    overrides: Mapping[str, str]
    shard_threshold: float
    reduce_dtype: torch.dtype | str | None
    strict: bool
    plan: Plan | str | Path | None
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan may be asked for; see `autotp.plan` for each.

    - `check_stages`: the postcondition of every stage is checked (`autotp.stage_check`).
    """

    example_inputs: Mapping[str, Any] | None = None
    training: bool | None = None
    machine: str | Machine = "h100"
    optimizer: str = "adamw"
    state_dtype: torch.dtype | str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    shard_threshold: float = 0.001
    reduce_dtype: torch.dtype | str | None = None
    strict: bool = False
    plan: Plan | str | Path | None = None
    new_tokens: int = 0
    check_stages: bool = False

    @staticmethod
    def of(**given: Unpack[Keywords]) -> "Options":
        """The options that a caller's keywords spell; PlanError for one that no option has."""
        known = list(Keywords.__annotations__)
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
        return replace(self, plan=Plan.from_json(self.plan))

    def __post_init__(self) -> None:
        """Refuse values that no plan can have."""
        self._check_mappings()
        self._check_kind("plan", Plan | str | Path | None, "Give a Plan, or the path of one.")
        self._check_kind("machine", Machine | str | Path, "Give a name such as 'h100'.")
        self._check_kind("optimizer", str, "Give a name such as 'adamw'.")
        self._check_kind("training", bool | None, "Give True, False, or None for the model's own.")
        given = cast(object, self.shard_threshold)  # whatever a caller without types passed
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
            raise PlanError(
                f"option shard_threshold: is {given!r}. Give a part of the largest "
                "parameter's bytes, from 0 to 1."
            )
        self._check_new_tokens()
        self.state()
        self.reduce()

    def _check_new_tokens(self) -> None:
        given = cast(object, self.new_tokens)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise PlanError(
                f"option new_tokens: is {given!r}. Give how many words are generated after a "
                "prompt, such as 128, or 0 to plan one call alone."
            )
        if given and self.training:
            raise PlanError(
                f"options new_tokens={given} and training=True: words are generated without "
                "gradients. Leave one of the two out."
            )

    def reduce(self) -> torch.dtype | None:
        """The dtype that sums over the group are made in, None for the values' own."""
        given: object = self.reduce_dtype
        found: object = getattr(torch, given, None) if isinstance(given, str) else given
        if given is None or (isinstance(found, torch.dtype) and _is_summed(found)):
            return cast("torch.dtype | None", found)
        what = "holds no sums" if isinstance(found, torch.dtype) else "is no dtype of torch"
        raise PlanError(
            f"option reduce_dtype: {given!r} {what}. Give one such as 'float32', or None for the "
            "values' own."
        )

    def state(self) -> str | None:
        """The dtype of the optimizer's state by its name, None for the parameters' own."""
        self._check_kind("state_dtype", torch.dtype | str | None, "Give one such as 'float32'.")
        return None if self.state_dtype is None else str(self.state_dtype).removeprefix("torch.")

    def _check_mappings(self) -> None:
        for name in ("example_inputs", "overrides"):
            value: object = getattr(self, name)
            if value is None and name == "example_inputs":
                continue
            example = f"Give a mapping, such as {_EXAMPLES[name]}."
            if not isinstance(value, Mapping):
                raise PlanError(f"option {name}: is of type {type(value).__name__}. {example}")
            for key, item in cast("Mapping[object, object]", value).items():
                if not isinstance(key, str):
                    raise PlanError(f"option {name}: its key {key!r} is no name. {example}")
                if name == "overrides" and not isinstance(item, str):
                    raise PlanError(
                        f"option overrides: {key!r} asks for {item!r}, which is no layout's name. "
                        f"{example}"
                    )
                if name == "example_inputs":
                    _check_input(key, item)

    def _check_kind(self, name: str, kind: UnionType | type, advice: str) -> None:
        value: object = getattr(self, name)
        if not isinstance(value, kind):
            raise PlanError(f"option {name}: is of type {type(value).__name__}. {advice}")


_EXAMPLES = {"example_inputs": "{'input_ids': ids}", "overrides": "{'*.down_proj': 'row'}"}


def _is_summed(dtype: torch.dtype) -> bool:
    """Whether numbers of `dtype` can be added: those of one byte are for storage only."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check_ranks(tp: object) -> None:
    """Raises PlanError if `tp` is no number of ranks."""
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise PlanError(f"tp={tp!r}: must be a whole number of ranks, 1 or more, such as tp=8.")


def check_rank(rank: object) -> None:
    """Raises PlanError if `rank` cannot be the number of a rank."""
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise PlanError(f"rank={rank!r}: must be a whole number from 0 to tp - 1, such as rank=0.")


def check_module(model: object, what: str) -> None:
    """Raises PlanError if `model` is no module; names are for plans, which need no weights."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model: {what} was given {model!r} of type {type(model).__name__}. Give a "
            "torch.nn.Module with its weights; plan() and the command line take names too."
        )


def check_proof(dtype: object, seed: object) -> None:
    """Raises PlanError if nothing can be compared in `dtype`, or drawn by `seed`."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(
            f"dtype={dtype!r}: what is compared is computed in it. Give a floating-point dtype, "
            "such as torch.float32."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PlanError(f"seed={seed!r}: must be a whole number, such as seed=0.")


def _check_input(name: str, value: object) -> None:
    """Raises PlanError for an array of another library, on its own or nested."""
    for leaf in pytree.tree_leaves(value):
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            raise PlanError(
                f"option example_inputs: {name!r} is of type {type(leaf).__name__}, and models "
                f"take tensors. Pass torch.as_tensor({name})."
            )
