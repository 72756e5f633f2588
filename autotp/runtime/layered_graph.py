"""A flat graph in layers: what the outliner makes and what a sharded model runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autotp.capture.conditions import Condition

__all__ = ["ConditionalGraph", "LayeredGraph"]


@dataclass(frozen=True, slots=True)
class LayeredGraph:
    """A root graph, a graph for each layer path, and where their nodes come from.

    - `root` calls `call_module` at the layer's path; a layer with several results gives a tuple.
    - `layers`: in the order of the calls; `get_attr` targets are relative to the layer.
    - `origin`: new node to the name of the flat node whose value it is. A call of a layer with
      several results has none (its `getitem` nodes have); a size may have several new nodes.
    - `shorter`: graphs that give the same where more is known of a call, the shortest first.
    """

    root: fx.Graph
    layers: Mapping[str, fx.Graph]
    origin: Mapping[fx.Node, str]
    shorter: "tuple[ConditionalGraph, ...]" = ()


@dataclass(frozen=True, slots=True)
class ConditionalGraph:
    """A graph that gives the same in calls for which the conditions hold."""

    conditions: frozenset[Condition]
    graph: LayeredGraph
