"""Finds out which values are sorted positions, and which values are cumulative counts of them.

Rows may be grouped by sorted positions, such as the numbers of experts; the cumulative counts of
these are the bounds of a grouped product. An embedding looked up by the same positions gives each
row an entry of its own group, so it may be sharded along with the groups. This is shown node by
node, by the option `order` of rows in rules/: `positions` (the number of a result with positions in
a dim), `sorted` (of a result in ascending order), `counts` and `sums`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autotp.capture.graph_facts import find_source, read_argument
from autotp.oprules.rule import Row


class Orders:
    """Answers such questions for one program, by the rows of its ops."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self.rows = rows

    def find_bounds(self, ids: fx.Node, groups: int) -> str:
        """The name of the value with the bounds of the rows of each of `groups` positions, if `ids`
        are sorted positions; empty if there is none.
        """
        if not self._is_sorted(ids):
            return ""
        return next((sums.name for sums in self._list_sums(ids, groups)), "")

    def _read_option(self, node: fx.Node, name: str) -> object:
        row = self.rows.get(str(node.target))
        order = row.options.get("order") if row else None
        return order.get(name) if isinstance(order, dict) else None

    def _is_sorted(self, ids: fx.Node) -> bool:
        """Whether `ids` are one dim of positions in ascending order."""
        node, result = find_source(ids)
        meta = ids.meta.get("val")
        if self._read_option(node, "sorted") != result or not isinstance(meta, torch.Tensor):
            return False
        descending = read_argument(node, "descending")
        return not descending and meta.dim() == 1 and self._has_positions(node.all_input_nodes[0])

    def _has_positions(self, node: fx.Node) -> bool:
        """Whether a value has positions (integers from 0), possibly moved."""
        origin, result = find_source(node)
        if self._read_option(origin, "positions") == result:
            return True
        return self._moves(origin) and self._has_positions(origin.all_input_nodes[0])

    def _moves(self, node: fx.Node) -> bool:
        """Whether a node only moves the elements of one tensor, all of them."""
        row = self.rows.get(str(node.target))
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if row is None or not row.moves or len(sources) != 1:
            return False
        before, after = sources[0].meta["val"], node.meta.get("val")
        return isinstance(after, torch.Tensor) and before.numel() == after.numel()

    def _list_sums(self, ids: fx.Node, groups: int) -> Iterator[fx.Node]:
        """The nodes that compute cumulative counts of positions."""
        for counts in self._list_counts(ids, groups):
            for reader in counts.users:
                if self._read_option(reader, "sums") and read_argument(reader, "dim") in (0, -1):
                    yield reader

    def _list_counts(self, ids: fx.Node, groups: int) -> Iterator[fx.Node]:
        for reader in ids.users:
            if self._read_option(reader, "counts") and _covers(reader, groups):
                yield reader
            elif self._moves(reader):
                yield from self._list_counts(reader, groups)


def _covers(node: fx.Node, groups: int) -> bool:
    """Whether a node counts each of the positions from 0 to `groups` - 1."""
    bins = tuple(read_argument(node, name) for name in ("bins", "min", "max"))
    return bins == (groups, 0, groups - 1)
