"""Sample calls of every op of rules/: sizes 6 and 12, so that 2 and 3 ranks divide them.

Several calls where arguments change the rule: biases of one and two dims, broadcasting masks, kept
dims, negative dims, steps, unequal pieces, views that merge and split.
"""

from collections.abc import Mapping

import torch

from autotp.verification.rules.cases import (
    Drawn,
    Sample,
    call,
    fixed,
    flags,
    positive,
    real,
    short,
    words,
)
from autotp.verification.rules.move_samples import MOVES, each

X, Y, POSITIVE, FLAGS = real(6, 2, 12), real(12), positive(6, 2, 12), flags(6, 2, 12)
FEW, MANY = words(6, 2, 12, below=3), words(6, 2, 12, below=9)


POINTWISE = {
    **each(
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
    **each(
        "log.default log2.default log1p.default rsqrt.default sqrt.default reciprocal.default",
        call(POSITIVE),
    ),
    **each("clamp.default", call(X, -1, 1), call(X, min=0)),
    **each("clamp_min.default clamp_max.default", call(X, 0.5)),
    **each("full_like.default add.Scalar sub.Scalar rsub.Scalar", call(X, 2.5)),
    **each("remainder.Scalar fmod.Scalar floor_divide.Scalar", call(MANY, 2)),
    **each("div.Scalar_mode", call(X, 2, rounding_mode="floor")),
    **each("div.Tensor_mode", call(X, POSITIVE, rounding_mode="floor")),
    **each("bitwise_and.Scalar", call(MANY, 3)),
    **each("threshold.default", call(X, 0.1, 7.0)),
    **each("pow.Scalar", call(2.0, X)),
    **each("xlogy.Tensor", call(X, POSITIVE), call(X, positive(12))),
    **each("polar.default", call(POSITIVE, X)),
    **each("fmod.Tensor", call(X, POSITIVE)),
    **each("bitwise_xor.Tensor logical_xor.default", call(FLAGS, flags(12))),
    **each("expand_as.default", call(real(6, 1, 12), X), call(Y, X)),
    **each("pow.Tensor_Scalar", call(X, 2)),
    **each("bitwise_not.default", call(FLAGS)),
    **each("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", call(X, 0), call(FEW, 1)),
    **each(
        "to.dtype _to_copy.default", call(X, dtype=torch.float64), call(FLAGS, dtype=torch.float64)
    ),
    **each("to.device", call(X, "cpu", torch.float64)),
    **each("to.dtype_layout", call(X, dtype=torch.float64)),
    **each("dropout.default", call(X, 0.0, True), call(X, 0.5, False)),
    **each("native_dropout.default", call(X, 0.0, True)),
    **each(
        "add.Tensor sub.Tensor rsub.Tensor subtract.Tensor",
        call(X, X),
        call(X, Y),
        call(X, real(6, 1, 12)),
        call(X, X, alpha=3),
        call(X, FEW),
    ),
    **each(
        "add.Tensor sub.Tensor rsub.Tensor subtract.Tensor",
        call(X, X),
        call(X, Y),
        call(X, X, alpha=3),
    ),
    **each(
        "mul.Tensor multiply.Tensor",
        call(X, X),
        call(X, Y),
        call(X, 3.0),
        call(X, FLAGS),
        call(X, real()),
    ),
    **each("mul.Scalar multiply.Scalar div.Scalar", call(X, 3.0)),
    **each(
        "div.Tensor divide.Tensor true_divide.Tensor",
        call(X, POSITIVE),
        call(X, 3.0),
        call(X, positive(2, 1)),
    ),
    **each("pow.Tensor_Tensor", call(POSITIVE, X), call(POSITIVE, Y)),
    **each("maximum.default minimum.default min.other max.other", call(X, X), call(X, Y)),
    **each("remainder.Tensor atan2.default", call(X, POSITIVE)),
    **each("floor_divide.default", call(MANY, 3), call(MANY, Drawn((12,), torch.int64, 1, 4))),
    **each(
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", call(X, Y), call(FEW, FEW)
    ),
    **each("logical_and.default logical_or.default", call(FLAGS, FLAGS), call(X, flags(12))),
    **each(
        "__and__.Tensor __or__.Tensor bitwise_and.Tensor bitwise_or.Tensor", call(FLAGS, flags(12))
    ),
    **each("where.self", call(FLAGS, X, X), call(flags(2, 1), X, Y), call(FLAGS, X, real())),
    **each("where.Scalar", call(FLAGS, 2.5, -1.0)),
    **each("where.ScalarOther", call(FLAGS, X, 2.5)),
    **each("where.ScalarSelf", call(FLAGS, 2.5, X)),
    **each("masked_fill.Scalar", call(X, FLAGS, 0.0), call(X, flags(2, 1), -7.0)),
    **each("masked_fill.Tensor", call(X, FLAGS, real())),
    **each("lerp.Scalar", call(X, Y, 0.3)),
    **each("lerp.Tensor addcmul.default", call(X, X, X), call(X, Y, X)),
    **each("clamp.Tensor", call(X, real(12, high=0), POSITIVE), call(X, None, Y)),
    **each("addcdiv.default", call(X, X, POSITIVE)),
    **each("copy.default", call(MANY, FEW), call(MANY, words(12, below=3))),
}

CONTRACTION = {
    **each(
        "linear.default",
        call(real(2, 6, 12), real(6, 12)),
        call(real(6, 12), real(18, 12), real(18)),
        call(real(12), real(6, 12), real(6)),
    ),
    **each(
        "addmm.default",
        call(real(18), real(6, 12), real(12, 18)),
        call(real(6, 18), real(6, 12), real(12, 18)),
        call(real(6, 1), real(6, 12), real(12, 18)),
        call(real(18), real(6, 12), real(12, 18), beta=2, alpha=3),
    ),
    **each("mm.default", call(real(6, 12), real(12, 18))),
    **each("mv.default", call(real(6, 12), real(12))),
    **each("dot.default", call(real(12), real(12))),
    **each(
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
    **each(
        "conv1d.default",
        call(real(6, 12, 5), real(18, 12, 3), real(18), [1], [1]),
        call(real(6, 12, 5), real(18, 12, 3)),
        call(real(6, 12, 5), real(12, 1, 3), real(12), [1], [2], [1], 12),
        call(real(6, 12, 5), real(18, 6, 3), real(18), [1], [1], [1], 2),
        call(real(6, 12, 5), real(24, 1, 3), real(24), [1], [1], [1], 12),
        call(real(6, 36, 5), real(36, 6, 3), real(36), [1], [1], [1], 6),
        call(real(6, 36, 5), real(6, 6, 3), None, [1], [1], [1], 6),
        call(real(12, 5), real(18, 12, 3)),
    ),
    **each(
        "conv2d.default",
        call(real(2, 6, 4, 4), real(12, 6, 2, 2), real(12), [2, 2]),
        call(real(2, 12, 4, 4), real(12, 2, 2, 2), real(12), [2, 2], [0, 0], [1, 1], 6),
    ),
    **each("conv3d.default", call(real(2, 6, 2, 2, 2), real(12, 6, 1, 2, 2))),
    **each("bmm.default", call(real(6, 4, 12), real(6, 12, 18))),
    **each(
        "baddbmm.default",
        call(real(6, 4, 18), real(6, 4, 12), real(6, 12, 18), beta=2, alpha=3),
        call(real(6, 1, 18), real(6, 4, 12), real(6, 12, 18)),
    ),
    **each(
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
    **each(
        "embedding.default",
        call(real(12, 6), words(6, 2, below=12)),
        call(real(12, 6), words(6, 2, below=12), 3),
        call(real(12, 6), words(6, below=12), -1),
    ),
    **each(
        "_grouped_mm.default",
        call(short(8, 64), short(3, 64, 64), torch.tensor([2, 5, 8], dtype=torch.int32)),
    ),
    "transformers.grouped_mm_fallback.default": (
        call(real(8, 6), real(3, 6, 12), torch.tensor([2, 5, 8], dtype=torch.int32)),
    ),
}

ATTENTION = {
    **each(
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
    **each("softmax.int log_softmax.int", call(X, -1), call(X, 0), call(X, 1, torch.float64)),
    **each("_softmax.default _log_softmax.default", call(X, -1, False)),
    **each("cumsum.default", call(X, -1), call(X, 0)),
    **each(
        "sum.dim_IntList mean.dim",
        call(X, [-1]),
        call(X, [0, 2], True),
        call(X, [0, 2]),
        call(X, None),
        call(X, [1], dtype=torch.float64),
    ),
    **each("sum.default mean.default", call(X), call(X, dtype=torch.float64)),
    **each("flip.default", call(X, [0]), call(X, [-1, 1])),
    **each("roll.default", call(X, [1], [0]), call(X, [2, 3], [0, 2]), call(real(6, 12), [1])),
    **each("tril.default triu.default", call(real(6, 12, 12)), call(real(6, 6, 12), 1)),
    **each("glu.default", call(X), call(X, 0)),
    **each("cumprod.default logcumsumexp.default", call(POSITIVE, -1)),
    **each("cummax.default cummin.default", call(X, 0)),
    **each("argsort.default", call(X), call(X, 0)),
    **each("argsort.stable sort.stable", call(X, stable=True, dim=0)),
    **each("linalg_vector_norm.default", call(X, 2, [-1]), call(X, 2, [0], True), call(X)),
    **each("norm.ScalarOpt_dim", call(X, 2, [-1]), call(X, 2, [0], True)),
    **each("var.dim std.dim", call(X, [-1]), call(X, [0], keepdim=True)),
    **each("var_mean.correction", call(X, [-1]), call(X, [0], keepdim=True)),
    **each("max.default min.default prod.default", call(X)),
    **each(
        "mse_loss.default l1_loss.default smooth_l1_loss.default huber_loss.default "
        "binary_cross_entropy_with_logits.default",
        call(X, POSITIVE),
    ),
    **each("any.default all.default", call(FLAGS)),
    **each("amax.default amin.default", call(X, [-1]), call(X, [0], True)),
    **each("max.dim min.dim", call(X, -1), call(X, 0, True)),
    **each("argmax.default argmin.default", call(X, -1), call(X)),
    **each(
        "var.correction std.correction", call(X, [-1]), call(X, [0, 2], keepdim=True, correction=0)
    ),
    **each("logsumexp.default", call(X, [-1]), call(X, [0, 1], True)),
    **each("any.dim all.dim", call(FLAGS, -1), call(FLAGS, 0, True)),
    **each("prod.dim_int", call(X, -1), call(X, 0, True)),
    **each("topk.default", call(X, 3), call(X, 2, 0)),
    **each("sort.default", call(X), call(X, 0, True)),
    **each(
        "layer_norm.default",
        call(X, [12]),
        call(X, [12], Y, Y),
        call(X, [2, 12], real(2, 12), real(2, 12)),
        call(X, [12], Y),
    ),
    **each("rms_norm.default", call(X, [12]), call(X, [12], Y), call(X, [2, 12], real(2, 12))),
    **each(
        "cross_entropy_loss.default",
        call(real(12, 6), words(12, below=6)),
        call(real(12, 6), words(12, below=6), None, 2),
        call(real(12, 6), words(12, below=6), ignore_index=3),
        call(real(12, 6), words(12, below=6), fixed(6)),
        call(real(12, 6), words(12, below=6), None, 0),
        call(real(2, 6, 12), words(2, 12, below=6)),
    ),
    **each("nll_loss_nd.default nll_loss.default", call(real(12, 6), words(12, below=6))),
}

WINDOWS = {
    **each("max_pool1d.default avg_pool1d.default", call(real(6, 12, 8), [2], [2])),
    **each("adaptive_avg_pool1d.default", call(real(6, 12, 8), [1]), call(real(12, 8), [2])),
    **each(
        "max_pool2d.default avg_pool2d.default max_pool2d_with_indices.default",
        call(real(6, 12, 4, 4), [2, 2], [2, 2]),
        call(real(6, 12, 4, 4), [3, 3], [1, 1], [1, 1]),
    ),
    **each(
        "adaptive_avg_pool2d.default _adaptive_avg_pool2d.default",
        call(real(6, 12, 4, 4), [1, 1]),
        call(real(6, 12, 4, 4), [2, 2]),
    ),
    **each("max_pool3d.default avg_pool3d.default", call(real(6, 12, 2, 2, 2), [2, 2, 2])),
    **each("adaptive_avg_pool3d.default", call(real(6, 12, 2, 2, 2), [1, 1, 1])),
    **each("upsample_nearest1d.vec", call(real(6, 12, 4), [8], None)),
    **each("upsample_linear1d.vec", call(real(6, 12, 4), [8], False, None)),
    **each("upsample_nearest2d.vec", call(real(6, 12, 2, 2), [4, 4], None)),
    **each(
        "upsample_bilinear2d.vec upsample_bicubic2d.vec",
        call(real(6, 12, 2, 2), [4, 4], False, None),
        call(real(6, 12, 2, 2), None, True, [2.0, 2.0]),
    ),
    **each("upsample_nearest3d.vec", call(real(6, 12, 2, 2, 2), [4, 4, 4], None)),
    **each("upsample_trilinear3d.vec", call(real(6, 12, 2, 2, 2), [4, 4, 4], False, None)),
    **each(
        "batch_norm.default",
        call(real(6, 12, 4), Y, Y, fixed(12), fixed(12), False, 0.1, 1e-5, False),
        call(real(6, 12), None, None, fixed(12), fixed(12), False, 0.1, 1e-5, False),
        call(real(6, 12, 4), Y, None, None, None, True, 0.1, 1e-5, False),
        call(real(1, 6, 12), None, None, None, None, True, 0.0, 1e-5, False),
    ),
    **each(
        "_native_batch_norm_legit_no_training.default",
        call(real(6, 12, 4), Y, Y, fixed(12), fixed(12), 0.1, 1e-5),
    ),
    **each(
        "group_norm.default",
        call(real(6, 12, 4), 1, Y, Y),
        call(real(6, 12, 4, 2), 6),
        call(real(6, 12), 3, Y),
        call(real(2, 36, 3), 6, real(36), real(36)),
        call(real(2, 12, 3), 12, Y, Y),
    ),
    **each(
        "im2col.default",
        call(real(6, 12, 4, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
        call(real(12, 4, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
    ),
}

SAMPLES: Mapping[str, tuple[Sample, ...]] = {
    **POINTWISE,
    **CONTRACTION,
    **ATTENTION,
    **REDUCTION,
    **MOVES,
    **WINDOWS,
}
