"""The local forms of ops whose arguments depend on shard sizes; other ops run unchanged.

`FORMS` is a closed list, of which a rule names one. Each form takes a `Site` (one node under one
split strategy) and writes the node, with local sizes, into the new graph.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument
from torch.fx.node import Target as Called

from autotp.algebra.axis import Dim, Forest
from autotp.algebra.partition import Partition
from autotp.algebra.placement import Placement
from autotp.algebra.split import Split
from autotp.lower.conversion import Target
from autotp.planner.analysis import Use
from autotp.planner.strategy import Strategy

aten = torch.ops.aten


@dataclass(slots=True)
class Site:
    """One node being written: its new arguments (already converted operands) and the new graph.

    - `partition`: the axes that its strategy shards; `to`: the group of the graph (its rank
      matters only where shards are uneven).
    - `bounds`: the node of the ends of row groups, if the result's rows are grouped.
    """

    graph: fx.Graph
    use: Use
    strategy: Strategy
    partition: Partition
    forest: Forest
    to: Target
    args: list[Any]
    kwargs: dict[str, Any]
    bounds: fx.Node | None = None

    def is_split(self, dim: Dim) -> bool:
        """Whether the strategy shards an axis of `dim`."""
        return bool(self.forest.restrict((dim,), self.partition).parts)

    def list_split_dims(self, placement: Placement, dims: tuple[Dim, ...]) -> list[int]:
        """The numbers of the sharded dims of a value in `placement`."""
        if placement.kind != "SS":
            return [placement.dim] if placement.is_split else []
        return [d for d, dim in enumerate(dims) if self.is_split(dim)]

    def emit(self, target: Called, *args: Argument) -> fx.Node:
        """Append a call of `target`, named after the node being written."""
        function = cast("Callable[..., Any]", target)
        name = f"{self.use.node.name}_{function.__name__.partition('.')[0]}"
        return self.graph.create_node("call_function", function, args, name=name)

    def copy_node(self) -> fx.Node:
        """Append the node unchanged, on the converted operands."""
        return self.graph.create_node(
            "call_function",
            self.use.node.target,
            tuple(self.args),
            self.kwargs,
            name=self.use.node.name,
        )

    def find_argument(self, *names: str) -> tuple[int | str, Any]:
        """The position and value of the first argument in `names`; (-1, None) without one."""
        schema = cast(Any, self.use.node.target)._schema
        for at, argument in enumerate(schema.arguments):
            if argument.name in names:
                if at < len(self.args):
                    return at, self.args[at]
                return argument.name, self.kwargs.get(argument.name, argument.default_value)
        return -1, None

    def set_argument(self, name: str, value: Argument) -> None:
        """Set the argument called `name`, if the op has one."""
        for at, argument in enumerate(cast(Any, self.use.node.target)._schema.arguments):
            if argument.name == name:
                self.set_argument_at(at if at < len(self.args) else name, value)

    def set_argument_at(self, place: int | str, value: Argument) -> None:
        """Set the argument at `place`."""
        if isinstance(place, int):
            self.args[place] = value
        else:
            self.kwargs[place] = value


Form = Callable[[Site], fx.Node]


def emit_local_size(size: Argument, dim: Dim, site: Site) -> Argument:
    """The local value of a size argument: an integer, -1 unchanged, or a node."""
    if size == -1:
        return size
    if not isinstance(size, fx.Node):
        return emit_local_length(dim, site)
    full, local, even = _count_units(dim, site)
    if even:
        return site.emit(operator.floordiv, size, full // local)
    return site.emit(operator.mul, site.emit(operator.floordiv, size, full), local)


def _count_units(dim: Dim, site: Site) -> tuple[int, int, bool]:
    """The units of a dim (of its sharded axes, if its size is symbolic), this rank's, and whether
    all ranks have equally many.
    """
    split, tp = _find_split(dim, site), site.to.tp
    if split.is_known:
        return split.length(), split.local_length(site.to.rank, tp), split.is_even(tp)
    cuts = split.segments[0].cuts
    local = prod(e.part(site.to.rank, tp)[1] for e in cuts)
    return prod(e.size for e in cuts), local, split.is_even(tp)


def emit_local_length(dim: Dim, site: Site) -> int:
    """The elements of a static `dim` in this rank's shard."""
    if not site.is_split(dim):
        return site.forest.size(dim).static or 0
    return _find_split(dim, site).local_length(site.to.rank, site.to.tp)


def _find_split(dim: Dim, site: Site) -> Split:
    cut = site.forest.split(dim, site.partition)
    assert cut is not None, f"{site.use.node.name}: {site.partition} has no split here"
    return cut


def resize(site: Site) -> fx.Node:
    """Views and expansions: a sharded dim of the result gets its local size."""
    place, listed = site.find_argument("size", "shape", "sizes")
    if listed is None:
        return site.copy_node()
    _, first = site.find_argument("dim")
    rank = len(site.use.operands[0].dims)
    offset = first % rank if isinstance(first, int) else 0  # unflatten lists one dim's sizes only
    dims = site.use.rule.results[0]
    local = list(cast("Sequence[Any]", listed))
    for placed in site.list_split_dims(site.strategy.results[0], dims):
        if offset <= placed < offset + len(local):
            local[placed - offset] = emit_local_size(local[placed - offset], dims[placed], site)
    site.set_argument_at(place, local)
    return site.copy_node()


def squeeze(site: Site) -> fx.Node:
    """Squeeze by dim number: a sharded dim stays, even with one element per rank."""
    dims = site.use.operands[0].dims
    _, named = site.find_argument("dim")
    listed = range(len(dims)) if named is None else [named] if isinstance(named, int) else named
    gone = [d % len(dims) for d in listed if not site.forest.flatten(dims[d])]
    target = aten.squeeze.dims
    args = (site.args[0], gone)
    return site.graph.create_node("call_function", target, args, name=site.use.node.name)


