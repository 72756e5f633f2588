"""The local forms of the few ops that need one: everything else runs on shards as it stands.

`FORMS` is a closed list; a rule names one. Each takes a `Site` (one node under one split strategy)
and writes the node, with local sizes, into the new graph.
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

__all__ = ["FORMS", "Site", "emit_local_length", "emit_local_size"]

aten = torch.ops.aten


@dataclass(slots=True)
class Site:
    """One node being written: its new arguments (already converted operands) and the new graph.

    - `partition`: what its strategy cuts; `to`: whom the graph is for (its rank matters only where
      parts are uneven).
    - `bounds`: where the groups of the result's rows end, where they are grouped.
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

    def is_cut(self, dim: Dim) -> bool:
        """Whether the strategy cuts an axis of `dim`."""
        return bool(self.forest.present((dim,), self.partition).parts)

    def placed_dims(self, placement: Placement, dims: tuple[Dim, ...]) -> list[int]:
        """The numbers of the dims that are cut in a value placed so."""
        if placement.kind != "SS":
            return [placement.dim] if placement.is_split else []
        return [d for d, dim in enumerate(dims) if self.is_cut(dim)]

    def call(self, target: Called, *args: Argument) -> fx.Node:
        """A new node of the graph, called after the one being written: no other has its name."""
        function = cast("Callable[..., Any]", target)
        name = f"{self.use.node.name}_{function.__name__.partition('.')[0]}"
        return self.graph.create_node("call_function", function, args, name=name)

    def plain(self) -> fx.Node:
        """The node as it stands, on the converted operands."""
        return self.graph.create_node(
            "call_function",
            self.use.node.target,
            tuple(self.args),
            self.kwargs,
            name=self.use.node.name,
        )

    def argument(self, *names: str) -> tuple[int | str, Any]:
        """Place and value of the first argument that has one of `names`; (-1, None) if none has."""
        schema = cast(Any, self.use.node.target)._schema
        for at, argument in enumerate(schema.arguments):
            if argument.name in names:
                if at < len(self.args):
                    return at, self.args[at]
                return argument.name, self.kwargs.get(argument.name, argument.default_value)
        return -1, None

    def give(self, name: str, value: Argument) -> None:
        """Set the argument called `name`, if the op has one."""
        for at, argument in enumerate(cast(Any, self.use.node.target)._schema.arguments):
            if argument.name == name:
                self.replace(at if at < len(self.args) else name, value)

    def replace(self, place: int | str, value: Argument) -> None:
        """Set the argument at `place`."""
        if isinstance(place, int):
            self.args[place] = value
        else:
            self.kwargs[place] = value


Form = Callable[[Site], fx.Node]


