"""Our plans beside those that Transformers brings: what stays whole, and what a forward pass costs.

    python -m tests.benchmarks.hf_plans run --out hf_plans.jsonl --tp 2,4
    python -m tests.benchmarks.hf_plans report --out hf_plans.jsonl > docs/tables/hf-plans.md

`run` makes a tiny model of each type of tests/zoo.tsv and plans it, once for training and once for
inference. Where the type has a plan by hand, that is applied by Transformers itself, on a group
that communicates nothing, and one forward pass is run in which collectives are counted. A type is
*worse* if ours keeps more whole than theirs (2 % slack), or as much at more collectives.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from autotp.compiler import ModelCompiler
from autotp.options import read_request
from autotp.records.plan import Plan
from tests import zoo
from tests.benchmarks import coverage
from tests.benchmarks.hf_plans_report import report

SLACK = 0.02
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Row = dict[str, Any]


def rows(task: str, kind: str, sizes: list[int], times: coverage._Times) -> Iterator[Row]:
    """A line for each tp: theirs and ours."""
    model, inputs = times.timed("build", zoo.build)(kind, task)
    if not getattr(model, "tp_plan", None):
        yield from (coverage._row(task, kind, tp, "no plan", "") for tp in sizes)
        return
    work = ModelCompiler(model, read_request(training=True), inputs)
    for tp in sizes:
        theirs = times.timed("theirs", hand_made)(task, kind, tp)
        ours = {}
        for mode, training in (("training", True), ("inference", False)):
            work.training = training
            ours[mode] = figures(work.compile(tp, "tp").plan)
        result = verdict(theirs, ours["inference"])
        found = {"theirs": theirs, "ours": ours, "seconds": times.taken()}
        yield coverage._row(task, kind, tp, result, theirs["died"]) | found


def verdict(theirs: Row, ours: Row) -> str:
    """Whether ours is ok, or worse in its share whole or in its collectives."""
    if ours["whole"] > theirs["whole"] + SLACK:
        return "more whole"
    equal = ours["whole"] >= theirs["whole"] - SLACK
    dearer = sum(ours["forward"].values()) > sum(theirs["forward"].values())
    return "more collectives" if equal and dearer and not theirs["died"] else "ok"


def figures(plan: Plan) -> Row:
    """The share that stays whole under our plan, its largest parts, and its forward collectives."""
    whole = [r for r in plan.parameters.values() if r.dim is None]
    largest = sorted(whole, key=lambda r: -r.bytes)[:8]
    total = sum(r.bytes for r in plan.parameters.values())
    forward = [c for c in plan.collectives if c.phase == "forward"]
    return {
        "whole": round(plan.replicated_fraction, 4),
        "largest": [f"{r.name}: {r.reason}" for r in largest if r.bytes > total / 200],
        "forward": dict(Counter(c.kind for c in forward)),
        "places": dict(Counter(f"{c.kind} {c.where}" for c in forward)),
    }


def hand_made(task: str, kind: str, tp: int) -> Row:
    """The same of the plan that Transformers brings; `died` says how, if a forward pass does."""
    model, inputs = zoo.build(kind, task)
    names = {id(p): n for n, p in model.named_parameters()}
    alias = {n: names[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    bytes_of = {n: p.nbytes for n, p in model.named_parameters()}
    for name in alias.keys() - bytes_of.keys():  # they tie weights after they are cut
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(model.get_parameter(name).clone()))
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:
        mesh = dist.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        style = model._expand_parallel_plan(model.tp_plan)
        sharded, counts, died = set[str](), Counter[str](), ""
        try:
            apply_tensor_parallelism(model, mesh, style)
            sharded = {alias[n] for n in alias if _is_sharded(model, n)}
            counts = _counted(model, inputs)
        except Exception as error:  # noqa: BLE001 how it dies is a figure
            died = f"{type(error).__name__}: {error}"[:300].splitlines()[0]
    finally:
        dist.destroy_process_group()
    whole = sum(size for name, size in bytes_of.items() if name not in sharded)
    return {
        "whole": round(whole / sum(bytes_of.values()), 4),
        "forward": dict(counts),
        "styles": dict(Counter(style.values())),
        "died": died,
    }


def _is_sharded(model: nn.Module, name: str) -> bool:
    tensor = model.get_parameter(name)
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


class _Counting(TorchDispatchMode):
    """Counts collectives, also those that DTensor adds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if DTensor in types:
            return NotImplemented
        if "c10d" in str(func) and (kind := _kind(str(func))):
            self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


def _counted(model: nn.Module, inputs: dict[str, Any]) -> Counter[str]:
    """The collectives of one forward pass."""
    with torch.no_grad(), _Counting() as counting:
        model(**inputs)
    return counting.seen


def _kind(op: str) -> str:
    """`c10d.allreduce_` and the functional `all_reduce` are one kind; empty: it is none."""
    plain = op.replace("_", "")
    return next((kind for kind in KINDS if kind.replace("_", "") in plain), "")


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    return coverage.main(arguments, rows, report, __doc__)


if __name__ == "__main__":
    sys.exit(main())
