"""Computes what all ranks compute for given inputs, in one process without a group."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.algebra.split import Split
from autotp.capture.cache import flatten_caches
from autotp.capture.program import Program, name_leaves
from autotp.records.plan import CacheRecord
from autotp.runtime.model import ShardedModel
from autotp.runtime.ops.blocks import concatenate_shards, slice_block
from autotp.runtime.variant import Variant
from autotp.verification.simulate.collectives import Tally
from autotp.verification.simulate.lockstep import Observe, RankGraph, RankTensors, Read, Walker


@dataclass(frozen=True, slots=True)
class Simulation:
    """The results of a run of all ranks.

    - `outputs`: of each rank, as the model returns them.
    - `parameters`: of each rank, by name: the leaves to differentiate by. Inputs that require grad
      are among them, as `input x`.
    - `collectives`: the count of each, such as `"forward all_reduce"`; those of the backward are
      added while autograd runs.
    """

    outputs: list[Any]
    parameters: Sequence[Mapping[str, Tensor]]
    collectives: Tally


def simulate(
    models: Sequence[ShardedModel],
    inputs: Mapping[str, Any],
    *,
    observe: Observe | None = None,
    read: Read | None = None,
    dtype: torch.dtype | None = None,
) -> Simulation:
    """What the processes with `models`, one per rank, would compute for `inputs`.

    - `models`: in the order of their ranks; their number is the size of the group.
    - `dtype`: a floating-point dtype to compute in, instead of those of the parameters, buffers,
      inputs and graphs.

    Constraints:
    - Random ops draw the same numbers on every rank, as in processes with equal seeds.
    - Hooks of modules do not run.
    """
    inputs = flatten_caches(dict(inputs))
    variants = [find_variant(model, inputs) for model in models]
    graphs = [
        RankGraph(model, variant.outlined.root, variant.outlined.layers, variant.outlined.origin)
        for model, variant in zip(models, variants, strict=True)
    ]
    caches = variants[0].plan.caches
    program = variants[0].program
    return walk_ranks(graphs, program, inputs, caches, observe=observe, read=read, dtype=dtype)


def walk_ranks(
    graphs: Sequence[RankGraph],
    program: Program,
    inputs: Mapping[str, Any],
    caches: Mapping[str, CacheRecord] | None = None,
    *,
    observe: Observe | None = None,
    read: Read | None = None,
    dtype: torch.dtype | None = None,
) -> Simulation:
    """What `graphs` compute in lockstep; `program` names the inputs and gives the output structure.

    An unsharded model is a single graph: `RankGraph(model, program.graph, {}, {})`. Caches are
    unsharded in the inputs and outputs; `caches` says how the ranks shard them.
    """
    tensors = [RankTensors(graph, dtype) for graph in graphs]
    leaves = name_leaves(inputs)
    shards = _CacheShards(program, caches or {}, len(graphs))
    given = [
        [own.copy_input(shards.slice(name, leaves[name], rank)) for name in program.inputs]
        for rank, own in enumerate(tensors)
    ]
    walker = Walker(graphs, tensors, observe, read, dtype)
    with _set_default_dtype(dtype):
        flat = walker.run("", [graph.root for graph in graphs], given)
    outputs = [
        pytree.tree_unflatten(results, program.out_spec) for results in shards.concatenate(flat)
    ]
    leaves_of = [
        own.parameters | list_input_leaves(zip(program.inputs, mine, strict=True))
        for own, mine in zip(tensors, given, strict=True)
    ]
    return Simulation(outputs, leaves_of, walker.tally)


@dataclass(frozen=True, slots=True)
class _CacheShards:
    """Shards the tensors of a program's cache as `caches` says."""

    program: Program
    caches: Mapping[str, CacheRecord]
    ranks: int

    def slice(self, name: str, full: Tensor, rank: int) -> Tensor:
        """A rank's shard of an input; all of it if it is not of a cache, or not sharded."""
        paths = {carried.taken: carried.path for carried in self.program.carried.values()}
        record = self.caches.get(paths.get(name, ""))
        if record is None or record.dim is None:
            return full
        return slice_block(full, record.dim, Split.decode(record.split), rank, self.ranks)

    def concatenate(self, flat: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The ranks' outputs, with the shards of caches concatenated."""
        outputs = [list(results) for results in flat]
        for number, carried in self.program.carried.items():
            record = self.caches.get(carried.path)
            if record is not None and record.dim is not None:
                shards = [results[number] for results in outputs]
                full = concatenate_shards(shards, record.dim, Split.decode(record.split))
                for results in outputs:
                    results[number] = full
        return outputs


def list_input_leaves(inputs: Iterable[tuple[str, object]]) -> dict[str, Tensor]:
    """The inputs that require grad, as `input x`, which cannot be the name of a parameter."""
    return {
        f"input {name}": value
        for name, value in inputs
        if isinstance(value, Tensor) and value.requires_grad
    }


def find_variant(model: ShardedModel, inputs: Mapping[str, Any]) -> Variant:
    """The variant for a call of `model` with `inputs`, captured now if necessary."""
    ShardedModel.prepare(model, **inputs)
    key = ShardedModel.key(model, **inputs)
    given = {name: flatten_caches(value) for name, value in inputs.items() if value is not None}
    every = model.sharded_state.list_variants().values()
    return next(v for v in every if v.key == key and v.accepts(given))


@contextmanager
def _set_default_dtype(dtype: torch.dtype | None) -> Generator[None]:
    """Make `dtype` the default dtype in the enclosed code."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
