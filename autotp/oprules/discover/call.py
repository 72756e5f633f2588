"""One call of an op without a row, prepared to be run at sizes of our own choice.

Arguments are those in the graph, with holes for tensors and sizes. A call that is unsuitable for a
trial (it writes to memory, draws random numbers, communicates, …) is refused with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autotp.algebra.size import Size
from autotp.capture.sizes import Sizes
from autotp.oprules.rule import Operand

Values: TypeAlias = Mapping[Size, int]
"""The number in place of each size of a call in a trial."""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)
_COLLECTIVE = "c10d"  # in the namespaces of all ops that communicate
_UNSUITABLE = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.dynamic_output_shape: "the sizes of its results depend on values",
    torch.Tag.data_dependent_output: "its result is a number read from a tensor",
}


class _Hole(NamedTuple):
    """The place of operand `number` among the arguments."""

    number: int


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """A call without its tensors and sizes.

    - `args`, `kwargs`: with holes for tensors, and a Size for each size.
    - `shapes`, `dtypes`: of each operand; `results`: the shapes of the results.
    - `device`: the type of device that the graph runs on.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[Size, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[Size, ...], ...]
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for calls with the same rule."""
        arguments = repr((self.args, self.kwargs))
        return self.target, arguments, self.shapes, self.dtypes, self.results, self.device

    def sizes(self) -> list[Size]:
        """Every size of an operand or argument that is not 0 or 1, once."""
        listed = [s for shape in self.shapes for s in shape]
        listed += [x for x in _list_leaves((self.args, self.kwargs)) if isinstance(x, Size)]
        return [s for s in dict.fromkeys(listed) if s.static not in (0, 1)]

    def numbers(self) -> list[int]:
        """The integers greater than 1 among the arguments: sizes may be tied to them."""
        leaves = [x for x in _list_leaves((self.args, self.kwargs)) if type(x) is int]
        return list(dict.fromkeys(x for x in leaves if x > 1))

    def run(self, tensors: Sequence[Tensor], values: Values) -> list[Tensor]:
        """The op's results on `tensors`."""

        def fill(x: Any) -> Any:
            if isinstance(x, _Hole):
                return tensors[x.number]
            return evaluate_size(x, values) if isinstance(x, Size) else x

        args, kwargs = _map_leaves(self.args, fill), _map_leaves(self.kwargs, fill)
        results: Any = self.target(*args, **kwargs)
        return [results] if isinstance(results, Tensor) else list(results)


def describe_call(
    node: fx.Node, operands: Sequence[Operand], metas: Mapping[int, Tensor], sizes: Sizes
) -> OpaqueCall | str:
    """The call of `node`, or why it is unsuitable for a trial."""
    target = node.target
    if not isinstance(target, OpOverload):
        return "it is not an op that can run by itself"
    if reason := _explain_unsuitable(target):
        return reason
    places = {(o.argument, o.item): _Hole(k) for k, o in enumerate(operands)}
    try:
        args = tuple(_open_argument(a, at, places, sizes) for at, a in enumerate(node.args))
        kwargs = {name: _open_argument(a, name, places, sizes) for name, a in node.kwargs.items()}
    except _UnfitError as error:
        return str(error)
    tensors = [cast(Tensor, _find_operand_node(node, o).meta["val"]) for o in operands]
    if not metas or sorted(metas) != list(range(len(target._schema.returns))):  # pyright: ignore[reportPrivateUsage]
        return "not all of its results are tensors"
    if any(t.is_complex() or t.layout is not torch.strided for t in [*tensors, *metas.values()]):
        return "it has complex or sparse tensors"
    return OpaqueCall(
        target,
        args,
        kwargs,
        tuple(sizes.read(t) for t in tensors),
        tuple(t.dtype for t in tensors),
        tuple(sizes.read(metas[k]) for k in sorted(metas)),
        tensors[0].device.type,
    )


def _explain_unsuitable(target: OpOverload) -> str:
    schema = target._schema  # pyright: ignore[reportPrivateUsage] torch has no public way
    if schema.is_mutable:
        return "it writes to its operands"
    if any(r.alias_info for r in schema.returns):
        return "its result shares memory with an operand"
    if _COLLECTIVE in target.namespace:
        return "it communicates with other ranks"
    return next((why for tag, why in _UNSUITABLE.items() if tag in target.tags), "")


class _UnfitError(Exception):
    """An argument that a trial cannot make up."""


def _open_argument(
    x: Any,
    place: int | str,
    places: Mapping[tuple[int | str, int], _Hole],
    sizes: Sizes,
) -> Any:
    """An argument with holes for tensors, and sizes for nodes that are sizes."""
    if (place, -1) in places:
        return places[(place, -1)]
    if not isinstance(x, list | tuple):
        return _open_leaf(x, sizes)
    items = enumerate(cast("Sequence[Any]", x))
    return [places[(place, k)] if (place, k) in places else _open_leaf(i, sizes) for k, i in items]


def _open_leaf(x: Any, sizes: Sizes) -> Any:
    if isinstance(x, fx.Node):
        value = x.meta.get("val")
        if isinstance(value, torch.SymInt):
            return sizes.read_number(value)
        raise _UnfitError(f"its argument {x.name} is computed")
    if isinstance(x, list | tuple):
        return [_open_leaf(i, sizes) for i in cast("Sequence[Any]", x)]
    if not isinstance(x, _PLAIN):
        raise _UnfitError(f"it has an argument of type {type(x).__name__}")
    return x


def _find_operand_node(node: fx.Node, operand: Operand) -> fx.Node:
    """The node of an operand."""
    place = operand.argument
    argument: Any = node.args[place] if isinstance(place, int) else node.kwargs[place]
    return argument if operand.item < 0 else argument[operand.item]


def _map_leaves(x: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, _Hole | Size):
        return change(x)
    if isinstance(x, Mapping):
        return {k: _map_leaves(v, change) for k, v in cast("Mapping[str, Any]", x).items()}
    if isinstance(x, list | tuple):
        return [_map_leaves(v, change) for v in cast("Sequence[Any]", x)]
    return change(x)


def _list_leaves(x: Any) -> Iterator[Any]:
    leaves: list[Any] = []
    _map_leaves(x, leaves.append)
    return iter(leaves)


def evaluate_size(size: Size, values: Values) -> int:
    """The number in place of `size`."""
    return values.get(size, size.coefficient)
