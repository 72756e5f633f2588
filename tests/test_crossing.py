"""Two cuts of one dim: by the definition, taking a part of a part is the same in either order."""

import pytest
import torch

from autotp.core.split import Segment, Split, block
from autotp.run.blocks import join, take
from autotp.run.crossing import crossed

HEADS = Split(1, (Segment(1, 4, 6),))
HEAD_DIM = Split(1, (Segment(4, 6, 1),))
PER_HEAD_FUSED = Split(4, (Segment(1, 2, 1),) * 3)
FUSED_HEADS = Split(1, (Segment(1, 4, 2), Segment(1, 2, 2), Segment(1, 2, 6)))
FUSED_HEAD_DIM = Split(1, (Segment(4, 2, 1), Segment(2, 2, 1), Segment(1, 0, 12)))


@pytest.mark.parametrize(
    ("cut", "to"),
    [
        (HEADS, HEAD_DIM),
        (HEAD_DIM, HEADS),
        (HEADS, PER_HEAD_FUSED),
        (PER_HEAD_FUSED, HEADS),
        (FUSED_HEADS, FUSED_HEAD_DIM),
        (FUSED_HEAD_DIM, FUSED_HEADS),
        (Split(1, (Segment(1, 4, -1),)), Split(1, (Segment(-1, 6, 1),))),
    ],
)
def test_parts_exchanged_piecewise_are_the_parts_of_the_other_cut(cut: Split, to: Split) -> None:
    x = torch.arange(24)
    local_cut, local_to = crossed(cut, to, 24, 0, 2)
    parts = [take(x, 0, cut, rank, 2) for rank in range(2)]
    for rank in range(2):
        pieces = [take(part, 0, local_to, rank, 2) for part in parts]

        assert torch.equal(take(x, 0, to, rank, 2), join(pieces, 0, local_cut))


@pytest.mark.parametrize("to", [block(24), HEADS, Split(3, (Segment(1, 8, 1),))])
def test_overlapping_axes_are_refused(to: Split) -> None:
    with pytest.raises(
        ValueError, match="size 24 cannot go from .* over 2 ranks by one all-to-all"
    ):
        crossed(HEADS, to, 24, 0, 2)
