"""All ranks of a sharded model in one process, in lockstep: what the processes would compute.

    models = [autotp.parallelize(model, tp=4, rank=rank) for rank in range(4)]
    simulate(models, {"input_ids": ids}).outputs[0].logits

One interpreter walks all ranks' graphs node by node, into the layers too (`lockstep`). A node that
asks for the group becomes one joint function over all ranks' tensors (`joint`), and its backward
another, so that gradients are in lockstep as well. A wrong graph gives wrong values here as it
would there; what would hang there is an error.
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
