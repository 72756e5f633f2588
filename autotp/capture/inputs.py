"""The inputs of a capture: examples made from a config, and the sizes at which to trace.

The sizes that a user gives only serve to estimate costs. Tracing uses sizes of its own, which are
distinct and at least 2, so that no size is mistaken for another or for the special case of 1.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState
from autotp.capture.program import (
    LOGITS_TO_KEEP,
    TOKEN_INPUTS,
    Program,
    find_broken_guard,
    name_leaves,
)
from autotp.capture.source_model import find_device
from autotp.errors import CaptureError, PlanError

LONGEST_EXAMPLE = 4096  # tokens: longer contexts change no decision, only the estimated cost
BATCH_SIZES = (3, 2)
SEQUENCE_SIZES = (11, 13, 17, 19, 7, 5, 3, 2)

Axis = tuple[str, int]
"""A kind of data size ("batch", "sequence", "decoder", "past" or "kept"), and the size."""
Axes = Mapping[int, Axis]
"""The dims of one input whose size belongs to the data."""


def make_example_inputs(
    model: nn.Module,
    training: bool,
    *,
    batch: int = 1,
    sequence: int | None = None,
    room: int = 0,
    advice: str = "Pass example_inputs={name: tensor}.",
) -> dict[str, Any]:
    """Inputs for a model that has a config, on its own device, to estimate costs with.

    Example: for a causal language model `{"input_ids": (1, 4096), "attention_mask": (1, 4096),
    "use_cache": False}`, and `labels` when training.

    Constraints:
    - `sequence` defaults to the model's maximum, at most 4096. PlanError if it and the `room`
      tokens to be generated after it exceed that maximum.
    - PlanError with `advice` for a module without a config, or with a main input of another kind.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise PlanError(
            f"{type(model).__name__}: has no config, so example inputs cannot be made for it; "
            f"its forward takes {_quote_names(_list_parameters(model))}. {advice}"
        )
    most = find_longest_input(model)
    if most and (sequence or 1) + room > most:
        more = f" and {room} new tokens" if room else ""
        advice = f"Give a sequence of at most {most - room}"
        if room >= most:
            advice = f"Request at most {most - 1} new tokens, after a sequence of 1"
        raise PlanError(
            f"{type(model).__name__}: sequence {sequence or 1}{more}, but its config has {most} "
            f"positions. {advice}."
        )
    longest = min(LONGEST_EXAMPLE, most - room if most else LONGEST_EXAMPLE)
    return _Examples(model, batch, sequence or longest).make_all(training)


def find_longest_input(model: nn.Module) -> int | None:
    """The most positions that the model's config allows; None if it sets no limit.

    A position embedding with a `padding_idx` reserves its first rows, up to that one.
    """
    config = _find_text_config(model)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    limit = next((n for n in (getattr(config, k, None) for k in names) if isinstance(n, int)), None)
    if limit is None or limit < 1:
        return None
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    padded = [
        e.padding_idx for e in embeddings if e.num_embeddings == limit and e.padding_idx is not None
    ]
    return limit - 1 - max(padded) if padded else limit


