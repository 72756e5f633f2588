"""Sample calls of every op of rules/: sizes 6 and 12, so that 2 and 3 ranks divide them.

Several calls where arguments change the rule: biases of one and two dims, broadcasting masks, kept
dims, negative dims, steps, unequal pieces, views that merge and split.
"""

from collections.abc import Mapping

import torch

from tests.rule_laws import (
    Drawn,
    Sample,
    call,
    complexes,
    fixed,
    flags,
    positive,
    real,
    short,
    words,
)

X, Y, POSITIVE, FLAGS = real(6, 2, 12), real(12), positive(6, 2, 12), flags(6, 2, 12)
FEW, MANY = words(6, 2, 12, below=3), words(6, 2, 12, below=9)


def _each(names: str, *samples: Sample) -> dict[str, tuple[Sample, ...]]:
    """The same samples for several aten ops."""
    return {f"aten.{name}": samples for name in names.split()}


POINTWISE = {
    **_each(
        "abs.default cos.default elu.default erf.default exp.default gelu.default hardtanh.default "
        "leaky_relu.default mish.default relu.default relu6.default sigmoid.default "
        "log_sigmoid.default sign.default silu.default sin.default softplus.default square.default "
        "tanh.default isnan.default isinf.default floor.default ceil.default round.default "
        "nan_to_num.default hardsigmoid.default hardswish.default celu.default selu.default "
        "expm1.default atan.default tan.default trunc.default isfinite.default exp2.default "
        "empty_like.default zeros_like.default ones_like.default logical_not.default "
        "neg.default contiguous.default clone.default alias.default detach.default",
        call(X),
    ),
    **_each(
        "log.default log2.default log1p.default rsqrt.default sqrt.default reciprocal.default",
        call(POSITIVE),
    ),
    **_each("clamp.default", call(X, -1, 1), call(X, min=0)),
    **_each("clamp_min.default clamp_max.default", call(X, 0.5)),
    **_each("full_like.default add.Scalar sub.Scalar rsub.Scalar", call(X, 2.5)),
    **_each("remainder.Scalar fmod.Scalar floor_divide.Scalar", call(MANY, 2)),
    **_each("div.Scalar_mode", call(X, 2, rounding_mode="floor")),
    **_each("div.Tensor_mode", call(X, POSITIVE, rounding_mode="floor")),
    **_each("bitwise_and.Scalar", call(MANY, 3)),
    **_each("threshold.default", call(X, 0.1, 7.0)),
    **_each("pow.Scalar", call(2.0, X)),
    **_each("xlogy.Tensor", call(X, POSITIVE), call(X, positive(12))),
    **_each("polar.default", call(POSITIVE, X)),
    **_each("fmod.Tensor", call(X, POSITIVE)),
    **_each("bitwise_xor.Tensor logical_xor.default", call(FLAGS, flags(12))),
    **_each("expand_as.default", call(real(6, 1, 12), X), call(Y, X)),
    **_each("new_empty.default new_zeros.default new_ones.default", call(X, [6, 12])),
    **_each("new_full.default", call(X, [6, 12], 3.0)),
    **_each("pow.Tensor_Scalar", call(X, 2)),
    **_each("bitwise_not.default", call(FLAGS)),
    **_each(
        "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", call(X, 0), call(FEW, 1)
    ),
    **_each(
        "to.dtype _to_copy.default", call(X, dtype=torch.float64), call(FLAGS, dtype=torch.float64)
    ),
    **_each("to.device", call(X, "cpu", torch.float64)),
    **_each("to.dtype_layout", call(X, dtype=torch.float64)),
    **_each("dropout.default", call(X, 0.0, True), call(X, 0.5, False)),
    **_each("native_dropout.default", call(X, 0.0, True)),
    **_each(
        "add.Tensor sub.Tensor rsub.Tensor",
        call(X, X),
        call(X, Y),
        call(X, real(6, 1, 12)),
        call(X, X, alpha=3),
        call(X, FEW),
    ),
    **_each("add.Tensor sub.Tensor rsub.Tensor", call(X, X), call(X, Y), call(X, X, alpha=3)),
    **_each("mul.Tensor", call(X, X), call(X, Y), call(X, 3.0), call(X, FLAGS), call(X, real())),
    **_each("mul.Scalar div.Scalar", call(X, 3.0)),
    **_each("div.Tensor", call(X, POSITIVE), call(X, 3.0), call(X, positive(2, 1))),
    **_each("type_as.default", call(X, real(3)), call(X, real(6, 2, 12))),
    **_each("pow.Tensor_Tensor", call(POSITIVE, X), call(POSITIVE, Y)),
    **_each("maximum.default minimum.default min.other max.other", call(X, X), call(X, Y)),
    **_each("remainder.Tensor atan2.default", call(X, POSITIVE)),
    **_each("floor_divide.default", call(MANY, 3), call(MANY, Drawn((12,), torch.int64, 1, 4))),
    **_each(
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", call(X, Y), call(FEW, FEW)
    ),
    **_each("logical_and.default logical_or.default", call(FLAGS, FLAGS), call(X, flags(12))),
    **_each(
        "__and__.Tensor __or__.Tensor bitwise_and.Tensor bitwise_or.Tensor", call(FLAGS, flags(12))
    ),
    **_each("where.self", call(FLAGS, X, X), call(flags(2, 1), X, Y), call(FLAGS, X, real())),
    **_each("where.ScalarOther", call(FLAGS, X, 0.0)),
    **_each("where.ScalarSelf", call(FLAGS, 0.0, X)),
    **_each("masked_fill.Scalar", call(X, FLAGS, 0.0), call(X, flags(2, 1), -7.0)),
    **_each("masked_fill.Tensor", call(X, FLAGS, real())),
    **_each("lerp.Tensor addcmul.default", call(X, X, X), call(X, Y, X)),
    **_each("addcdiv.default", call(X, X, POSITIVE)),
    **_each("copy.default", call(MANY, FEW), call(MANY, words(12, below=3))),
}

