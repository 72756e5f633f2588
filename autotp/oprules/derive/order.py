"""What is known of positions: whether they are sorted, and which value counts up how many of each.

Rows are grouped by sorted positions (of experts, say): counted, and the counts added up, they give
the bounds of a grouped product. A table looked up by the same positions then gives each row what is
its own group's, so it may be cut along with the groups. That is proven node by node, or not used.

Rows of rules/ say it, by the option `order`: `positions` (the number of a result that holds
positions in a dim), `sorted` (of a result in ascending order), `counts` and `sums`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from autotp.capture.graph_facts import find_source, read_argument
from autotp.oprules.rule import Row

__all__ = ["Orders"]


class Orders:
    """The proofs for one program, by the rows of its ops."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self.rows = rows

    def bounds(self, ids: fx.Node, groups: int) -> str:
        """The name of the value that bounds the rows of each of `groups` positions, where `ids`
        are sorted positions; empty if there is none.
        """
        if not self._sorted(ids):
            return ""
        found = (sums.name for sums in self._sums(ids, groups))
        return next(found, "")

    def _option(self, node: fx.Node, name: str) -> object:
        row = self.rows.get(str(node.target))
        order = row.options.get("order") if row else None
        return order.get(name) if isinstance(order, dict) else None

    def _sorted(self, ids: fx.Node) -> bool:
        """Whether `ids` are one dim of positions in ascending order."""
        node, result = find_source(ids)
        meta = ids.meta.get("val")
        if self._option(node, "sorted") != result or not isinstance(meta, torch.Tensor):
            return False
        falling = read_argument(node, "descending")
        return not falling and meta.dim() == 1 and self._positions(node.all_input_nodes[0])

    def _positions(self, node: fx.Node) -> bool:
        """Whether a value holds positions, moved about: whole numbers from 0 on."""
        origin, result = find_source(node)
        if self._option(origin, "positions") == result:
            return True
        return self._moves(origin) and self._positions(origin.all_input_nodes[0])

    def _moves(self, node: fx.Node) -> bool:
        """Whether a node only moves the elements of one tensor, all of them."""
        row = self.rows.get(str(node.target))
        sources = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if row is None or not row.moves or len(sources) != 1:
            return False
        before, after = sources[0].meta["val"], node.meta.get("val")
        return isinstance(after, torch.Tensor) and before.numel() == after.numel()

    def _sums(self, ids: fx.Node, groups: int) -> Iterator[fx.Node]:
        """The nodes that add up how many of each position there are."""
        for counts in self._counts(ids, groups):
            for reader in counts.users:
                if self._option(reader, "sums") and read_argument(reader, "dim") in (0, -1):
                    yield reader

    def _counts(self, ids: fx.Node, groups: int) -> Iterator[fx.Node]:
        for reader in ids.users:
            if self._option(reader, "counts") and _covers(reader, groups):
                yield reader
            elif self._moves(reader):
                yield from self._counts(reader, groups)


def _covers(node: fx.Node, groups: int) -> bool:
    """Whether a node counts the positions from 0 to `groups` - 1, each on its own."""
    given = tuple(read_argument(node, name) for name in ("bins", "min", "max"))
    return given == (groups, 0, groups - 1)