def order_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs in the order of the forward's signature, without those that repeat a default None.

    Raises CaptureError for an unknown or a missing input.
    """
    parameters = _list_parameters(model)
    _refuse_starred(model, inputs)
    unknown = [name for name in inputs if name not in parameters]
    if unknown and not _accepts_any(model):
        raise CaptureError(_explain_unknown(model, unknown[0], parameters))
    given = {n: v for n, v in inputs.items() if v is not None or not _is_none(parameters.get(n))}
    required = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
    if required:
        raise CaptureError(
            f"{type(model).__name__}: its forward needs {_quote_names(required)}, but the inputs "
            f"are {_quote_names(given)}. Add {required[0]!r} to the inputs."
        )
    ordered = [n for n in parameters if n in given] + sorted(
        n for n in given if n not in parameters
    )
    return {n: given[n] for n in ordered}


def find_data_axes(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Axes]:
    """For each tensor among the leaves, the dims whose size belongs to the data.

    Example: ids (2, 12) have `{0: ("batch", 2), 1: ("sequence", 12)}`; images (2, 3, 224, 224) have
    only the batch; a mask (2, 1, 12, 12) passed with such ids has both lengths too.
    """
    past = _find_past_axes(inputs)
    tensors = {n: v for n, v in name_leaves(inputs).items() if isinstance(v, torch.Tensor)}
    every = list(tensors)
    tensors = {n: v for n, v in tensors.items() if n not in past}
    shapes = [tuple(t.shape) for t in tensors.values() if t.dim()]
    batch = shapes[0][0] if shapes else 0
    lengths = {t.shape[1] for t in tensors.values() if _has_sequence(t, batch)}
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    axes: dict[str, Axes] = {}
    for name, tensor in tensors.items():
        decoder = name.startswith("decoder_") or (name == "labels" and encoder_decoder)
        kind = "decoder" if decoder else "sequence"
        found = {d: (kind, tensor.shape[d]) for d in _find_sequence_dims(tensor, batch, lengths)}
        axes[name] = dict.fromkeys(_find_batch_dims(tensor, batch), ("batch", batch)) | found
    if past:
        main = next((axes[n] for n in TOKEN_INPUTS if n in axes), next(iter(axes.values())))
        kept = {a[1] for of in past.values() for a in of.values() if a[0] == "past"}
        axes = {n: _free_lengths(of, main, kept) for n, of in axes.items()}
    if _is_positions(tensors.get(LOGITS_TO_KEEP)):
        axes[LOGITS_TO_KEEP] = {0: ("kept", tensors[LOGITS_TO_KEEP].shape[0])}
    return {n: past.get(n) or axes.get(n, {}) for n in every}


def _is_positions(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dim() == 1


def _free_lengths(axes: Axes, main: Axes, past: set[int]) -> Axes:
    """The axes of an input next to a cache: lengths other than that of the new tokens are `past`.

    A size that is neither a length in the cache nor one plus the new tokens is not a length.
    """
    new = {*main.values()}
    lengths = past | {a[1] + n for a in new for n in past}
    return {
        d: a if a in new or a[0] == "batch" else ("past", a[1])
        for d, a in axes.items()
        if not past or a in new or a[0] == "batch" or a[1] in lengths
    }


def _find_past_axes(inputs: Mapping[str, Any]) -> dict[str, Axes]:
    """For each tensor of the caches among the inputs, the dims whose size belongs to the data."""
    axes: dict[str, Axes] = {}
    for name, state in inputs.items():
        if isinstance(state, CacheState):
            for i, (leaf, dims) in enumerate(zip(state.leaves, state.data_dims, strict=True)):
                axes[f"{name}.{i}"] = {d: (kind, leaf.shape[d]) for d, kind in dims.items()}
    return axes


def resize_for_trace(
    inputs: Mapping[str, Any], axes: Mapping[str, Axes], free: frozenset[str], limit: int | None
) -> dict[str, Any]:
    """Copies of the inputs, with our own sizes along the axes whose kind is in `free`.

    Values are tiled or cropped. Equal axes stay equal, and `requires_grad` is kept.
    """
    wanted = sorted(
        {a for of in axes.values() for a in of.values() if a[0] in free}, key=_order_axis
    )
    sizes = _choose_sizes(wanted, limit)
    leaves = [
        _resize(leaf, {d: sizes[a] for d, a in axes[name].items() if a in sizes})
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in name_leaves(inputs).items()
    ]
    return pytree.tree_unflatten(leaves, pytree.tree_structure(dict(inputs)))


def _order_axis(axis: Axis) -> tuple[int, str]:
    return axis[1], axis[0]


def _choose_sizes(axes: list[Axis], limit: int | None) -> dict[Axis, int]:
    """The sizes to trace at; a length that is the sum of a past and a new one remains their sum."""
    sums = _find_sums(axes)
    chosen = _choose_distinct([a for a in axes if a not in sums], limit)
    return chosen | {a: chosen[past] + chosen[new] for a, (past, new) in sums.items()}


def _find_sums(axes: list[Axis]) -> dict[Axis, tuple[Axis, Axis]]:
    """Each length that is the sum of a past and a new one, with these two."""
    lengths = [a for a in axes if a[0] not in ("batch", "kept")]
    past = [a for a in lengths if a[0] == "past"]
    new = [a for a in lengths if a[0] != "past"]
    every = product(lengths, past, new)
    return {t: (p, n) for t, p, n in every if t not in (p, n) and t[1] == p[1] + n[1]}


def _choose_distinct(axes: list[Axis], limit: int | None) -> dict[Axis, int]:
    batch = [a for a in axes if a[0] == "batch"]
    lengths = [a for a in axes if a[0] != "batch"]
    longest = limit or max([SEQUENCE_SIZES[0], *(size for _, size in lengths)])
    legal = [n for n in SEQUENCE_SIZES if n <= longest]
    rest = [n for n in legal if n not in BATCH_SIZES[: len(batch)]]
    kept = [n for _, n in lengths if n not in rest]  # for more lengths than we have sizes
    ascending = sorted((rest + kept)[: len(lengths)])
    return dict(zip(batch, BATCH_SIZES, strict=False)) | dict(zip(lengths, ascending, strict=False))


def _resize(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    resized = tensor.detach()
    for dim, size in sizes.items():
        order = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
        resized = resized.index_select(dim, order)
    return resized.clone().requires_grad_(tensor.requires_grad)


def _find_batch_dims(tensor: torch.Tensor, batch: int) -> tuple[int, ...]:
    if _is_stacked(tensor, batch):
        return (1,)
    return (0,) if tensor.dim() > 0 and tensor.shape[0] == batch else ()


def _has_sequence(tensor: torch.Tensor, batch: int) -> bool:
    """Whether dim 1 is a sequence by rank and dtype alone: token ids, masks, positions, vectors."""
    if tensor.dim() == 3:
        return not _is_stacked(tensor, batch)
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _is_stacked(tensor: torch.Tensor, batch: int) -> bool:
    """Whether it has several numbers per token (kinds, batch, length): positions in a grid."""
    return tensor.dim() == 3 and not tensor.is_floating_point() and tensor.shape[1] == batch


def _find_sequence_dims(tensor: torch.Tensor, batch: int, lengths: set[int]) -> tuple[int, ...]:
    if tensor.dim() == 1:
        return (0,) if tensor.shape[0] in lengths - {batch} else ()
    if _is_stacked(tensor, batch):
        return (2,) if tensor.shape[2] in lengths else ()
    if _has_sequence(tensor, batch) or (tensor.dim() == 2 and tensor.shape[1] in lengths):
        return (1,)
    if tensor.dim() == 4 and tensor.shape[1] == 1:  # a mask (batch, 1, queries, keys)
        return tuple(d for d in (2, 3) if tensor.shape[d] in lengths)
    return ()


def _list_parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(model.forward).parameters
    return {n: p for n, p in found.items() if p.kind not in kinds}


def _accepts_any(model: nn.Module) -> bool:
    found = inspect.signature(model.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in found)


def _refuse_starred(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise CaptureError if inputs could only be passed as `*args`, which have no names."""
    found = inspect.signature(model.forward).parameters.values()
    starred = [p.name for p in found if p.kind is p.VAR_POSITIONAL]
    if starred and (starred[0] in inputs or not _list_parameters(model)):
        raise CaptureError(
            f"{type(model).__name__}: its forward takes *{starred[0]}, and inputs without names "
            "are not supported. Name them in its signature: forward(self, x, y)."
        )


