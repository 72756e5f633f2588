"""Laws of the local slices: join inverts take, put sums to the whole, ranges agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.core.split import Segment, Split, block
from autotp.errors import PlanError
from autotp.run.blocks import fitted, join, put, take

SMALL = st.integers(1, 3)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Split, int]:
    parts = draw(st.integers(1, 4))
    axis = st.one_of(st.just(0), SMALL.map(lambda n: n * parts))
    segment = st.builds(Segment, SMALL, axis, SMALL)
    return Split(draw(SMALL), tuple(draw(st.lists(segment, min_size=1, max_size=4)))), parts


def whole(split: Split, dim: int) -> torch.Tensor:
    shape = [2, 3]
    shape.insert(dim, split.length())
    return torch.arange(1, 1 + 6 * split.length()).reshape(shape).double()


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_join_inverts_take(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    locals_ = [take(x, dim, split, rank, parts) for rank in range(parts)]

    assert torch.equal(x, join(locals_, dim, split))


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_puts_sum_to_the_whole(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    padded = [put(take(x, dim, split, r, parts), dim, split, r, parts) for r in range(parts)]

    assert torch.equal(x, torch.stack(padded).sum(0))


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_take_holds_what_ranges_say(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    for rank in range(parts):
        spans = split.ranges(rank, parts)
        expected = torch.cat([x.narrow(dim, a, b - a) for a, b in spans], dim)
        local = take(x, dim, split, rank, parts)

        assert torch.equal(expected, local)
        assert split.length(parts) == local.size(dim)


@given(cuts())
@settings(deadline=None)
def test_gradient_of_take_is_put_of_ones(cut: tuple[Split, int]) -> None:
    split, parts = cut
    x = whole(split, 1).requires_grad_()
    for rank in range(parts):
        (gradient,) = torch.autograd.grad(take(x, 1, split, rank, parts).sum(), x)
        expected = torch.zeros_like(x)
        for start, stop in split.ranges(rank, parts):
            expected[:, start:stop] = 1

        assert torch.equal(expected, gradient)


@given(cuts())
@settings(deadline=None)
def test_meta_tensors_keep_the_local_shape(cut: tuple[Split, int]) -> None:
    split, parts = cut
    local = take(whole(split, 2).to("meta"), -1, split, parts - 1, parts)

    assert (2, 3, split.length(parts)) == local.shape
    assert (2, 3, split.length()) == put(local, 2, split, 0, parts).shape


def test_fused_segments_by_hand() -> None:
    split = Split(1, (Segment(1, 4, 1), Segment(1, 0, 2), Segment(1, 2, 2)))
    x = torch.arange(10)

    assert [0, 1, 4, 5, 6, 7] == take(x, 0, split, 0, 2).tolist()
    assert [2, 3, 4, 5, 8, 9] == take(x, 0, split, 1, 2).tolist()
    assert [0, 0, 2, 3, 0, 0, 0, 0, 8, 9] == put(take(x, 0, split, 1, 2), 0, split, 1, 2).tolist()


def test_repeated_concatenation_by_hand() -> None:
    split = Split(2, (Segment(1, 2, 1), Segment(1, 4, 1)))

    assert [1, 4, 5, 7, 10, 11] == take(torch.arange(12), 0, split, 1, 2).tolist()


@pytest.mark.parametrize("unknown", [Segment(-1, 4, 2), Segment(3, 4, -1), Segment(3, -1, 2)])
def test_unknown_size_is_inferred(unknown: Segment) -> None:
    known, x = Split(1, (Segment(3, 4, 2),)), torch.arange(24)
    locals_ = [take(x, 0, Split(1, (unknown,)), rank, 2) for rank in range(2)]

    assert known == fitted(Split(1, (unknown,)), 24, 0)
    assert torch.equal(take(x, 0, known, 1, 2), locals_[1])
    assert torch.equal(x, join(locals_, 0, Split(1, (unknown,))))


def test_strided_input() -> None:
    x = torch.arange(24).reshape(4, 6).t()
    locals_ = [take(x, 1, block(4), rank, 2) for rank in range(2)]

    assert torch.equal(x[:, 2:], locals_[1])
    assert torch.equal(x, join(locals_, 1, block(4)))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (block(6), "dim 0 has 8 elements"),
        (block(8), "axis of 8, which 3 ranks do not divide"),
        (Split(1, (Segment(-1, 3, 1),)), "dim 0 has 8 elements"),
    ],
)
def test_a_wrong_size_is_refused(split: Split, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        take(torch.arange(8), 0, split, 0, 3)


def test_parts_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(PlanError, match=r"dim 0 has 5 elements, .* one of 2 parts"):
        join([torch.arange(5), torch.arange(5)], 0, block(8))
