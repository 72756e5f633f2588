"""What all ranks compute for given inputs, in one process without any group."""

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

__all__ = ["Simulation", "list_input_leaves", "simulate", "find_variant", "walk_ranks"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a walk of all ranks gave.

    - `outputs`: each rank's, as the model returns them. `parameters`: each rank's own, by name; the
      leaves that gradients belong to. Inputs that require grad are among them, as `input x`.
    - `collectives`: `"forward all_reduce"` to its count; `"backward …"` grows while autograd runs.
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
    """What the processes that hold `models`, one a rank, would compute for `inputs`.

    Constraints:
    - `models` are in the order of their ranks; their number is the group's size.
    - `dtype` computes in another floating dtype than the graphs say (float64, to settle doubts):
      parameters, buffers, inputs and the dtypes in the graphs are exchanged for it.
    - Random ops draw the same on every rank, as in processes that were seeded alike.
    - Hooks of modules do not run.
    """
    inputs = flatten_caches(dict(inputs))
    variants = [find_variant(model, inputs) for model in models]
    parts = [
        RankGraph(model, variant.outlined.root, variant.outlined.layers, variant.outlined.origin)
        for model, variant in zip(models, variants, strict=True)
    ]
    caches = variants[0].plan.caches
    program = variants[0].program
    return walk_ranks(parts, program, inputs, caches, observe=observe, read=read, dtype=dtype)


def walk_ranks(
    parts: Sequence[RankGraph],
    program: Program,
    inputs: Mapping[str, Any],
    caches: Mapping[str, CacheRecord] | None = None,
    *,
    observe: Observe | None = None,
    read: Read | None = None,
    dtype: torch.dtype | None = None,
) -> Simulation:
    """What `parts` compute in lockstep; `program` names their inputs and shapes their outputs.

    A whole model is the case of one part: `RankGraph(model, program.graph, {}, {})`. Caches go in and
    come out whole; `caches` says which parts of them the ranks have.
    """
    tensors = [RankTensors(part, dtype) for part in parts]
    leaves = name_leaves(inputs)
    kept = _CacheShards(program, caches or {}, len(parts))
    given = [
        [own.input(kept.part(name, leaves[name], rank)) for name in program.inputs]
        for rank, own in enumerate(tensors)
    ]
    walker = Walker(parts, tensors, observe, read, dtype)
    with _set_default_dtype(dtype):
        flat = walker.run("", [part.root for part in parts], given)
    outputs = [pytree.tree_unflatten(results, program.out_spec) for results in kept.joined(flat)]
    leaves_of = [
        own.parameters | list_input_leaves(zip(program.inputs, mine, strict=True))
        for own, mine in zip(tensors, given, strict=True)
    ]
    return Simulation(outputs, leaves_of, walker.tally)


@dataclass(frozen=True, slots=True)
class _CacheShards:
    """The tensors of a program's cache, cut for the ranks as `caches` says."""

    program: Program
    caches: Mapping[str, CacheRecord]
    ranks: int

    def part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of an input; all of it if it is no cache's, or not cut."""
        paths = {carried.taken: carried.path for carried in self.program.carried.values()}
        record = self.caches.get(paths.get(name, ""))
        if record is None or record.dim is None:
            return whole
        return slice_block(whole, record.dim, Split.decode(record.split), rank, self.ranks)

    def joined(self, flat: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The ranks' outputs, with the tensors of caches put together."""
        outputs = [list(results) for results in flat]
        for number, carried in self.program.carried.items():
            record = self.caches.get(carried.path)
            if record is not None and record.dim is not None:
                parts = [results[number] for results in outputs]
                whole = concatenate_shards(parts, record.dim, Split.decode(record.split))
                for results in outputs:
                    results[number] = whole
        return outputs


def list_input_leaves(inputs: Iterable[tuple[str, object]]) -> dict[str, Tensor]:
    """Those inputs whose gradient is wanted, as `input x`, which no parameter is called."""
    return {
        f"input {name}": value
        for name, value in inputs
        if isinstance(value, Tensor) and value.requires_grad
    }


def find_variant(model: ShardedModel, inputs: Mapping[str, Any]) -> Variant:
    """The graph that answers a call of `model` with `inputs`, captured now if need be."""
    ShardedModel.prepare(model, **inputs)
    key = ShardedModel.key(model, **inputs)
    given = {name: flatten_caches(value) for name, value in inputs.items() if value is not None}
    every = model.sharded_state.list_variants().values()
    return next(v for v in every if v.key == key and v.accepts(given))


@contextmanager
def _set_default_dtype(dtype: torch.dtype | None) -> Generator[None]:
    """Tensors made without a dtype are of `dtype` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