def localise_repeats(site: Site) -> fx.Node:
    """Repeats: this rank's share of the copies; the output size follows."""
    site.set_argument("repeats", emit_local_length(site.use.rule.extra["copies"][0], site))
    site.set_argument("output_size", None)
    return site.copy_node()


def slice_dim(site: Site) -> fx.Node:
    """A slice of the sharded dim: its bounds within this rank's shard."""
    at = cast(int, site.find_argument("dim")[1])
    dims = site.use.operands[0].dims
    if at % len(dims) in site.list_split_dims(site.strategy.operands[0], dims):
        start = sum(emit_local_length(d, site) for d in site.use.rule.extra["before"])
        length = emit_local_length(site.use.rule.extra["piece"][0], site)
        site.set_argument("start", start)
        site.set_argument("end", start + length)
        site.set_argument("length", length)
    return site.copy_node()


def split_sections(site: Site) -> fx.Node:
    """A dim divided among several results: each gets the local length of its piece."""
    _, at = site.find_argument("dim")
    dims = site.use.operands[0].dims
    if (at or 0) % len(dims) not in site.list_split_dims(site.strategy.operands[0], dims):
        return site.copy_node()
    lengths = [emit_local_length(d, site) for d in site.use.rule.extra["pieces"]]
    if site.find_argument("chunks")[1] is not None and len(set(lengths)) == 1:
        return site.copy_node()
    return site.graph.create_node(
        "call_function",
        aten.split_with_sizes.default,
        (site.args[0], lengths, at or 0),
        name=site.use.node.name,
    )


def lookup(site: Site) -> fx.Node:
    """A row-sharded embedding: ids that other ranks own read any local row, masked to zero."""
    if site.strategy.results[0].kind not in ("P", "G"):
        return site.copy_node()
    total = site.forest.size(site.use.rule.factors[0].dim).static
    table, ids = site.args[0], site.args[1]
    listed = isinstance(ids, list | tuple)  # table[ids], where -1 is the last row
    if site.bounds is not None:
        ids = _emit_own_ids(site, cast("Sequence[fx.Node]", ids)[0], site.bounds)
    elif listed:
        ids = site.emit(aten.remainder.Scalar, cast("Sequence[Any]", ids)[0], total)
    absent = (True,) if site.bounds is not None else ()
    found = site.emit(torch.ops.autotp.local_index.default, ids, total, site.to.group, *absent)
    local = site.emit(operator.getitem, found, 0)
    outside = site.emit(operator.getitem, found, 1)
    value = site.graph.create_node(
        "call_function",
        site.use.node.target,
        (table, [local] if listed else local),
        name=site.use.node.name,
    )
    mask = outside
    for _ in site.use.operands[0].dims[1:]:
        mask = site.emit(aten.unsqueeze.default, mask, -1)
    value = site.emit(aten.masked_fill.Scalar, value, mask, 0.0)
    padding = site.find_argument("padding_idx")[1]
    if site.to.training and isinstance(padding, int) and padding >= 0:
        value = _block_gradient(site, value, ids, padding)
    return value


def _emit_own_ids(site: Site, ids: fx.Node, bounds: fx.Node) -> fx.Node:
    """The ids of this rank's own rows, then -1, which no rank owns."""
    counted = site.emit(aten.add.Scalar, ids, 1)
    own = site.emit(torch.ops.autotp.own_rows.default, counted, bounds, 0, site.to.group)
    return site.emit(aten.sub.Scalar, own, 1)


def _block_gradient(site: Site, value: fx.Node, ids: fx.Node, padding: int) -> fx.Node:
    """Pass the value of the padding row on, but no gradient to it, whichever rank owns it."""
    chosen = site.emit(aten.eq.Scalar, ids, padding)
    mask = site.emit(aten.unsqueeze.default, chosen, -1)
    still = site.emit(aten.detach.default, value)
    return site.emit(aten.where.self, mask, still, value)


def localise_groups(site: Site) -> fx.Node:
    """Ops per group of channels (convolutions, norms): the number of this rank's groups."""
    (dim,) = site.use.rule.extra["groups"]
    if site.is_split(dim):
        for name in ("groups", "num_groups"):
            site.set_argument(name, emit_local_length(dim, site))
    return site.copy_node()


def localise_bounds(site: Site) -> fx.Node:
    """A product of grouped rows: this rank's groups, counted from its own first row."""
    if site.strategy.results[0].is_grouped:
        place, bounds = site.find_argument("offs")
        site.set_argument_at(
            place, site.emit(torch.ops.autotp.local_bounds.default, bounds, site.to.group)
        )
    return site.copy_node()


def rescale(site: Site) -> fx.Node:
    """A mean over a sharded dim: the local mean is weighted by this rank's share."""
    value = site.copy_node()
    if site.strategy.results[0].kind != "P":
        return value
    reduced = next(f for f in site.use.rule.factors if f.kind == "reduce" and site.is_split(f.dim))
    full, local, even = _count_units(reduced.dim, site)
    if even:
        return site.emit(aten.div.Tensor, value, full // local)
    return site.emit(aten.mul.Tensor, value, local / full)


FORMS: Mapping[str, Form] = {
    "": Site.copy_node,
    "grouped": localise_bounds,
    "groups": localise_groups,
    "lookup": lookup,
    "repeats": localise_repeats,
    "rescale": rescale,
    "sections": split_sections,
    "sizes": resize,
    "slice": slice_dim,
    "squeeze": squeeze,
}
