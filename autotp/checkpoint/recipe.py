"""How a tensor is computed from others: recorded on meta tensors, and read back box by box.

The converters of a checkpoint (stack the experts, concatenate two of their weights, transpose) are
code of Transformers. They are run on tensors without values, and each op is recorded. Any box of
the result is then traced to boxes of the inputs: a rank reads its own experts, or its own rows of
each expert, and no more. An op without a rule below is run on full tensors, one parameter at a
time; an op that cannot be recorded is reported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.checkpoint.stored_tensor import Box, make_full_box, measure_box

Read: TypeAlias = Callable[[Tensor, Box], Tensor]


@dataclass(frozen=True, slots=True)
class _RecordedOp:
    """An op that was run; `index`: which of its outputs a tensor is."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int


class Recipes(TorchDispatchMode):
    """Records the ops run in a `with` block, by the tensors that they return.

    `make_leaf` makes a tensor without values to run them on; `read` reads a box of any tensor that
    was computed from leaves, and `list_leaves` lists the leaves. `untraced` names an op that cannot
    be read back: it writes to a tensor, or takes one that is unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[int, _RecordedOp] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no id is reused
        self._full: dict[int, Sequence[Tensor]] = {}
        self.untraced = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op, and record what it returned."""
        result = func(*args, **(kwargs or {}))
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable or any(id(x) not in self for x in taken):
            self.untraced = str(func)
        outputs: Sequence[object] = [result] if isinstance(result, Tensor) else result
        if isinstance(outputs, list | tuple):
            for index, output in enumerate(outputs):
                if isinstance(output, Tensor) and id(output) not in self:
                    self._steps[id(output)] = _RecordedOp(func, args, kwargs or {}, index)
                    self._kept.append(output)
        return result

    def __contains__(self, tensor: int) -> bool:
        """Whether the tensor of this id is a leaf, or was computed in the block."""
        return tensor in self._names or tensor in self._steps

    def make_leaf(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a leaf called `name`: a tensor without values."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.add_leaf(tensor, name)
        return tensor

    def add_leaf(self, tensor: Tensor, name: str) -> None:
        """Make a tensor a leaf called `name`."""
        self._names[id(tensor)] = name
        self._kept.append(tensor)

    def list_leaves(self, tensor: Tensor) -> list[str]:
        """List the names of the leaves that a tensor is computed from, each once."""
        found: dict[str, None] = {}
        waiting = [tensor]
        while waiting:
            at = waiting.pop()
            if id(at) in self._names:
                found[self._names[id(at)]] = None
            elif step := self._steps.get(id(at)):
                inputs = pytree.tree_leaves((step.args, dict(step.kwargs)))
                waiting.extend(x for x in reversed(inputs) if isinstance(x, Tensor))
        return list(found)

    def read(self, tensor: Tensor, box: Box, leaf: Callable[[str, Box], Tensor]) -> Tensor:
        """Read the values in a box of `tensor`; `leaf(name, box)` reads those of leaves."""

        def read(at: Tensor, box: Box) -> Tensor:
            if 0 in measure_box(box):
                return torch.empty(measure_box(box), dtype=at.dtype)
            if id(at) in self._names:
                return leaf(self._names[id(at)], box)
            step = self._steps[id(at)]
            rule = _RULES.get(step.op) or (
                _read_pointwise if torch.Tag.pointwise in step.op.tags else None
            )
            if rule is None:
                return self._run(at, step, read)[tuple(slice(*span) for span in box)]
            return rule(read, step, box)

        return read(tensor, box)

    def forget(self) -> None:
        """Free the full tensors that were computed for ops without a rule."""
        self._full.clear()

    def _run(self, tensor: Tensor, step: _RecordedOp, read: Read) -> Tensor:
        """Run the op on full tensors; its result is kept until `forget`."""
        if id(tensor) not in self._full:
            result = _apply_op(
                step, lambda x: _match_strides(x, read(x, make_full_box(tuple(x.shape))))
            )
            self._full[id(tensor)] = [result] if isinstance(result, Tensor) else result
        return self._full[id(tensor)][step.index]


def _match_strides(meta: Tensor, found: Tensor) -> Tensor:
    """Give values the strides with which the op was recorded: views depend on them."""
    if found.stride() == meta.stride() or 0 in meta.stride():
        return found
    strided = torch.empty_strided(meta.shape, meta.stride(), dtype=found.dtype)
    return strided.copy_(found)


def _apply_op(step: _RecordedOp, real: Callable[[Tensor], Tensor]) -> Any:
    """Run an op with its tensors replaced by `real(tensor)`."""

    def replace(x: object) -> object:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return real(x) if isinstance(x, Tensor) else x

    args, kwargs = pytree.tree_map(replace, (step.args, dict(step.kwargs)))
    return step.op(*args, **kwargs)


def _read_pointwise(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    """Read a pointwise op; sizes of 1 are broadcast."""

    def read_operand(x: Tensor) -> Tensor:
        own = box[len(box) - x.dim() :]
        return read(x, tuple((0, 1) if n == 1 else s for n, s in zip(x.shape, own, strict=True)))

    return _apply_op(step, read_operand)


def _read_view(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    """Read a view: the smallest box of the input that contains its elements is read."""
    source, sizes = step.args[0], list(step.args[1])
    if -1 in sizes:
        sizes[sizes.index(-1)] = source.numel() // -prod(sizes)
    outer: list[tuple[int, int]] = []
    wanted: list[Tensor] = []
    for old, new in _group_dims(tuple(source.shape), sizes):
        at = _number_elements(sizes[new], box[new])
        first, last = int(at.min()), int(at.max())
        spans, start = _bound_range(tuple(source.shape[old]), first, last)
        outer.extend(spans)
        wanted.append(at - start)
    found = read(source, tuple(outer))
    groups = [prod(measure_box(tuple(outer[old]))) for old, _ in _group_dims(source.shape, sizes)]
    found = found.reshape(groups)
    for dim, at in enumerate(wanted):
        if at.numel() != groups[dim]:
            found = found.index_select(dim, at)
    return found.reshape(measure_box(box))


def _group_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, slice]]:
    """Group the dims of two shapes of the same elements into the smallest groups of equal size."""
    found: list[tuple[slice, slice]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        begin = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := prod(old[begin[0] : i])) != (b := prod(new[begin[1] : j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        found.append((slice(begin[0], i), slice(begin[1], j)))
    return found


def _number_elements(shape: Sequence[int], box: Box) -> Tensor:
    """Number the elements in a box of a shape, in row-major order."""
    at = torch.zeros(1, dtype=torch.int64)
    for size, span in zip(shape, box, strict=True):
        at = (at[:, None] * size + torch.arange(*span)).view(-1)
    return at


def _bound_range(shape: tuple[int, ...], first: int, last: int) -> tuple[Box, int]:
    """Find the box around all elements from `first` to `last`, and the number of its first."""
    spans: list[tuple[int, int]] = []
    start, differ = 0, False
    for k, size in enumerate(shape):
        inner = prod(shape[k + 1 :])
        low, high = first // inner % size, last // inner % size
        spans.append((0, size) if differ else (low, high + 1))
        start += 0 if differ else low * inner
        differ = differ or low != high
    return tuple(spans), start


def _read_same(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    return read(step.args[0], box)


def _read_cat(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    tensors = cast("Sequence[Tensor]", step.args[0])
    dim = _get_argument(step, 1, "dim", 0) % len(box)
    start, stop = box[dim]
    found: list[Tensor] = []
    at = 0
    for tensor in tensors:
        size = tensor.shape[dim]
        first, last = max(start, at), min(stop, at + size)
        if first < last:
            found.append(read(tensor, _replace_span(box, dim, (first - at, last - at))).clone())
        at += size
    return torch.cat(found, dim)


def _read_stack(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    dim = _get_argument(step, 1, "dim", 0) % len(box)
    rest = (*box[:dim], *box[dim + 1 :])
    return torch.stack([read(step.args[0][k], rest).clone() for k in range(*box[dim])], dim)


def _read_split(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    source, sizes = step.args[:2]
    dim = _get_argument(step, 2, "dim", 0) % len(box)
    before = sizes * step.index if isinstance(sizes, int) else sum(sizes[: step.index])
    return read(source, _shift_span(box, dim, before))


def _read_slice(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    dim = _get_argument(step, 1, "dim", 0) % len(box)
    start = _get_argument(step, 2, "start", None) or 0
    size: int = step.args[0].shape[dim]
    start = min(start + size if start < 0 else start, size)
    if _get_argument(step, 4, "step", 1) == 1:
        return read(step.args[0], _shift_span(box, dim, start))
    full = read(step.args[0], _replace_span(box, dim, (0, size)))
    first, stop = box[dim]
    return step.op(full, *step.args[1:], **step.kwargs).narrow(dim, first, stop - first)


def _read_select(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    source, dim, index = step.args
    dim %= source.dim()
    index %= source.shape[dim]
    return read(source, (*box[:dim], (index, index + 1), *box[dim:])).squeeze(dim)


def _read_unbind(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    dim = _get_argument(step, 1, "dim", 0) % (len(box) + 1)
    span = (step.index, step.index + 1)
    return read(step.args[0], (*box[:dim], span, *box[dim:])).squeeze(dim)


def _read_transpose(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    a, b = (d % len(box) for d in step.args[1:3])
    inner = list(box)
    inner[a], inner[b] = inner[b], inner[a]
    return read(step.args[0], tuple(inner)).transpose(a, b)


def _read_t(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    return read(step.args[0], box[::-1]).t()


def _read_permute(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    order = [d % len(box) for d in step.args[1]]
    inner = tuple(box[order.index(k)] for k in range(len(box)))
    return read(step.args[0], inner).permute(order)


def _read_squeeze(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    source, dim = step.args
    dim %= source.dim()
    if source.shape[dim] != 1:
        return read(source, box)
    return read(source, (*box[:dim], (0, 1), *box[dim:])).squeeze(dim)


def _read_unsqueeze(read: Read, step: _RecordedOp, box: Box) -> Tensor:
    dim = step.args[1] % len(box)
    return read(step.args[0], (*box[:dim], *box[dim + 1 :])).unsqueeze(dim)


def _get_argument(step: _RecordedOp, place: int, name: str, default: Any) -> Any:
    """Get an argument of an op by its position or its name."""
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def _replace_span(box: Box, dim: int, span: tuple[int, int]) -> Box:
    return (*box[:dim], span, *box[dim + 1 :])


def _shift_span(box: Box, dim: int, by: int) -> Box:
    return _replace_span(box, dim, (box[dim][0] + by, box[dim][1] + by))


def _list_rules() -> Iterator[tuple[Any, Callable[[Read, _RecordedOp, Box], Tensor]]]:
    aten = torch.ops.aten
    for op in (aten.clone, aten.detach, aten.alias, aten.contiguous):
        yield op.default, _read_same
    yield aten._to_copy.default, _read_pointwise
    for op in (aten.view, aten._unsafe_view, aten.reshape):
        yield op.default, _read_view
    yield aten.cat.default, _read_cat
    yield aten.stack.default, _read_stack
    yield aten.split.Tensor, _read_split
    yield aten.split_with_sizes.default, _read_split
    yield aten.slice.Tensor, _read_slice
    yield aten.select.int, _read_select
    yield aten.unbind.int, _read_unbind
    yield aten.transpose.int, _read_transpose
    yield aten.t.default, _read_t
    yield aten.permute.default, _read_permute
    yield aten.squeeze.dim, _read_squeeze
    yield aten.unsqueeze.default, _read_unsqueeze


_RULES: Final = dict(_list_rules())
