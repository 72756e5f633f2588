"""Digests of tensors: equal for equal bits, other for the least difference, strides or no."""

import pytest
import torch

from autotp.runtime.group.digest import digest_tensor

SIZES = [0, 1, 3, 512, 4096, 5000, 600_001]


def drawn(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_changes_it(count: int, dtype: torch.dtype) -> None:
    x = drawn(count).to(dtype)

    assert digest_tensor(x) == digest_tensor(x.clone())
    for place in {0, count // 2, count - 1} if count else ():
        y = x.clone()
        y.view(torch.uint8)[place * x.element_size()] ^= 1
        assert digest_tensor(y) != digest_tensor(x), place


def test_the_order_of_elements_rows_and_columns_counts() -> None:
    x = drawn(600_000).view(100, 6000)
    twins = [x.flip(0), x.flip(1), x[torch.randperm(100)], x.roll(1, 1), x.roll(1024, 1)]

    assert len({digest_tensor(t) for t in (x, *twins)}) == 6


def test_shape_and_dtype_count_and_strides_do_not() -> None:
    x = drawn(6000).view(60, 100)

    assert digest_tensor(x.t()) == digest_tensor(x.t().contiguous())
    assert digest_tensor(x) != digest_tensor(x.view(100, 60))
    assert digest_tensor(x) != digest_tensor(x.view(torch.int32))
    assert digest_tensor(x.view(-1)[1:]) == digest_tensor(x.view(-1)[1:].clone())


def test_any_kind_of_tensor_has_one() -> None:
    kinds = [torch.tensor(True), torch.ones(3, dtype=torch.complex64).conj(), torch.tensor(1.5)]
    kinds += [
        torch.ones(3, 0),
        torch.tensor([-0.0]),
        torch.tensor([0.0]),
        torch.tensor([torch.nan]),
    ]

    assert len(kinds) == len({digest_tensor(x) for x in kinds})
    assert digest_tensor(torch.tensor([torch.nan])) == digest_tensor(torch.tensor([torch.nan]))