CONTRACTION = {
    **_each(
        "linear.default",
        call(real(2, 6, 12), real(6, 12)),
        call(real(6, 12), real(18, 12), real(18)),
        call(real(12), real(6, 12), real(6)),
    ),
    **_each(
        "addmm.default",
        call(real(18), real(6, 12), real(12, 18)),
        call(real(6, 18), real(6, 12), real(12, 18)),
        call(real(6, 1), real(6, 12), real(12, 18)),
        call(real(18), real(6, 12), real(12, 18), beta=2, alpha=3),
    ),
    **_each("mm.default", call(real(6, 12), real(12, 18))),
    **_each("mv.default", call(real(6, 12), real(12))),
    **_each("dot.default", call(real(12), real(12))),
    **_each(
        "einsum.default",
        call("bthd,hdm->btm", [real(2, 4, 6, 12), real(6, 12, 18)]),
        call("bqhd,bkhd->bhqk", [real(2, 4, 6, 12), real(2, 3, 6, 12)]),
        call("i,j->ij", [real(6), real(12)]),
        call("ij->ji", [real(6, 12)]),
        call("ab,bc,cd->ad", [real(6, 12), real(12, 6), real(6, 12)]),
        call("ii->i", [real(6, 6)]),
        call("...i,i->...", [real(6, 12), real(12)]),
        call("ij,jk", [real(6, 12), real(12, 6)]),
    ),
    **_each(
        "conv1d.default",
        call(real(6, 12, 5), real(18, 12, 3), real(18), [1], [1]),
        call(real(6, 12, 5), real(18, 12, 3)),
        call(real(6, 12, 5), real(12, 1, 3), real(12), [1], [2], [1], 12),
        call(real(6, 12, 5), real(18, 6, 3), real(18), [1], [1], [1], 2),
        call(real(6, 12, 5), real(24, 1, 3), real(24), [1], [1], [1], 12),
        call(real(12, 5), real(18, 12, 3)),
    ),
    **_each("conv2d.default", call(real(2, 6, 4, 4), real(12, 6, 2, 2), real(12), [2, 2])),
    **_each("conv3d.default", call(real(2, 6, 2, 2, 2), real(12, 6, 1, 2, 2))),
    **_each("bmm.default", call(real(6, 4, 12), real(6, 12, 18))),
    **_each(
        "baddbmm.default",
        call(real(6, 4, 18), real(6, 4, 12), real(6, 12, 18), beta=2, alpha=3),
        call(real(6, 1, 18), real(6, 4, 12), real(6, 12, 18)),
    ),
    **_each(
        "matmul.default",
        call(real(12), real(12)),
        call(real(12), real(12, 6)),
        call(real(6, 12), real(12)),
        call(real(2, 6, 12), real(12)),
        call(real(6, 12), real(12, 18)),
        call(real(6, 2, 4, 12), real(12, 18)),
        call(real(6, 2, 4, 12), real(6, 2, 12, 18)),
        call(real(6, 2, 4, 12), real(2, 12, 18)),
        call(real(6, 1, 4, 12), real(2, 12, 18)),
        call(real(12), real(6, 12, 18)),
    ),
    **_each(
        "embedding.default",
        call(real(12, 6), words(6, 2, below=12)),
        call(real(12, 6), words(6, 2, below=12), 3),
        call(real(12, 6), words(6, below=12), -1),
    ),
    **_each(
        "_grouped_mm.default",
        call(short(8, 48), short(3, 48, 48), torch.tensor([2, 5, 8], dtype=torch.int32)),
    ),
    "transformers.grouped_mm_fallback.default": (
        call(real(8, 6), real(3, 6, 12), torch.tensor([2, 5, 8], dtype=torch.int32)),
    ),
}

