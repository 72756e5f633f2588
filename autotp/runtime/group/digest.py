"""Digests of tensors: no slower than a copy, and on the tensor's own device.

The bytes are read as a table of 64-bit words. All its row sums and all its column sums, which wrap
around, are hashed: a word that differs changes one of each, rows that changed places change the row
sums' order. It is no defence against someone who means to deceive.
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["digest_tensor"]

_WORDS = 512  # in a row of the table
_ROWS = 64  # at a time on the CPU, whose cache holds them


def digest_tensor(tensor: Tensor) -> bytes:
    """32 bytes that are the same for the same shape, dtype and bits, strides aside.

    Constraints: one pass over the memory, and no copy unless the tensor is not contiguous.
    """
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    data = _view_bytes(tensor)
    rows = data.numel() // (8 * _WORDS)
    body = data[: rows * 8 * _WORDS]
    for part in (*_sum_words(body.view(torch.int64).view(rows, _WORDS)), data[body.numel() :]):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _view_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, aligned to words."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 8 else data


def _sum_words(table: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of each row, and of each column."""
    columns = table.new_zeros(_WORDS)
    rows: list[Tensor] = [table.new_zeros(0)]
    for part in table.split(_ROWS if table.device.type == "cpu" else max(len(table), 1)):
        columns += part.sum(0)
        rows.append(part.sum(1))
    return torch.cat(rows), columns
