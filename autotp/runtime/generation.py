"""The generation methods of a sharded model, where they differ from the model's own.

Each process has its own random state and clock. Tokens sampled from equal logits are equal only if
the random states are, so `generate` gives all ranks the state of rank 0, which changes nothing if
all have the same seed. Stopping criteria that may read a clock are evaluated on rank 0: a rank that
stopped alone would leave the others waiting.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.errors import PlanError
from autotp.runtime.group.failures import note_wait
from autotp.runtime.group.process_group import Group, group_exists
from autotp.runtime.variant import CONSTANTS

_EXPANDS: Final = "_expand_inputs_for_generation"
_STOPS: Final = "_get_stopping_criteria"
_SEPARATE_TOWERS: Final = "_supports_mm_encoder_outputs"
"""The property that Transformers reads before it calls the towers of images and videos alone."""

_SEEN: Final = ("pixel_values", "image_patches")
_ALIKE: Final = ("MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria")
"""Stopping criteria that depend on the tokens alone, and so agree on all ranks."""


def override_generation(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Give the generation methods of `original` for its sharded models, by name."""
    own: dict[str, Callable[..., Any]] = {}
    generate = cast("Callable[..., Any] | None", getattr(original, "generate", None))
    if generate is not None:
        own["generate"] = _share_sampling(generate)
    if hasattr(original, _STOPS):
        own[_STOPS] = _share_criteria(getattr(original, _STOPS))
    encoder = cast("Callable[..., Any] | None", getattr(original, "get_encoder", None))
    if encoder is not None:
        own["get_encoder"] = _prepare_encoder(encoder)
    if hasattr(original, _SEPARATE_TOWERS):
        own[_SEPARATE_TOWERS] = _refuse_separate_towers
        own[_EXPANDS] = _expand_inputs(getattr(original, _EXPANDS))
    return own


def share_random_state(group: Group) -> None:
    """Give every rank of the group the random state of rank 0, of the CPU and the device.

    Constraints: every rank must call it; without processes it does nothing.
    """
    if group.size == 1 or not group_exists(group.name):
        return
    on_cuda = group.device.type == "cuda"
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(group.device)] if on_cuda else []
    with note_wait(group.name, "generate: sharing the random state"):
        sent = _broadcast_first(torch.cat(states), group).cpu()
    shared = sent.split([len(s) for s in states])
    torch.set_rng_state(shared[0])
    if on_cuda:
        torch.cuda.set_rng_state(shared[1], group.device)


def _broadcast_first(own: torch.Tensor, group: Group) -> torch.Tensor:
    """Broadcast the tensor of rank 0."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(own.to(group.device), 0, group.name))


class _RankZeroCriterion:
    """A stopping criterion evaluated on rank 0, which stops all ranks or none."""

    def __init__(self, own: Callable[..., torch.Tensor], group: Group) -> None:
        self.own, self.group = own, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the criterion on rank 0, for each sequence: (batch)."""
        stops = torch.as_tensor(self.own(*args, **kwargs))
        with note_wait(self.group.name, "generate: whether to stop"):
            return _broadcast_first(stops, self.group).to(stops.device)


def _share_criteria(criteria: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's criteria: those that may read a clock are evaluated on rank 0."""

    @functools.wraps(criteria)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, group = criteria(self, *args, **kwargs), self.sharded_state.group
        if group.size > 1 and group_exists(group.name):
            for k, own in enumerate(found):
                if type(own).__name__ not in _ALIKE:
                    found[k] = _RankZeroCriterion(own, group)
        return found

    return wrapped


def _share_sampling(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's `generate` so that all ranks start from one random state."""

    @functools.wraps(generate)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.sharded_state
        if state.compare is not None:
            state.compare(type(self).__name__, "generate()", _list_arguments(args, kwargs))
        if not state.imagined:
            share_random_state(state.group)
        return generate(self, *args, **kwargs)

    return wrapped


def _list_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """List the comparable arguments of `generate`: tensors, constants, settings."""
    named = {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)
    found: dict[str, Any] = {}
    for name, value in named.items():
        settings = getattr(value, "to_diff_dict", None)
        if settings is not None:
            found |= {f"{name}.{field}": str(of) for field, of in settings().items()}
        elif value is not None and isinstance(value, (torch.Tensor, *CONSTANTS)):
            found[name] = value  # None: as a streamer, which one rank alone may have
    return found


def _prepare_encoder(get_encoder: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's `get_encoder` so that its encoder can be called by itself."""

    @functools.wraps(get_encoder)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = get_encoder(self, *args, **kwargs)
        paths = [path for path, module in self.named_modules() if module is found and path]
        return type(self).part(self, paths[0]) if paths else found

    return wrapped


def _refuse_separate_towers(_: object) -> bool:
    """Give False: towers have graphs only within the full forward, which takes pixels too."""
    return False


def _expand_inputs(expand: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the model's `expand`, which would repeat patches or images as if they were prompts."""

    @functools.wraps(expand)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        size = int(kwargs.get("expand_size", 1))
        seen = [name for name in kwargs if name.startswith(_SEEN) and kwargs[name] is not None]
        if size > 1 and seen:
            raise PlanError(
                f"{type(self).__name__}: {size} sequences per prompt were requested, but the rows "
                f"of {seen[0]} are patches or images, not prompts, and repeating them would assign "
                "them to other prompts. Request one sequence (num_beams=1, "
                f"num_return_sequences=1), or give each prompt and its images {size} times."
            )
        return expand(self, *args, **kwargs)

    return wrapped
