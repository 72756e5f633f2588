"""Runs all ranks of a sharded model in one process, in lockstep, as the processes would.

    models = [autotp.parallelize(model, tp=4, rank=rank) for rank in range(4)]
    simulate(models, {"input_ids": ids}).outputs[0].logits

One interpreter walks all ranks' graphs node by node, including the layers (`lockstep`). A node that
needs the group becomes one joint function over all ranks' tensors (`collectives`), and its backward
another, so that gradients are in lockstep as well. A wrong graph gives the same wrong values as in
processes; what would hang there is an error here.
"""

from autotp.verification.simulate.lockstep import OUTPUT, Observe, RankGraph, Read, find_flat_name
from autotp.verification.simulate.ranks import Simulation, find_variant, simulate, walk_ranks

__all__ = [
    "OUTPUT",
    "Observe",
    "RankGraph",
    "Read",
    "Simulation",
    "find_flat_name",
    "simulate",
    "find_variant",
    "walk_ranks",
]
