"""A rewritten graph run as one rank would, without a group: what the laws of rules look at."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn, zeros_like

from autotp.algebra.split import Split
from autotp.runtime.ops.blocks import take
from autotp.runtime.ops.grouped_rows import local_index, own_bounds, rows_first

__all__ = ["RankInterpreter"]


class RankInterpreter(fx.Interpreter):
    """Runs a rewritten graph as one rank would, without a group."""

    def __init__(self, graph: fx.Graph, tensors: Mapping[str, Tensor], rank: int, tp: int) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.tensors, self.rank, self.tp = tensors, rank, tp

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The tensor that a parameter or constant was given as."""
        return self.tensors[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The op itself; those that ask for the group, as this rank does them."""
        if getattr(target, "namespace", "") != "autotp":
            return super().call_function(target, args, kwargs)
        return getattr(self, target._schema.name.partition("::")[2])(*args)

    def scatter(self, x: Tensor, dim: int, split: list[int], group: str) -> Tensor:
        """The rank's part."""
        return take(x, dim, Split.decode(split), self.rank, self.tp)

    scatter_copies = scatter

    def keep_first(self, x: Tensor, group: str) -> Tensor:
        """The value on rank 0, zero elsewhere."""
        return zeros_like(x) if self.rank else x

    def share_gradients(self, xs: list[Tensor], cuts: list[list[int]], group: str) -> list[Tensor]:
        """The tensors as they are: their gradients are looked at unsummed."""
        return xs

    def own_rows(self, x: Tensor, bounds: Tensor, dim: int, group: str) -> Tensor:
        """The rank's own rows, then zeros."""
        return rows_first(x, bounds, dim, self.rank, self.tp)

    def local_bounds(self, bounds: Tensor, group: str) -> Tensor:
        """Where this rank's groups end."""
        return own_bounds(bounds, self.rank, self.tp)

    def local_index(
        self, index: Tensor, size: int, group: str, absent: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The rank's rows of a lookup, and which ids are not its own."""
        return local_index(index, size, self.rank, self.tp, absent=absent)
