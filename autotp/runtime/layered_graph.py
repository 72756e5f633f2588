"""A graph outlined into layers, as a sharded model runs it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autotp.capture.conditions import Condition


@dataclass(frozen=True, slots=True)
class LayeredGraph:
    """A root graph, one graph per layer path, and the origin of their nodes.

    - `root` calls `call_module` at the layer's path; a layer with several results returns a tuple.
    - `layers`: in the order of the calls; `get_attr` targets are relative to the layer.
    - `origin`: new node to the name of the flat node whose value it is. A call of a layer with
      several results has none (its `getitem` nodes have); a size may have several new nodes.
    - `shorter`: graphs with equal results under further conditions, the shortest first.
    """

    root: fx.Graph
    layers: Mapping[str, fx.Graph]
    origin: Mapping[fx.Node, str]
    shorter: "tuple[ConditionalGraph, ...]" = ()


@dataclass(frozen=True, slots=True)
class ConditionalGraph:
    """A graph whose results are equal in calls that satisfy the conditions."""

    conditions: frozenset[Condition]
    graph: LayeredGraph
