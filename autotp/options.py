"""The request that `plan`, `parallelize`, `verify` and `from_pretrained` share, read and checked.

An option has three lines, all in this file: its keyword, its field in `Request`, and what reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.cost.machine import Machine, load_machine
from autotp.dtypes import dtype_name
from autotp.errors import PlanError
from autotp.oprules import rulebook
from autotp.oprules.rulebook import Rulebook
from autotp.records.plan import Plan


class Keywords(TypedDict, total=False):
    """The keywords as callers write them; `autotp.plan` describes each."""

    example_inputs: Mapping[str, Any] | None
    training: bool | None
    machine: str | Path | Machine
    optimizer: str
    state_dtype: torch.dtype | str | None
    overrides: Mapping[str, str]
    shard_threshold: float
    reduce_dtype: torch.dtype | str | None
    strict: bool
    plan: Plan | str | Path | None
    new_tokens: int
    rules: str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for, with names and paths resolved to what they stand for.

    - `training`, `example_inputs`: None leaves the choice to the model.
    - `state_dtype`: a name, None for the parameters' own dtype. `reduce_dtype`: None for that of
      the values.
    - `check_stages`: check the postcondition of every stage (`stage_check`); not a keyword.
    """

    example_inputs: Mapping[str, Any] | None
    training: bool | None
    machine: Machine
    optimizer: str
    state_dtype: str | None
    overrides: Mapping[str, str]
    shard_threshold: float
    reduce_dtype: torch.dtype | None
    strict: bool
    plan: Plan | None
    new_tokens: int
    rules: Rulebook
    check_stages: bool = False


