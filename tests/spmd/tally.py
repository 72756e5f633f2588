"""Counts collectives where they reach the dispatcher, below autograd and composite ops."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Tally"]

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Tally(TorchDispatchMode):
    """A mode under which `kinds` counts the collectives run and `dtypes` what they carried."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = _KINDS.get(func.__name__.partition(".")[0])
        if func.namespace == "_c10d_functional" and kind is not None:
            self.kinds[kind] += 1
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))
