"""Records what autotp does with many small models, and compares two records.

    python tests/benchmarks/behaviour.py record before.json
    python tests/benchmarks/behaviour.py compare before.json after.json

A refactoring that means to change nothing records before and after. Of every combination
(architectures of the zoo over all four tasks; tp 2, 3 and 4; inference and training; float32 and
bfloat16) the record has the layouts, the ranges that each rank stores, the collectives, the costs
and the graphs of the first and the last rank, whose nodes are numbered, not named. Only names that
callers use are read, so one script serves before and after. `compare` prints every difference and
exits with 1 if there is one; `--renamed OLD=NEW` names a difference that is meant.
"""

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve()
sys.path.insert(0, str(next(p for p in ROOT.parents if (p / "pyproject.toml").is_file())))

import torch  # noqa: E402
from torch import fx  # noqa: E402

import autotp  # noqa: E402
from tests import zoo  # noqa: E402

A_TASK = 18


def combinations() -> list[tuple[str, str, int, bool, str]]:
    """Task, model type, tp, training and dtype: `A_TASK` architectures, evenly spread, of each."""
    found: list[tuple[str, str, int, bool, str]] = []
    for task in zoo.TASKS:
        kinds = [kind for t, kind in zoo.exportable() if t == task]
        step = max(1, len(kinds) // A_TASK)
        for i, kind in enumerate(kinds[::step][:A_TASK]):
            dtype = "bfloat16" if i % 4 in (1, 2) else "float32"
            found.append((task, kind, 2 + i % 3, i % 2 == 0, dtype))
    return found


def recorded(combination: tuple[str, str, int, bool, str]) -> tuple[str, dict[str, Any]]:
    """One combination's name and record."""
    task, kind, tp, training, dtype = combination
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model, inputs = zoo.build(kind, task)
    model.to(getattr(torch, dtype)).train(training)
    inputs = {
        name: value.to(getattr(torch, dtype)) if _is_floating(value) else value
        for name, value in inputs.items()
    }
    name = f"{task} {kind} tp={tp} {'training' if training else 'inference'} {dtype}"
    try:
        record = _record(model, inputs, tp, training)
    except autotp.AutotpError as error:
        record = {"error": type(error).__name__}
    return name, record


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _record(model: Any, inputs: Any, tp: int, training: bool) -> dict[str, Any]:
    ranks = [
        autotp.parallelize(model, tp, rank=rank, example_inputs=inputs, training=training)
        for rank in (0, tp - 1)
    ]
    plan = ranks[0].plan
    return {
        "layouts": {n: [p.layout, p.dim, str(p.axis)] for n, p in plan.parameters.items()},
        "ranges": {n: [s.ranges for s in p.shards] for n, p in plan.parameters.items()},
        "collectives": [
            [c.kind, c.phase, c.where, c.payload_bytes, c.wire_bytes, c.time_ps]
            for c in plan.collectives
        ],
        "cost": {**plan.cost, "gap": plan.gap, "replicated": plan.replicated_fraction},
        "memory": dict(plan.memory),
        "graphs": [list(_graphs(rank.graph_module)) for rank in ranks],
    }


def _graphs(module: fx.GraphModule) -> Iterator[str]:
    """A line a node of the module and of the modules in it, values numbered in their order."""
    for path, part in module.named_modules():
        if not isinstance(part, fx.GraphModule):
            continue
        yield f"graph {path or 'root'}"
        number = {node: f"%{i}" for i, node in enumerate(part.graph.nodes)}

        def spelled(argument: Any, number: dict[fx.Node, str] = number) -> str:
            if isinstance(argument, fx.Node):
                return number[argument]
            if isinstance(argument, list | tuple | fx.immutable_collections.immutable_list):
                return f"[{', '.join(spelled(a) for a in argument)}]"
            if isinstance(argument, dict):
                return f"{{{', '.join(f'{k}: {spelled(v)}' for k, v in argument.items())}}}"
            if isinstance(argument, slice):
                return f"slice{spelled([argument.start, argument.stop, argument.step])}"
            return repr(argument)

        for node in part.graph.nodes:
            target = node.target if isinstance(node.target, str) else _called(node.target)
            yield f"{number[node]} {node.op} {target} {spelled(node.args)} {spelled(node.kwargs)}"


def _called(target: Any) -> str:
    name = getattr(target, "__name__", "")
    return str(target) if isinstance(target, torch._ops.OpOverload) else name or str(target)


def record(path: Path, workers: int) -> None:
    """Write the record of all combinations."""
    found: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name, of in pool.map(recorded, combinations()):
            found[name] = of
            print(len(found), name, of.get("error", ""), flush=True)
    path.write_text(json.dumps(found, indent=0, sort_keys=True))


def compare(before: Path, after: Path, renamed: list[str]) -> int:
    """Print how two records differ; 1 if they do."""
    texts = [path.read_text() for path in (before, after)]
    for pair in renamed:
        old, _, new = pair.partition("=")
        texts[0] = texts[0].replace(old, new)
    old, new = (json.loads(text) for text in texts)
    wrong = 0
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            continue
        wrong += 1
        sides = (json.dumps(s.get(name), indent=0, sort_keys=True).splitlines() for s in (old, new))
        lines = list(difflib.unified_diff(*sides, "before", "after", lineterm="", n=0))
        print(f"{name}: {len(lines)} lines differ", *lines[:12], sep="\n    ")
    print(f"{len(new)} combinations, {wrong} differ")
    return 1 if wrong else 0


def main() -> int:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("record")
    first.add_argument("path", type=Path)
    first.add_argument("--workers", type=int, default=2)
    second = commands.add_parser("compare")
    second.add_argument("before", type=Path)
    second.add_argument("after", type=Path)
    second.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    chosen = parser.parse_args()
    if chosen.command == "record":
        record(chosen.path, chosen.workers)
        return 0
    return compare(chosen.before, chosen.after, chosen.renamed)


if __name__ == "__main__":
    sys.exit(main())