def read_request(**given: Unpack[Keywords]) -> Request:
    """Read a caller's keywords; those left out take their defaults.

    Example: `read_request(machine="h100", overrides={"*.down_proj": "row"})`.

    Raises PlanError, which names the option, what it is and what to give instead; RuleError for
    files of rules that cannot be read.
    """
    for name in given:
        if name not in _READERS:
            close = get_close_matches(name, _READERS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PlanError(f"option {name!r}: is unknown; known are {', '.join(_READERS)}.{hint}")
    values = {n: read(given.get(n, default)) for n, (default, read) in _READERS.items()}
    request = Request(**values)
    if request.plan is not None and request.overrides:
        raise PlanError(
            f"options plan and overrides: a plan fixes every layout, and {len(request.overrides)} "
            "overrides are given as well. Give one of the two."
        )
    if request.new_tokens and request.training:
        raise PlanError(
            f"options new_tokens={request.new_tokens} and training=True: text is generated without "
            "gradients. Leave one of the two out."
        )
    return request


# ── what reads each option ───────────────────────────────────────────────────────────────────────


def _expect(name: str, kind: UnionType | type, advice: str) -> Callable[[object], Any]:
    """A reader that takes values of a kind as they are."""

    def read(given: object) -> object:
        if not isinstance(given, kind):
            raise PlanError(f"option {name}: is of type {type(given).__name__}. {advice}")
        return given

    return read


def _read_inputs(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    mapping = _read_mapping("example_inputs", given, "{'input_ids': ids}")
    for name, value in mapping.items():
        _check_input(name, value)
    return mapping


def _read_overrides(given: object) -> Mapping[str, str]:
    example = "{'*.down_proj': 'row'}"
    mapping = _read_mapping("overrides", given, example)
    for key, layout in mapping.items():
        if not isinstance(layout, str):
            raise PlanError(
                f"option overrides: {key!r} asks for {layout!r}, which is not the name of a "
                f"layout. Give a mapping, such as {example}."
            )
    return mapping


def _read_mapping(name: str, given: object, example: str) -> Mapping[str, Any]:
    advice = f"Give a mapping, such as {example}."
    if not isinstance(given, Mapping):
        raise PlanError(f"option {name}: is of type {type(given).__name__}. {advice}")
    for key in cast("Mapping[object, object]", given):
        if not isinstance(key, str):
            raise PlanError(f"option {name}: its key {key!r} is not a name. {advice}")
    return cast("Mapping[str, Any]", given)


def _read_machine(given: object) -> Machine:
    if isinstance(given, Machine):
        return given
    name = _expect("machine", str | Path, "Give a name such as 'h100'.")(given)
    return load_machine(name, rulebook.find_rules_root())


def _read_plan(given: object) -> Plan | None:
    if given is None or isinstance(given, Plan):
        return given
    path = _expect("plan", str | Path, "Give a Plan, or the path of one.")(given)
    return Plan.from_json(path)


def _read_threshold(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise PlanError(
            f"option shard_threshold: is {given!r}. Give a fraction of the largest parameter's "
            "bytes, from 0 to 1."
        )
    return given


def _read_new_tokens(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise PlanError(
            f"option new_tokens: is {given!r}. Give the number of tokens generated after a prompt, "
            "such as 128, or 0 to plan a single call."
        )
    return given


def _read_state_dtype(given: object) -> str | None:
    kind = torch.dtype | str | None
    dtype = _expect("state_dtype", kind, "Give one such as 'float32'.")(given)
    return None if dtype is None else dtype_name(dtype)


def _read_reduce_dtype(given: object) -> torch.dtype | None:
    if given is None:
        return None
    found: object = getattr(torch, given, None) if isinstance(given, str) else given
    if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1:
        return found
    is_dtype = isinstance(found, torch.dtype)
    what = "cannot be summed in" if is_dtype else "is not a dtype of torch"
    raise PlanError(
        f"option reduce_dtype: {given!r} {what}. Give one such as 'float32', or None for the "
        "values' own dtype."
    )


def _read_rules(given: object) -> Rulebook:
    paths = [given] if isinstance(given, str | Path) else given
    if not isinstance(paths, Sequence) or not all(
        isinstance(path, str | Path) for path in cast("Sequence[object]", paths)
    ):
        raise PlanError(
            f"option rules: is of type {type(given).__name__}. Give the path of a TOML file of "
            "rules, or a list of such paths."
        )
    files = [Path(path) for path in cast("Sequence[str | Path]", paths)]
    for file in files:
        if file.is_dir():
            raise PlanError(f"option rules: {file} is a directory. Give TOML files of rules.")
    return rulebook.load_rulebook(*files)


_READERS: Mapping[str, tuple[Any, Callable[[object], Any]]] = {
    "example_inputs": (None, _read_inputs),
    "training": (
        None,
        _expect("training", bool | None, "Give True, False, or None for the model's own mode."),
    ),
    "machine": ("h100", _read_machine),
    "optimizer": ("adamw", _expect("optimizer", str, "Give a name such as 'adamw'.")),
    "state_dtype": (None, _read_state_dtype),
    "overrides": ({}, _read_overrides),
    "shard_threshold": (0.001, _read_threshold),
    "reduce_dtype": (None, _read_reduce_dtype),
    "strict": (False, _expect("strict", bool, "Give True or False.")),
    "plan": (None, _read_plan),
    "new_tokens": (0, _read_new_tokens),
    "rules": ((), _read_rules),
}
"""Each option with its default and what reads it."""


def _check_input(name: str, value: object) -> None:
    """Raise PlanError for an array of another library, on its own or nested."""
    for leaf in pytree.tree_leaves(value):
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            raise PlanError(
                f"option example_inputs: {name!r} is of type {type(leaf).__name__}, and models "
                f"take tensors. Pass torch.as_tensor({name})."
            )


# ── arguments that are not options ───────────────────────────────────────────────────────────────


def check_ranks(tp: object) -> None:
    """Raise PlanError unless `tp` is a number of ranks."""
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise PlanError(f"tp={tp!r}: must be the number of ranks, 1 or more, such as tp=8.")


def check_rank(rank: object) -> None:
    """Raise PlanError unless `rank` is None or an integer."""
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise PlanError(f"rank={rank!r}: must be an integer from 0 to tp - 1, such as rank=0.")


def check_module(model: object, caller: str) -> None:
    """Raise PlanError unless `model` is a module: names are for plans, which need no weights."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model: {caller} was given {model!r} of type {type(model).__name__}. Give a "
            "torch.nn.Module with its weights; plan() and the command line take names too."
        )


def check_comparison(dtype: object, seed: object) -> None:
    """Raise PlanError if nothing can be compared in `dtype`, or sampled with `seed`."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(
            f"dtype={dtype!r}: the comparison is computed in it. Give a floating-point dtype, such "
            "as torch.float32."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise PlanError(f"seed={seed!r}: must be an integer, such as seed=0.")
