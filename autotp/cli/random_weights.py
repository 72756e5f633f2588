"""Random weights for a model that has none: every parameter matters, and nothing overflows.

Whatever the model starts as a constant (norm scales at 1, biases at 0) varies around that constant;
everything else is normal, both with standard deviation 0.1.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.errors import PlanError, WeightsError

__all__ = ["read_available_bytes", "materialize", "randomise"]

_DEVIATION: Final = 0.1


def materialize(model: nn.Module, seed: int = 0, *, copies: int = 1) -> nn.Module:
    """A model like `model`, on the CPU, with random weights drawn from `seed`.

    Constraints:
    - A model that has values already is returned as it is.
    - Raises PlanError when `copies` times its bytes exceed the memory that is free, WeightsError
      when a buffer's values cannot be known.
    """
    if not any(tensor.is_meta for tensor in _list_tensors(model)):
        return model
    _check_memory(model, copies)
    return randomise(_rebuild_on_cpu(model), seed)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """`model`, each parameter drawn anew from `seed` in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _DEVIATION
            parameter.copy_(noise + _find_constant(parameter))
    return model


def read_available_bytes() -> int | None:
    """The bytes of memory that are free, None where the system does not tell."""
    information = Path("/proc/meminfo")
    if information.is_file():
        lines = information.read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(found[0]) * 1024 if found else None
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _find_constant(parameter: nn.Parameter) -> float:
    """The one value that all of a parameter starts with, else 0."""
    if parameter.numel() == 0:
        return 0.0
    first = parameter.flatten()[0]
    return float(first) if bool((parameter == first).all()) else 0.0


def _rebuild_on_cpu(model: nn.Module) -> nn.Module:
    """A CPU copy: built again from its configuration, else with the usual constants."""
    build: Any = getattr(type(model), "_from_config", None)
    if build is not None:
        return cast("nn.Module", build(model.config)).train(model.training)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise WeightsError(
            f"buffer {lost[0]} of {type(model).__name__} has no values (it is on the meta device) "
            "and no configuration to build them from. Build the model on the CPU."
        )
    return _set_usual_constants(model.to_empty(device="cpu"))


def _set_usual_constants(model: nn.Module) -> nn.Module:
    """`model`, its one-dimensional weights (scales of norms) at 1, all else at 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0)
    return model


def _check_memory(model: nn.Module, copies: int) -> None:
    needed = copies * sum(t.nbytes for t in _list_tensors(model))
    free = read_available_bytes()
    if free is not None and needed > free:
        raise PlanError(
            f"{type(model).__name__}: random weights need {needed:,} bytes (copies: {copies}), "
            f"{free:,} are free. Take fewer layers, or a smaller dtype."
        )


def _list_tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
