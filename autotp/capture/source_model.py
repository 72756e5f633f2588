"""The user's model: each of its tensors once, its fingerprint, and copies without values."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.errors import WeightsError


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The parameters and buffers of a model by their first names, and the further names of each."""

    name: str
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]


def compute_fingerprint(source: SourceModel) -> str:
    """A hash over the names, shapes and dtypes of a model's parameters."""
    lines = (f"{n} {tuple(t.shape)} {t.dtype}" for n, t in source.parameters.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_source_model(model: nn.Module) -> SourceModel:
    """Each tensor of a model once, by its first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            parameters[name] = tensor
    return SourceModel(type(model).__name__, parameters, dict(model.named_buffers()), tied)


def copy_without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model on its own device whose tensors have shapes and strides, but no memory.

    Unlike a copy on meta, it is captured as the model itself is: code that depends on the device
    takes the same branch, and constants made in the forward have values. The copy of a model on
    meta is on the CPU, so that its graph is that of the model with its weights loaded.
    """
    metas = [t for t in _list_plain_tensors(model) if t.is_meta]
    memo: dict[int, Any] = {id(t): torch.zeros_like(t, device="cpu") for t in metas}
    memo = copy_leftovers(model) | memo
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_drop_storage(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _drop_storage(buffer)
    return copy.deepcopy(model, memo)


def find_device(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model has no values."""
    return any(p.is_meta for p in model.parameters())


def _list_plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that are plain attributes of modules, neither parameters nor buffers."""
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    attributes = [list(vars(module).values()) for module in model.modules()]
    leaves = [leaf for leaf in pytree.tree_leaves(attributes) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if id(leaf) not in known]


def list_meta_attributes(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors on meta that are plain attributes of modules, by path."""
    lost = {id(t) for t in _list_plain_tensors(model) if t.is_meta}
    return [
        (f"{path}.{name}".removeprefix("."), leaf)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and id(leaf) in lost
    ]


def copy_leftovers(model: nn.Module) -> dict[int, Any]:
    """Copies, by identity, of tensors with a grad_fn on modules: `copy.deepcopy` refuses these."""
    return {id(t): t.detach().clone() for t in _list_plain_tensors(model) if not t.is_leaf}


def check_values(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    """Raise WeightsError if a parameter has no values to put on `device`."""
    if parameter.is_meta and device.type != "meta":
        raise WeightsError(
            f"parameter {name} {list(parameter.shape)} is on meta and has no values to put on "
            f"{device}. Load the weights before parallelizing; planning and rank= need none."
        )


def copy_without_values(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Zeros in place of the inputs, on `device`; integers keep their values, for forwards that read
    them.
    """

    def copy_input(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        if not (x.is_floating_point() or x.is_complex() or x.is_meta):
            return x.to(device)
        return torch.zeros_like(x, device=device, requires_grad=x.requires_grad)

    return {name: pytree.tree_map(copy_input, value) for name, value in inputs.items()}


def _drop_storage(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    empty = torch.empty_like(tensor, requires_grad=False, device=device)
    empty.untyped_storage().resize_(0)
    return empty
