"""Sample calls of the ops that move, cut, join or look up elements."""

import torch

from autotp.verification.rules.cases import Sample, call, complexes, flags, real, words

X = real(6, 2, 12)


def each(names: str, *samples: Sample) -> dict[str, tuple[Sample, ...]]:
    """The same samples for several aten ops."""
    return {f"aten.{name}": samples for name in names.split()}


MOVES = {
    **each(
        "view.default reshape.default _unsafe_view.default",
        call(real(2, 6, 12), [2, 72]),
        call(real(2, 72), [2, 6, 12]),
        call(real(2, 6, 12), [2, 6, 3, 4]),
        call(real(2, 6, 12), [12, -1]),
        call(real(2, 6, 12), [2, 6, 6, -1]),
        call(real(6, 12), [6, 1, 12, 1]),
        call(real(1, 6, 1, 12), [6, 12]),
        call(real(6, 12), [4, 18]),
        call(real(6, 12), [72]),
        call(real(72), [-1, 12]),
        call(real(6, 2, 36), [6, 2, 6, 6]),
    ),
    **each("flatten.using_ints", call(real(2, 6, 12), 1), call(real(2, 6, 12), -3, -2), call(X)),
    **each(
        "unflatten.int",
        call(real(2, 72), 1, [6, 12]),
        call(real(2, 72, 3), -2, [6, -1]),
        call(real(72, 2), 0, [6, 6, 2]),
        call(real(6, 6), 0, [6, 1]),
    ),
    **each("unsqueeze.default", call(real(6, 12), 0), call(real(6, 12), -1), call(real(6, 12), 1)),
    **each("squeeze.dim", call(real(6, 1, 12), 1), call(real(6, 12, 1), -1), call(real(2, 12), 0)),
    **each("squeeze.dims", call(real(6, 1, 12, 1), [1, 3]), call(real(2, 3, 12), [0, 1])),
    **each("squeeze.default", call(real(6, 1, 12, 1)), call(real(2, 3, 1))),
    **each("permute.default", call(X, [2, 0, 1]), call(X, [-1, 0, 1])),
    **each("transpose.int swapaxes.default swapdims.default", call(X, 0, 2), call(X, -1, -2)),
    **each("t.default numpy_T.default", call(real(6, 12)), call(real(6, 6))),
    **each("mT.default", call(real(6, 12)), call(real(6, 2, 12))),
    **each(
        "expand.default broadcast_to.default",
        call(real(6, 1, 12), [6, 4, 12]),
        call(real(6, 1, 12), [-1, 6, -1]),
        call(real(12), [6, 12]),
        call(real(6, 12), [6, 12]),
        call(real(1), [6]),
    ),
    **each(
        "repeat.default",
        call(real(6, 12), [2, 1]),
        call(real(6, 12), [3, 2, 3]),
        call(real(6, 1), [1, 6]),
    ),
    **each(
        "repeat_interleave.self_int",
        call(real(6, 12), 3, 0),
        call(real(6, 12), 2, -1),
        call(real(6, 12), 2),
        call(real(6, 12), 3, 0, output_size=18),
    ),
    **each(
        "slice.Tensor",
        call(real(6, 24), 1, 0, 12),
        call(real(6, 24), -1, 12, 24),
        call(real(6, 24), 1, 6, 18),
        call(real(6, 24), 1, -6),
        call(real(6, 24), 1, 0, 9223372036854775807),
        call(real(6, 24), 1, 0, 9223372036854775807, 2),
        call(real(6, 24), 1, 1, 9223372036854775807, 2),
        call(real(6, 24), 0, 0, 5),
        call(real(6, 24), 1, 3, 22, 2),
        call(real(24, 6), 0, 0, -12),
        call(real(24, 6)),
        call(real(6, 24), 1, 6, 6),
        call(real(6, 24), 1, 0, 24, 5),
    ),
    **each("narrow.default", call(real(6, 24), 1, 12, 12), call(real(6, 24), -1, 0, 6)),
    **each(
        "slice_scatter.default",
        call(real(6, 24), real(6, 12), 1, 0, 12),
        call(real(6, 24), real(6, 12), 1, 12),
        call(real(6, 24), real(6, 6), -1, 6, 12),
        call(real(12, 6), real(6, 6), 0, 6, 9223372036854775807),
        call(real(6, 24), real(6, 12), 1, 0, 24, 2),
        call(real(6, 5), real(6, 3), 1, 0, 6, 2),
    ),
    **each(
        "reshape_as.default",
        call(real(2, 72), real(2, 6, 12)),
        call(real(6, 12), real(6, 12)),
        call(real(12, 6), real(6, 12)),
        call(real(2, 6, 12), real(12, 12)),
    ),
    **each(
        "pad.default",
        call(real(6, 12, 4), [1, 2]),
        call(real(6, 12, 4), [0, 0, 0, 0, 1, 0]),
        call(real(6, 12, 4), [1, 1], "constant", 2.0),
        call(real(6, 12, 4), [1, 2], "reflect"),
        call(real(6, 12, 4), [-1, 0]),
    ),
    **each("constant_pad_nd.default", call(real(6, 12, 4), [1, 2]), call(X, [0, 0, 1, 1], 3.0)),
    **each(
        "select_scatter.default",
        call(real(6, 3, 12), real(6, 12), 1, 2),
        call(real(3, 6, 12), real(6, 12), 0, -1),
        call(real(6, 12, 3), real(6, 12), -1, 0),
    ),
    **each("view_as_complex.default", call(real(6, 3, 12, 2))),
    **each(
        "view_as_real.default",
        call(complexes(6, 12)),
    ),
    **each(
        "gather.default",
        call(real(6, 12), 1, words(6, 3, below=12)),
        call(real(6, 12), 0, words(6, 12, below=6)),
        call(real(6, 12), -1, words(6, 12, below=12)),
        call(real(6, 12), 1, words(4, 6, below=12)),
        call(real(12), 0, words(6, below=12)),
    ),
    **each(
        "index_select.default",
        call(real(6, 12), 1, words(6, below=12)),
        call(real(6, 12), 0, words(12, below=6)),
        call(real(12), 0, words(6, below=12)),
    ),
    **each(
        "scatter.value",
        call(real(6, 12), 1, words(6, 6, below=12), 3.0),
        call(real(6, 12), 0, words(6, 12, below=6), 0.0),
        call(real(6, 12), 0, words(2, 6, below=6), 0.0),
    ),
    **each(
        "scatter.src",
        call(real(6, 12), 1, torch.arange(6).expand(6, 6), real(6, 6)),
    ),
    **each(
        "scatter_add.default",
        call(real(6, 12), 1, words(6, 6, below=12), real(6, 6)),
    ),
    **each(
        "index_add.default",
        call(real(6, 12), 0, words(4, below=6), real(4, 12)),
        call(real(6, 12), 1, words(6, below=12), real(6, 6), alpha=2),
        call(real(12), 0, words(6, below=12), real(6)),
    ),
    **each(
        "index_copy.default",
        call(real(6, 12), 0, torch.tensor([1, 3]), real(2, 12)),
    ),
    **each("select.int", call(X, 1, 0), call(X, 0, -1), call(X, -1, 3)),
    **each("split.Tensor", call(real(6, 24), 12, 1), call(real(24, 6), 6), call(real(24, 6), 18)),
    **each(
        "split_with_sizes.default split.sizes",
        call(real(6, 24), [12, 12], -1),
        call(real(6, 24), [12, 6, 6], 1),
        call(real(6, 24), [5, 19], 1),
        call(real(24, 6), [24]),
    ),
    **each(
        "chunk.default", call(real(6, 24), 2, -1), call(real(6, 36), 3, 1), call(real(6, 5), 2, 1)
    ),
    **each("unbind.int", call(real(3, 6, 12)), call(real(6, 12, 2), -1)),
    **each(
        "cat.default concat.default",
        call([real(6, 12), real(6, 12)], 1),
        call([real(6, 12), real(6, 6), real(6, 1)], -1),
        call([real(6, 12), real(12, 12)]),
        call([real(6, 12)], 1),
        call([real(6, 0), real(6, 12)], 1),
    ),
    **each("stack.default", call([real(6, 12), real(6, 12)]), call([real(6, 12), real(6, 12)], -1)),
    **each(
        "index.Tensor",
        call(real(6, 12), [None, words(4, below=12)]),
        call(real(6, 12), [words(4, 3, below=6)]),
        call(real(6, 2, 12), [torch.tensor([-1, 0, 4])]),
        call(real(6, 12, 6), [words(4, below=6), words(4, below=12)]),
        call(real(6, 12, 6), [words(4, 1, below=6), words(3, below=12)]),
        call(real(6, 12), [torch.tensor([True, False] * 3)]),
        call(real(6, 2, 12), [torch.tensor([[True, False]] * 6)]),
    ),
    **each("histc.default", call(real(12), 4, -2, 2)),
    **each(
        "index_put.default",
        call(real(6, 12), [words(4, below=6)], real(4, 12), True),
        call(real(6, 12), [torch.tensor([0, 2, 3])], real(3, 12)),
        call(real(6, 12, 2), [None, torch.tensor([-1])], real(6, 1, 2)),
        call(real(6, 12, 2), [None, torch.tensor([1, 5])], real(2), True),
        call(real(6, 12, 6), [torch.tensor([[0], [2]]), torch.tensor([1, 5])], real(2, 1, 6)),
        call(real(6, 12), [None, torch.tensor([True, False] * 6)], real(6, 6)),
    ),
    **each("one_hot.default", call(words(4, below=3), 3)),
    **each("bincount.default", call(words(12, below=6))),
    **each("nonzero.default", call(flags(6, 2))),
}
