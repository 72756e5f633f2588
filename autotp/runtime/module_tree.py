"""The module tree of a sharded model: a copy of the original with local tensors.

`copy.deepcopy` gets a memo with the local tensor of every parameter and buffer, so that no full
weight is copied, and names, order, ties, hooks and non-persistent buffers are kept by construction.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autotp.capture.source_model import copy_leftovers
from autotp.errors import PlanError, WeightsError
from autotp.records.plan import Plan
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import CaptureVariant, ShardedModel, State, Store, make_model_class
from autotp.runtime.variant import Signature, describe_mode

_FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def build_tree(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    plan: Plan,
    group: Group,
    device: torch.device,
    source: nn.Module,
    capture_variant: CaptureVariant,
    store: Store | None = None,
    imagined: bool = False,
    baked: Iterable[int] = (),
) -> ShardedModel:
    """Build a sharded model without variants: the structure of `model` with the local `tensors`.

    Constraints:
    - `tensors`: one for each parameter, under any of its names, on `device`; buffers may be among
      them, the others are copied from the model.
    - `baked`: the hooks of `model` that its graphs include, and which the tree does not get.
    - `source`: `model` without memory, from which `capture_variant` captures further calls.
    - `store`: what saves the model and gathers its tensors.
    - `imagined`: it is for inspection, and refuses to be called.
    - Parameters require gradients if the plan has a backward pass and the model's do.
    - `model` is unchanged, and no storage is shared with it.
    """
    refuse_sharded(model)
    memo = copy_leftovers(model) | _copy_buffers(model, tensors, device)
    memo |= _copy_parameters(model, tensors, plan.training)
    tree = copy.deepcopy(model, memo)
    tree.__class__ = make_model_class(type(model))
    assert isinstance(tree, ShardedModel)
    mode = describe_mode(model)
    tree.sharded_state = State(
        plan,
        group,
        device,
        source,
        capture_variant,
        mode,
        store,
        caches=dict(plan.caches),
        imagined=imagined,
    )
    _drop_hooks(tree, baked)
    tree.sharded_signature = Signature.of(model)
    return tree


def refuse_sharded(model: nn.Module) -> None:
    """Raise PlanError for a model that is sharded already."""
    if isinstance(model, ShardedModel):
        raise PlanError(
            f"{type(model).__name__}: it is sharded already ({model.sharded_state}). Give the "
            "unsharded model."
        )


def _drop_hooks(tree: nn.Module, baked: Iterable[int]) -> None:
    """Remove the forward hooks with these numbers from the tree."""
    for module in tree.modules():
        for name in _FORWARD_HOOKS:
            for number in baked:
                getattr(module, name).pop(number, None)


def _copy_parameters(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], training: bool
) -> dict[int, Any]:
    named = model.named_parameters(remove_duplicate=False)
    return {
        id(full): nn.Parameter(
            _copy_if_shared(_find_given(names, tensors), full), training and full.requires_grad
        )
        for full, names in _group_by_tensor(named)
    }


def _copy_buffers(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[int, Any]:
    named = model.named_buffers(remove_duplicate=False)
    return {
        id(full): _copy_buffer(full, names, tensors, device)
        for full, names in _group_by_tensor(named)
    }


def _group_by_tensor(
    named: Iterable[tuple[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, list[str]]]:
    """List each tensor once, with all its names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _find_given(names: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise WeightsError(
        f"{names[0]}: the {len(tensors)} local tensors do not include it. Give one under "
        f"{' or '.join(names)}."
    )


def _copy_buffer(
    full: torch.Tensor, names: list[str], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    for name in names:
        if name in tensors:
            return _copy_if_shared(tensors[name], full)
    if full.is_meta and device.type != "meta":
        raise WeightsError(
            f"{names[0]}: a buffer of {tuple(full.shape)} on the meta device has no values to put "
            f"on {device}. Build the model on a real device, or give the buffer's values."
        )
    return full.detach().to(device, copy=True)


def _copy_if_shared(local: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Give `local`, copied if it is a view of `full`."""
    local = local.detach()
    shared = not local.is_meta and not full.is_meta
    shared = shared and local.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    return local.clone() if shared else local
