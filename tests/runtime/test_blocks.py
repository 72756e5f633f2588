"""Laws of the local slices: join inverts take, put sums to the whole, ranges agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.algebra.split import Extent, Peers, Segment, Split, block, segment, share
from autotp.errors import PlanError
from autotp.runtime.ops.blocks import (
    concatenate_shards,
    fit_split,
    keep_first_copy,
    reorder_segments,
    slice_block,
    write_block,
)
from autotp.runtime.ops.blocks import list_segments as pieces

SMALL = st.integers(1, 3)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Split, int]:
    """Splits over 1 to 6 ranks: even and uneven parts, factored groups, whole segments."""
    first, second = draw(SMALL), draw(st.integers(1, 2))
    ranks = first * second
    outer = Extent(draw(st.integers(first, first + 3)), first, second)
    inner = Extent(draw(st.integers(second, second + 2)), second, 1)
    single = Extent(draw(st.integers(ranks, ranks + 4)), 0)
    kinds = [(), (single,), (outer,), (inner,), (outer, inner)]
    listed = st.lists
    if draw(st.booleans()):
        within = listed(segments([(), (inner,)]), min_size=1, max_size=4)
        return Split(outer.size * 2, tuple(draw(within)), (outer, Extent(2))), ranks
    return Split(draw(SMALL), tuple(draw(listed(segments(kinds), min_size=1, max_size=4)))), ranks


@st.composite
def segments(draw: st.DrawFn, kinds: list[tuple[Extent, ...]]) -> Segment:
    between = st.lists(SMALL.map(Extent), max_size=1)
    extents = draw(between)
    for extent in draw(st.sampled_from(kinds)):
        extents += [extent, *draw(between)]
    return Segment(tuple(extents))


def whole(split: Split, dim: int) -> torch.Tensor:
    shape = [2, 3]
    shape.insert(dim, split.length())
    return torch.arange(1, 1 + 6 * split.length()).reshape(shape).double()


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_join_inverts_take(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    locals_ = [slice_block(x, dim, split, rank, parts) for rank in range(parts)]

    assert torch.equal(x, concatenate_shards(locals_, dim, split))


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_puts_of_first_copies_sum_to_the_whole(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    firsts = [
        keep_first_copy(slice_block(x, dim, split, r, parts), dim, split, r, parts)
        for r in range(parts)
    ]
    padded = [write_block(first, dim, split, r, parts) for r, first in enumerate(firsts)]

    assert torch.equal(x, torch.stack(padded).sum(0))


@pytest.mark.slow
@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_puts_add_up_every_copy(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    padded = [
        write_block(slice_block(x, dim, split, r, parts), dim, split, r, parts)
        for r in range(parts)
    ]
    holders = torch.zeros(split.length())
    for rank in range(parts):
        for start, stop in split.ranges(rank, parts):
            holders[start:stop] += 1

    assert torch.equal(x * holders.view([-1 if d == dim else 1 for d in range(3)]), sum(padded))


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_segments_name_the_ranks_that_hold_the_same(cut: tuple[Split, int], dim: int) -> None:
    split, ranks = cut
    x = whole(split, dim)
    rows = [
        pieces(slice_block(x, dim, split, r, ranks), dim, split, r, ranks) for r in range(ranks)
    ]
    for rank, (own, peers) in enumerate(rows):
        assert torch.equal(slice_block(x, dim, split, rank, ranks), reorder_segments(own, dim))
        for k, among in enumerate(peers):
            same = [r for r in range(ranks) if torch.equal(own[k], rows[r][0][k])]

            assert list(among.ranks) == same or own[k].numel() == 0


@given(cuts())
@settings(deadline=None)
def test_the_flat_form_of_a_split_is_read_back(cut: tuple[Split, int]) -> None:
    assert cut[0] == Split.decode(cut[0].encode())


@given(cuts())
@settings(deadline=None)
def test_rank_0_holds_the_most_and_units_are_whole(cut: tuple[Split, int]) -> None:
    split, ranks = cut
    lengths = [split.local_length(r, ranks) for r in range(ranks)]

    assert max(lengths) == lengths[0]
    assert split.is_even(ranks) == (len(set(lengths)) == 1)


@given(cuts(), st.integers(0, 2))
@settings(deadline=None)
def test_take_holds_what_ranges_say(cut: tuple[Split, int], dim: int) -> None:
    split, parts = cut
    x = whole(split, dim)
    for rank in range(parts):
        spans = split.ranges(rank, parts)
        expected = torch.cat([x.narrow(dim, a, b - a) for a, b in spans], dim)
        local = slice_block(x, dim, split, rank, parts)

        assert torch.equal(expected, local)
        assert split.local_length(rank, parts) == local.size(dim)


@given(cuts())
@settings(deadline=None)
def test_gradient_of_take_is_put_of_ones(cut: tuple[Split, int]) -> None:
    split, parts = cut
    x = whole(split, 1).requires_grad_()
    for rank in range(parts):
        (gradient,) = torch.autograd.grad(slice_block(x, 1, split, rank, parts).sum(), x)
        expected = torch.zeros_like(x)
        for start, stop in split.ranges(rank, parts):
            expected[:, start:stop] = 1

        assert torch.equal(expected, gradient)


@given(cuts())
@settings(deadline=None)
def test_meta_tensors_keep_the_local_shape(cut: tuple[Split, int]) -> None:
    split, parts = cut
    local = slice_block(whole(split, 2).to("meta"), -1, split, parts - 1, parts)

    assert (2, 3, split.local_length(parts - 1, parts)) == local.shape
    assert (2, 3, split.length()) == write_block(local, 2, split, parts - 1, parts).shape


def test_fused_segments_by_hand() -> None:
    split = Split(1, (segment(1, 4, 1), segment(1, 0, 2), segment(1, 2, 2)))
    x = torch.arange(10)

    assert [0, 1, 4, 5, 6, 7] == slice_block(x, 0, split, 0, 2).tolist()
    assert [2, 3, 4, 5, 8, 9] == slice_block(x, 0, split, 1, 2).tolist()
    assert [0, 0, 2, 3, 4, 5, 0, 0, 8, 9] == write_block(
        slice_block(x, 0, split, 1, 2), 0, split, 1, 2
    ).tolist()


def test_repeated_concatenation_by_hand() -> None:
    split = Split(2, (segment(1, 2, 1), segment(1, 4, 1)))

    assert [1, 4, 5, 7, 10, 11] == slice_block(torch.arange(12), 0, split, 1, 2).tolist()


@pytest.mark.parametrize("unknown", [segment(-1, 4, 2), segment(3, 4, -1), segment(3, -1, 2)])
def test_unknown_size_is_inferred(unknown: Segment) -> None:
    known, x = Split(1, (segment(3, 4, 2),)), torch.arange(24)
    locals_ = [slice_block(x, 0, Split(1, (unknown,)), rank, 2) for rank in range(2)]

    assert known == fit_split(Split(1, (unknown,)), 24, 0)
    assert torch.equal(slice_block(x, 0, known, 1, 2), locals_[1])
    assert torch.equal(x, concatenate_shards(locals_, 0, Split(1, (unknown,))))


def test_strided_input() -> None:
    x = torch.arange(24).reshape(4, 6).t()
    locals_ = [slice_block(x, 1, block(4), rank, 2) for rank in range(2)]

    assert torch.equal(x[:, 2:], locals_[1])
    assert torch.equal(x, concatenate_shards(locals_, 1, block(4)))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (block(6), "dim 0 has 8 elements"),
        (Split(1, (segment(-1, 3, 1),)), "dim 0 has 8 elements"),
    ],
)
def test_a_wrong_size_is_refused(split: Split, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        slice_block(torch.arange(8), 0, split, 0, 3)


def test_parts_of_a_wrong_size_are_refused() -> None:
    with pytest.raises(PlanError, match=r"dim 0 has 5 elements, .* the shard of rank 0 of 2"):
        concatenate_shards([torch.arange(5), torch.arange(5)], 0, block(8))


def test_parts_are_whole_units_the_first_ones_longer() -> None:
    assert [(0, 3), (3, 2), (5, 2)] == [share(7, 3, k) for k in range(3)]
    assert [0, 1, 2, 3, 4, 5] == slice_block(
        torch.arange(14), 0, Split(1, (segment(1, 7, 2),)), 0, 3
    ).tolist()


def test_a_factored_group_by_hand() -> None:
    """8 query heads in 2 groups over 4 ranks, each with one of the 2 key-value heads."""
    q = Split(1, (Segment((Extent(2, 2, 2), Extent(4, 2, 1))),))
    k = Split(1, (Segment((Extent(2, 2, 2),)),))

    assert [[0, 1], [2, 3], [4, 5], [6, 7]] == [
        slice_block(torch.arange(8), 0, q, r, 4).tolist() for r in range(4)
    ]
    assert [[0], [0], [1], [1]] == [
        slice_block(torch.arange(2), 0, k, r, 4).tolist() for r in range(4)
    ]
    assert {Peers(0, 2, 1): 1} == k.count_shared(4)
