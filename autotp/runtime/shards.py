"""A rank's shards of the parameters of an unsharded model in this process."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autotp.algebra.split import Split
from autotp.capture.source_model import SourceModel, check_values, compute_fingerprint
from autotp.records.plan import Plan
from autotp.runtime.group.process_group import Group
from autotp.runtime.ops.blocks import slice_block


def slice_parameters(
    parameters: Mapping[str, Tensor], plan: Plan, where: Group, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Slice each parameter for a rank and copy the shard to `device`."""
    for name, full in parameters.items():
        record = plan.parameters[name]
        check_values(name, full, device)
        local = full.detach()
        if record.dim is not None:
            split = Split.decode(record.split)
            local = slice_block(local, record.dim, split, where.rank, where.size)
        yield name, local.to(device, copy=True).contiguous()


def restrict_plan(plan: Plan, full: SourceModel, part: SourceModel) -> Plan:
    """Give the plan of a submodule, with the names that its parameters have in it."""
    named = {id(tensor): name for name, tensor in full.parameters.items()}
    parameters = {
        name: replace(plan.parameters[named[id(tensor)]], name=name)
        for name, tensor in part.parameters.items()
    }
    nothing: dict[str, Any] = {"pairs": (), "collectives": (), "choices": {}, "caches": {}}
    return replace(
        plan,
        model=part.name,
        fingerprint=compute_fingerprint(part),
        parameters=parameters,
        **nothing,
    )