ATTENTION = {
    **_each(
        "scaled_dot_product_attention.default",
        call(real(2, 6, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 12)),
        call(real(2, 6, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), flags(4, 12)),
        call(real(2, 6, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), real(2, 1, 4, 12)),
        call(real(2, 6, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), real(1, 6, 4, 12)),
        call(real(2, 6, 12, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), None, 0.0, True),
        call(real(2, 36, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), enable_gqa=True),
        call(
            real(2, 36, 4, 6),
            real(2, 6, 12, 6),
            real(2, 6, 12, 6),
            real(2, 36, 4, 12),
            enable_gqa=True,
        ),
        call(real(2, 6, 4, 6), real(2, 1, 12, 6), real(2, 1, 12, 6), enable_gqa=True),
        call(real(2, 6, 4, 6), real(2, 1, 12, 6), real(2, 1, 12, 6)),
        call(real(2, 6, 4, 6), real(2, 6, 12, 6), real(2, 6, 12, 6), enable_gqa=True, scale=0.5),
    ),
}

REDUCTION = {
    **_each("softmax.int log_softmax.int", call(X, -1), call(X, 0), call(X, 1, torch.float64)),
    **_each("_softmax.default _log_softmax.default", call(X, -1, False)),
    **_each("cumsum.default", call(X, -1), call(X, 0)),
    **_each(
        "sum.dim_IntList mean.dim",
        call(X, [-1]),
        call(X, [0, 2], True),
        call(X, [0, 2]),
        call(X, None),
        call(X, [1], dtype=torch.float64),
    ),
    **_each("sum.default mean.default", call(X), call(X, dtype=torch.float64)),
    **_each("flip.default", call(X, [0]), call(X, [-1, 1])),
    **_each("roll.default", call(X, [1], [0]), call(X, [2, 3], [0, 2]), call(real(6, 12), [1])),
    **_each("tril.default triu.default", call(real(6, 12, 12)), call(real(6, 6, 12), 1)),
    **_each("glu.default", call(X), call(X, 0)),
    **_each("cumprod.default logcumsumexp.default", call(POSITIVE, -1)),
    **_each("cummax.default cummin.default", call(X, 0)),
    **_each("argsort.default", call(X), call(X, 0)),
    **_each("argsort.stable sort.stable", call(X, stable=True, dim=0)),
    **_each("linalg_vector_norm.default", call(X, 2, [-1]), call(X, 2, [0], True), call(X)),
    **_each("norm.ScalarOpt_dim", call(X, 2, [-1]), call(X, 2, [0], True)),
    **_each("var_mean.correction", call(X, [-1]), call(X, [0], keepdim=True)),
    **_each("max.default min.default prod.default", call(X)),
    **_each("any.default all.default", call(FLAGS)),
    **_each("amax.default amin.default", call(X, [-1]), call(X, [0], True)),
    **_each("max.dim min.dim", call(X, -1), call(X, 0, True)),
    **_each("argmax.default argmin.default", call(X, -1), call(X)),
    **_each(
        "var.correction std.correction", call(X, [-1]), call(X, [0, 2], keepdim=True, correction=0)
    ),
    **_each("logsumexp.default", call(X, [-1]), call(X, [0, 1], True)),
    **_each("any.dim all.dim", call(FLAGS, -1), call(FLAGS, 0, True)),
    **_each("prod.dim_int", call(X, -1), call(X, 0, True)),
    **_each("topk.default", call(X, 3), call(X, 2, 0)),
    **_each("sort.default", call(X), call(X, 0, True)),
    **_each(
        "layer_norm.default",
        call(X, [12]),
        call(X, [12], Y, Y),
        call(X, [2, 12], real(2, 12), real(2, 12)),
        call(X, [12], Y),
    ),
    **_each("rms_norm.default", call(X, [12]), call(X, [12], Y), call(X, [2, 12], real(2, 12))),
    **_each(
        "cross_entropy_loss.default",
        call(real(12, 6), words(12, below=6)),
        call(real(12, 6), words(12, below=6), None, 2),
        call(real(12, 6), words(12, below=6), ignore_index=3),
        call(real(12, 6), words(12, below=6), fixed(6)),
        call(real(12, 6), words(12, below=6), None, 0),
    ),
}

