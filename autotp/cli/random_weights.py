"""Random weights for a model without weights: every parameter matters, and nothing overflows.

Parameters that the model initialises to a constant (norm scales to 1, biases to 0) are normal
around that constant, all others around 0, with standard deviation 0.1.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from autotp.errors import PlanError, WeightsError

_DEVIATION: Final = 0.1


def materialize(model: nn.Module, seed: int = 0, *, copies: int = 1) -> nn.Module:
    """Build a model like `model`, on the CPU, with random weights from `seed`.

    A model that has values is returned as it is.

    Raises PlanError if `copies` times its bytes exceed the free memory, WeightsError if the values
    of a buffer cannot be computed.
    """
    if not any(tensor.is_meta for tensor in _list_tensors(model)):
        return model
    _check_memory(model, copies)
    return randomise(_rebuild_on_cpu(model), seed)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Set each parameter of `model` to random values from `seed`, in order; return `model`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * _DEVIATION
            parameter.copy_(noise + _find_constant(parameter))
    return model


def read_available_bytes() -> int | None:
    """Read how many bytes of memory are free; None where the system does not say."""
    information = Path("/proc/meminfo")
    if information.is_file():
        lines = information.read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(found[0]) * 1024 if found else None
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _find_constant(parameter: nn.Parameter) -> float:
    """Find the value that all elements of a parameter have; 0 if they differ."""
    if parameter.numel() == 0:
        return 0.0
    first = parameter.flatten()[0]
    return float(first) if bool((parameter == first).all()) else 0.0


def _rebuild_on_cpu(model: nn.Module) -> nn.Module:
    """Build the model on the CPU: from its configuration, otherwise with the usual constants."""
    build: Any = getattr(type(model), "_from_config", None)
    if build is not None:
        return cast("nn.Module", build(model.config)).train(model.training)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise WeightsError(
            f"buffer {lost[0]} of {type(model).__name__} has no values (it is on the meta device) "
            "and the model has no configuration to compute them from. Build the model on the CPU."
        )
    return _set_usual_constants(model.to_empty(device="cpu"))


def _set_usual_constants(model: nn.Module) -> nn.Module:
    """Set one-dimensional weights (scales of norms) to 1 and all else to 0; return `model`."""
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
            f"and {free:,} are free. Use fewer layers, or a smaller dtype."
        )


def _list_tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
