"""A rank's parts of the parameters of a model that is whole in this process."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from autotp.algebra.split import Split
from autotp.capture.source_model import check_values
from autotp.records.plan import Plan
from autotp.runtime.group.process_group import Group
from autotp.runtime.ops.blocks import take

__all__ = ["cut"]


def cut(
    parameters: Mapping[str, Tensor], plan: Plan, where: Group, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What a rank holds of each parameter, copied to `device`."""
    for name, whole in parameters.items():
        record = plan.parameters[name]
        check_values(name, whole, device)
        local = whole.detach()
        if record.dim is not None:
            split = Split.decode(record.split)
            local = take(local, record.dim, split, where.rank, where.size)
        yield name, local.to(device, copy=True).contiguous()
