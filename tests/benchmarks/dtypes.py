"""Plans the architectures of the zoo in float32 and in bfloat16, and tells how the plans differ.

    python -m tests.benchmarks.dtypes lines.jsonl
    python -m tests.benchmarks.dtypes lines.jsonl --types gemma3_text,dory --modes training

Every pair of task and model type is planned for inference and for training, at tp 2, and adds a
line to the file; what has a line already is not planned again. The summary counts the plans that
are the same, those that differ by what bytes cost alone, and lists those that differ by more, which
is a fault: the exit code is then 1. `tests/dtypes.py` says what is compared.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from tests import zoo
from tests.dtypes import compare

MODES = ("inference", "training")


def combinations(types: str, modes: str) -> Iterator[tuple[str, str, str]]:
    """Task, model type and mode; of all types where `types` is empty."""
    named = types.split(",") if types else None
    for task, model_type in zoo.exportable():
        if named is None or model_type in named:
            for mode in modes.split(","):
                yield task, model_type, mode


def known(path: Path) -> list[dict[str, object]]:
    """The lines of a file, none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(path: Path, types: str, modes: str, tp: int) -> None:
    """Compare what has no line yet, and add one for each."""
    done = {(row["task"], row["type"], row["mode"], row["tp"]) for row in known(path)}
    for task, model_type, mode in combinations(types, modes):
        if (task, model_type, mode, tp) in done:
            continue
        found = compare(model_type, task, training=mode == "training", tp=tp)
        row = {"task": task, "type": model_type, "mode": mode, "tp": tp}
        row |= {"error": found.error, "bytes": found.by_bytes, "elements": found.by_elements}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        differences = found.by_elements or found.by_bytes
        print(f"{task} {model_type} {mode} {found.error}", *differences, sep="\n    ", flush=True)


def summary(rows: list[dict[str, object]]) -> str:
    """How many plans are the same, and which are not."""
    failed = [row for row in rows if row["error"]]
    faults = [row for row in rows if row["elements"]]
    cheaper = [row for row in rows if row["bytes"] and not row["elements"]]
    same = len(rows) - len(failed) - len(faults) - len(cheaper)
    counts = f"{same} the same, {len(cheaper)} differ by what bytes cost, {len(faults)} by more"
    lines = [f"{len(rows)} comparisons: {counts}, {len(failed)} fail in both dtypes"]
    for name, group in (("by bytes", cheaper), ("by more", faults), ("fails", failed)):
        lines += [f"{name}: {row['task']} {row['type']} {row['mode']}" for row in group]
    return "\n".join(lines)


def main() -> int:
    """Compare, then print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="the file of lines")
    parser.add_argument("--types", default="", help="model types, separated by commas; all if none")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tp", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    run(chosen.path, chosen.types, chosen.modes, chosen.tp)
    rows = known(chosen.path)
    print(summary(rows))
    return 1 if any(row["elements"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