def _is_none(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is None


def _explain_unknown(model: nn.Module, name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
    accepted = _quote_names(known)
    return f"{type(model).__name__}: its forward does not take {name!r}, only {accepted}. {hint}"


def _quote_names(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _find_text_config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    nested = getattr(config, "get_text_config", None)
    return nested() if callable(nested) else config


@dataclass(frozen=True, slots=True)
class _Examples:
    """Makes each kind of input of one model at the requested sizes."""

    model: nn.Module
    batch: int
    sequence: int

    def make_all(self, training: bool) -> dict[str, Any]:
        taken = _list_parameters(self.model)
        main = str(getattr(self.model, "main_input_name", "input_ids"))
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "input_ids": self.make_tokens,
            "pixel_values": self.make_pixels,
            "input_features": self.make_spectrum,
        }
        if main not in makers:
            raise PlanError(
                f"{type(self.model).__name__}: example inputs can be made for "
                f"{_quote_names(list(makers))}, but its main input is {main!r}. "
                f"Pass example_inputs={{{main!r}: tensor, …}}."
            )
        inputs: dict[str, Any] = {main: makers[main]()}
        if "attention_mask" in taken and main == "input_ids":
            inputs["attention_mask"] = torch.ones_like(inputs[main])
        if getattr(_find_config(self.model), "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = self.make_tokens()
        if training and "labels" in taken:
            inputs["labels"] = self.make_labels()
        return inputs | ({"use_cache": False} if "use_cache" in taken else {})

    def make_tokens(self) -> torch.Tensor:
        size = getattr(_find_text_config(self.model), "vocab_size", 2)
        return self._sample_integers((self.batch, self.sequence), size)

    def make_labels(self) -> torch.Tensor:
        loss = str(getattr(self.model, "loss_type", "") or "")
        if loss.endswith(("SequenceClassification", "ImageClassification")):
            return self._sample_integers(
                (self.batch,), int(getattr(_find_config(self.model), "num_labels", 2))
            )
        return self.make_tokens()

    def make_pixels(self) -> torch.Tensor:
        config = _find_config(self.model)
        config = (
            config if hasattr(config, "image_size") else getattr(config, "vision_config", config)
        )
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return self._sample_reals((self.batch, getattr(config, "num_channels", 3), height, width))

    def make_spectrum(self) -> torch.Tensor:
        config = _find_config(self.model)
        frames = 2 * getattr(config, "max_source_positions", 1500)  # the convolutions halve them
        return self._sample_reals((self.batch, getattr(config, "num_mel_bins", 80), frames))

    def _sample_integers(self, shape: tuple[int, ...], below: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, below, shape, generator=generator).to(find_device(self.model))

    def _sample_reals(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        return torch.randn(shape, generator=generator).to(find_device(self.model), dtype)


def _find_config(model: nn.Module) -> object:
    return getattr(model, "config", None)


SHORT, LONGER = 8, 12


def choose_inputs(
    model: nn.Module, training: bool, capture: Callable[[Mapping[str, Any]], Program]
) -> tuple[Mapping[str, Any], Program]:
    """Inputs to estimate costs with, and the program that `capture` makes of them.

    They are the longest that the model takes (at most 4096), or short if the graph grows with each
    token. Raises as `make_example_inputs` and `capture` do.
    """
    longest = make_example_inputs(model, training)
    if (find_longest_input(model) or LONGER) < LONGER or not _is_longer(longest, SHORT):
        return longest, capture(longest)
    short, longer = (make_example_inputs(model, training, sequence=n) for n in (SHORT, LONGER))
    program = capture(short)
    if program.dynamic and find_broken_guard(program, longest) is None:
        return longest, program
    if not program.dynamic and _count_ops(capture(longer)) - _count_ops(program) >= LONGER - SHORT:
        return short, program
    return longest, capture(longest)


def _is_longer(inputs: Mapping[str, Any], length: int) -> bool:
    """Whether there are more than `length` input ids."""
    ids = inputs.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.shape[1] > length


def _count_ops(program: Program) -> int:
    return len(program.graph.nodes)
