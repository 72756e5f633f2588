"""Digests of tensors: no slower than a copy, and on the tensor's own device.

The bytes are read as a matrix of 64-bit integers, whose row sums and column sums (modulo 2^64) are
hashed: a different integer changes one of each, and exchanged rows change the order of the row
sums. It does not protect against deliberate manipulation.
"""

import hashlib

import torch
from torch import Tensor

_COLUMNS = 512
_ROWS = 64  # at a time on the CPU, to fit into its cache


def digest_tensor(tensor: Tensor) -> bytes:
    """Compute 32 bytes that are equal for equal shape, dtype and bits, whatever the strides.

    Constraints: one pass over the memory, and no copy unless the tensor is not contiguous.
    """
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    data = _view_bytes(tensor)
    rows = data.numel() // (8 * _COLUMNS)
    body = data[: rows * 8 * _COLUMNS]
    for part in (*_sum_matrix(body.view(torch.int64).view(rows, _COLUMNS)), data[body.numel() :]):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _view_bytes(tensor: Tensor) -> Tensor:
    """View the memory of a tensor as bytes, aligned to 64 bits."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 8 else data


def _sum_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Sum each row and each column."""
    columns = matrix.new_zeros(_COLUMNS)
    rows: list[Tensor] = [matrix.new_zeros(0)]
    for part in matrix.split(_ROWS if matrix.device.type == "cpu" else max(len(matrix), 1)):
        columns += part.sum(0)
        rows.append(part.sum(1))
    return torch.cat(rows), columns
