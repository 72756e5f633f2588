"""Samples of the tensors on disk, by which ranks check that they read the same checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor

from autotp.checkpoint.stored_tensor import StoredTensor

_ELEMENTS: Final = 1024


def sample_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Read from each tensor elements of its last dim, in the middle of all other dims.

    A sample is valid until the next is read.
    """
    for name, stored in tensors.items():
        if 0 not in stored.shape:
            middle = [(n // 2, n // 2 + 1) for n in stored.shape[:-1]]
            last = [(0, min(n, _ELEMENTS)) for n in stored.shape[-1:]]
            yield name, stored.read((*middle, *last))
