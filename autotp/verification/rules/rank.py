"""Runs a rewritten graph as one rank would, without a group, for the checks of rules."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from autotp.algebra.placement import CONVERSION_OPS
from autotp.runtime.ops.grouped_rows import find_own_bounds, localise_index
from autotp.runtime.ops.library import bind_arguments, read_wire
from autotp.runtime.ops.primitives import LOCAL


class RankInterpreter(fx.Interpreter):
    """Interprets a rewritten graph as one rank, without a group."""

    def __init__(self, graph: fx.Graph, tensors: Mapping[str, Tensor], rank: int, tp: int) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.tensors, self.rank, self.tp = tensors, rank, tp

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The tensor of a parameter or constant."""
        return self.tensors[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op; of an op that needs the group, the part of this rank."""
        if getattr(target, "namespace", "") != "autotp":
            return super().call_function(target, args, kwargs)
        given = bind_arguments(target, args, kwargs)
        match target._schema.name.partition("::")[2]:
            case "share_gradients":  # the check reads them before the sum
                return given["xs"]
            case "local_bounds":
                return find_own_bounds(given["bounds"], self.rank, self.tp)
            case "local_index":
                absent = given.get("absent", False)
                return localise_index(
                    given["index"], given["size"], self.rank, self.tp, absent=absent
                )
            case op:
                run = LOCAL[CONVERSION_OPS[op].forward.before]
                return run(given["x"], read_wire(given), self.rank, self.tp)