def emit_local_size(size: Argument, dim: Dim, site: Site) -> Argument:
    """A size argument as this rank has it: an integer, -1 as it is, or a node of the local size."""
    if size == -1:
        return size
    if not isinstance(size, fx.Node):
        return emit_local_length(dim, site)
    whole, local, even = _units(dim, site)
    if even:
        return site.call(operator.floordiv, size, whole // local)
    return site.call(operator.mul, site.call(operator.floordiv, size, whole), local)


def _units(dim: Dim, site: Site) -> tuple[int, int, bool]:
    """Of a dim (of its cut axes, if its size is symbolic): the units, those of this rank, and
    whether all ranks have as many.
    """
    split, tp = _split(dim, site), site.to.tp
    if split.is_known:
        return split.length(), split.local_length(site.to.rank, tp), split.is_even(tp)
    cuts = split.segments[0].cuts
    local = prod(e.part(site.to.rank, tp)[1] for e in cuts)
    return prod(e.size for e in cuts), local, split.is_even(tp)


def emit_local_length(dim: Dim, site: Site) -> int:
    """The elements of a static `dim` that one rank holds when the site's partition is cut."""
    if not site.is_cut(dim):
        return site.forest.size(dim).static or 0
    return _split(dim, site).local_length(site.to.rank, site.to.tp)


def _split(dim: Dim, site: Site) -> Split:
    cut = site.forest.split(dim, site.partition)
    assert cut is not None, f"{site.use.node.name}: {site.partition} has no split here"
    return cut


def sizes(site: Site) -> fx.Node:
    """Views and expansions: the size of a split dim of the result is the local one."""
    place, listed = site.argument("size", "shape", "sizes")
    if listed is None:
        return site.plain()
    _, first = site.argument("dim")
    rank = len(site.use.operands[0].dims)
    offset = first % rank if isinstance(first, int) else 0  # unflatten lists one dim's sizes only
    dims = site.use.rule.results[0]
    local = list(cast("Sequence[Any]", listed))
    for placed in site.placed_dims(site.strategy.results[0], dims):
        if offset <= placed < offset + len(local):
            local[placed - offset] = emit_local_size(local[placed - offset], dims[placed], site)
    site.replace(place, local)
    return site.plain()


def squeeze(site: Site) -> fx.Node:
    """Dims of size 1 go, by number: the split dim stays, even at one element a rank."""
    dims = site.use.operands[0].dims
    _, named = site.argument("dim")
    listed = range(len(dims)) if named is None else [named] if isinstance(named, int) else named
    gone = [d % len(dims) for d in listed if not site.forest.flat(dims[d])]
    target = aten.squeeze.dims
    args = (site.args[0], gone)
    return site.graph.create_node("call_function", target, args, name=site.use.node.name)


def repeats(site: Site) -> fx.Node:
    """Repeated elements: this rank's share of the copies; how many there are in all follows."""
    site.give("repeats", emit_local_length(site.use.rule.extra["copies"][0], site))
    site.give("output_size", None)
    return site.plain()


def cut(site: Site) -> fx.Node:
    """A piece of the split dim is read or written: where it lies in this rank's share."""
    at = cast(int, site.argument("dim")[1])
    dims = site.use.operands[0].dims
    if at % len(dims) in site.placed_dims(site.strategy.operands[0], dims):
        start = sum(emit_local_length(d, site) for d in site.use.rule.extra["before"])
        length = emit_local_length(site.use.rule.extra["piece"][0], site)
        site.give("start", start)
        site.give("end", start + length)
        site.give("length", length)
    return site.plain()


def sections(site: Site) -> fx.Node:
    """A dim cut into several results: each has the local length of its piece."""
    _, at = site.argument("dim")
    dims = site.use.operands[0].dims
    if (at or 0) % len(dims) not in site.placed_dims(site.strategy.operands[0], dims):
        return site.plain()
    lengths = [emit_local_length(d, site) for d in site.use.rule.extra["pieces"]]
    if site.argument("chunks")[1] is not None and len(set(lengths)) == 1:
        return site.plain()
    return site.graph.create_node(
        "call_function",
        aten.split_with_sizes.default,
        (site.args[0], lengths, at or 0),
        name=site.use.node.name,
    )


def lookup(site: Site) -> fx.Node:
    """A table cut along its rows: ids of other ranks read a row of this one, and give zero."""
    if site.strategy.results[0].kind not in ("P", "G"):
        return site.plain()
    total = site.forest.size(site.use.rule.factors[0].dim).static
    table, ids = site.args[0], site.args[1]
    listed = isinstance(ids, list | tuple)  # table[ids], where -1 is the last row
    if site.bounds is not None:
        ids = _own_ids(site, cast("Sequence[fx.Node]", ids)[0], site.bounds)
    elif listed:
        ids = site.call(aten.remainder.Scalar, cast("Sequence[Any]", ids)[0], total)
    absent = (True,) if site.bounds is not None else ()
    found = site.call(torch.ops.autotp.local_index.default, ids, total, site.to.group, *absent)
    local = site.call(operator.getitem, found, 0)
    outside = site.call(operator.getitem, found, 1)
    value = site.graph.create_node(
        "call_function",
        site.use.node.target,
        (table, [local] if listed else local),
        name=site.use.node.name,
    )
    mask = outside
    for _ in site.use.operands[0].dims[1:]:
        mask = site.call(aten.unsqueeze.default, mask, -1)
    value = site.call(aten.masked_fill.Scalar, value, mask, 0.0)
    padding = site.argument("padding_idx")[1]
    if site.to.training and isinstance(padding, int) and padding >= 0:
        value = _without_gradient(site, value, ids, padding)
    return value


def _own_ids(site: Site, ids: fx.Node, bounds: fx.Node) -> fx.Node:
    """The ids of this rank's own rows, then -1, which no rank has."""
    counted = site.call(aten.add.Scalar, ids, 1)
    own = site.call(torch.ops.autotp.own_rows.default, counted, bounds, 0, site.to.group)
    return site.call(aten.sub.Scalar, own, 1)


def _without_gradient(site: Site, value: fx.Node, ids: fx.Node, padding: int) -> fx.Node:
    """The padding row gives its value but takes no gradient, whichever rank holds it."""
    chosen = site.call(aten.eq.Scalar, ids, padding)
    mask = site.call(aten.unsqueeze.default, chosen, -1)
    still = site.call(aten.detach.default, value)
    return site.call(aten.where.self, mask, still, value)


def groups(site: Site) -> fx.Node:
    """Each group of channels on its own (convolutions, norms): as many as this rank has."""
    (dim,) = site.use.rule.extra["groups"]
    if site.is_cut(dim):
        for name in ("groups", "num_groups"):
            site.give(name, emit_local_length(dim, site))
    return site.plain()


def grouped(site: Site) -> fx.Node:
    """A product of grouped rows: this rank's groups, counted from its own first row."""
    if site.strategy.results[0].is_grouped:
        place, bounds = site.argument("offs")
        site.replace(place, site.call(torch.ops.autotp.local_bounds.default, bounds, site.to.group))
    return site.plain()


def rescale(site: Site) -> fx.Node:
    """A mean over a split dim: the local mean counts for this rank's part of the elements."""
    value = site.plain()
    if site.strategy.results[0].kind != "P":
        return value
    reduced = next(f for f in site.use.rule.factors if f.kind == "reduce" and site.is_cut(f.dim))
    whole, local, even = _units(reduced.dim, site)
    if even:
        return site.call(aten.div.Tensor, value, whole // local)
    return site.call(aten.mul.Tensor, value, local / whole)


FORMS: Mapping[str, Form] = {
    "": Site.plain,
    "grouped": grouped,
    "groups": groups,
    "lookup": lookup,
    "repeats": repeats,
    "rescale": rescale,
    "sections": sections,
    "sizes": sizes,
    "slice": cut,
    "squeeze": squeeze,
}