SHAPE = {
    **_each(
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
    **_each("flatten.using_ints", call(real(2, 6, 12), 1), call(real(2, 6, 12), -3, -2), call(X)),
    **_each(
        "unflatten.int",
        call(real(2, 72), 1, [6, 12]),
        call(real(2, 72, 3), -2, [6, -1]),
        call(real(72, 2), 0, [6, 6, 2]),
        call(real(6, 6), 0, [6, 1]),
    ),
    **_each("unsqueeze.default", call(real(6, 12), 0), call(real(6, 12), -1), call(real(6, 12), 1)),
    **_each("squeeze.dim", call(real(6, 1, 12), 1), call(real(6, 12, 1), -1), call(real(6, 12), 0)),
    **_each("squeeze.dims", call(real(6, 1, 12, 1), [1, 3])),
    **_each("squeeze.default", call(real(6, 1, 12, 1))),
    **_each("permute.default", call(X, [2, 0, 1]), call(X, [-1, 0, 1])),
    **_each("transpose.int swapaxes.default swapdims.default", call(X, 0, 2), call(X, -1, -2)),
    **_each("t.default numpy_T.default mT.default", call(real(6, 12)), call(real(6, 6))),
    **_each(
        "expand.default broadcast_to.default",
        call(real(6, 1, 12), [6, 4, 12]),
        call(real(6, 1, 12), [-1, 6, -1]),
        call(real(12), [6, 12]),
        call(real(6, 12), [6, 12]),
        call(real(1), [6]),
    ),
    **_each(
        "repeat.default",
        call(real(6, 12), [2, 1]),
        call(real(6, 12), [3, 2, 3]),
        call(real(6, 1), [1, 6]),
    ),
    **_each(
        "repeat_interleave.self_int",
        call(real(6, 12), 3, 0),
        call(real(6, 12), 2, -1),
        call(real(6, 12), 2),
    ),
    **_each(
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
    **_each("narrow.default", call(real(6, 24), 1, 12, 12), call(real(6, 24), -1, 0, 6)),
    **_each(
        "slice_scatter.default",
        call(real(6, 24), real(6, 12), 1, 0, 12),
        call(real(6, 24), real(6, 12), 1, 12),
        call(real(6, 24), real(6, 6), -1, 6, 12),
        call(real(12, 6), real(6, 6), 0, 6, 9223372036854775807),
        call(real(6, 24), real(6, 12), 1, 0, 24, 2),
    ),
    **_each("view_as_complex.default", call(real(6, 3, 12, 2))),
    **_each(
        "view_as_real.default",
        call(complexes(6, 12)),
    ),
    **_each(
        "gather.default",
        call(real(6, 12), 1, words(6, 3, below=12)),
        call(real(6, 12), 0, words(6, 12, below=6)),
        call(real(6, 12), -1, words(6, 12, below=12)),
        call(real(6, 12), 1, words(4, 6, below=12)),
        call(real(12), 0, words(6, below=12)),
    ),
    **_each(
        "index_select.default",
        call(real(6, 12), 1, words(6, below=12)),
        call(real(6, 12), 0, words(12, below=6)),
        call(real(12), 0, words(6, below=12)),
    ),
    **_each(
        "scatter.value",
        call(real(6, 12), 1, words(6, 6, below=12), 3.0),
        call(real(6, 12), 0, words(6, 12, below=6), 0.0),
        call(real(6, 12), 0, words(2, 6, below=6), 0.0),
    ),
    **_each(
        "scatter.src",
        call(real(6, 12), 1, torch.arange(6).expand(6, 6), real(6, 6)),
    ),
    **_each(
        "scatter_add.default",
        call(real(6, 12), 1, words(6, 6, below=12), real(6, 6)),
    ),
    **_each(
        "index_add.default",
        call(real(6, 12), 0, words(4, below=6), real(4, 12)),
        call(real(6, 12), 1, words(6, below=12), real(6, 6), alpha=2),
        call(real(12), 0, words(6, below=12), real(6)),
    ),
    **_each(
        "index_copy.default",
        call(real(6, 12), 0, torch.tensor([1, 3]), real(2, 12)),
    ),
    **_each("select.int", call(X, 1, 0), call(X, 0, -1), call(X, -1, 3)),
    **_each("split.Tensor", call(real(6, 24), 12, 1), call(real(24, 6), 6), call(real(24, 6), 18)),
    **_each(
        "split_with_sizes.default split.sizes",
        call(real(6, 24), [12, 12], -1),
        call(real(6, 24), [12, 6, 6], 1),
        call(real(6, 24), [5, 19], 1),
        call(real(24, 6), [24]),
    ),
    **_each(
        "chunk.default", call(real(6, 24), 2, -1), call(real(6, 36), 3, 1), call(real(6, 5), 2, 1)
    ),
    **_each("unbind.int", call(real(3, 6, 12)), call(real(6, 12, 2), -1)),
    **_each(
        "cat.default",
        call([real(6, 12), real(6, 12)], 1),
        call([real(6, 12), real(6, 6), real(6, 1)], -1),
        call([real(6, 12), real(12, 12)]),
        call([real(6, 12)], 1),
        call([real(6, 0), real(6, 12)], 1),
    ),
    **_each(
        "stack.default", call([real(6, 12), real(6, 12)]), call([real(6, 12), real(6, 12)], -1)
    ),
    **_each(
        "index.Tensor",
        call(real(6, 12), [None, words(4, below=12)]),
        call(real(6, 12), [words(4, 3, below=6)]),
        call(real(6, 12, 6), [words(4, below=6), words(4, below=12)]),
        call(real(6, 12, 6), [words(4, 1, below=6), words(3, below=12)]),
        call(real(6, 12), [torch.tensor([True, False] * 3)]),
    ),
    **_each("histc.default", call(real(12), 4, -2, 2)),
    **_each(
        "index_put.default",
        call(real(6, 12), [words(4, below=6)], real(4, 12), True),
        call(real(6, 12), [torch.tensor([0, 2, 3])], real(3, 12)),
    ),
    **_each("bincount.default", call(words(12, below=6))),
    **_each("nonzero.default", call(flags(6, 2))),
}

SAMPLES: Mapping[str, tuple[Sample, ...]] = {
    **POINTWISE,
    **CONTRACTION,
    **ATTENTION,
    **REDUCTION,
    **SHAPE,
}
