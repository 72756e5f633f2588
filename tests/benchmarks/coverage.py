"""The coverage: which architectures of Transformers are cut right over which tp.

    python -m tests.benchmarks.coverage run --out coverage.jsonl --tp 2,4
    python -m tests.benchmarks.coverage report --out coverage.jsonl > docs/tables/coverage.md

`run` makes a tiny model of each type of tests/zoo.tsv, captures it once, and for each tp plans,
rewrites and verifies it: outputs and all gradients, in float32. Each type has a process of its own,
so that a crash or a type that takes too long loses that type only. Each pair of type and tp is one
line of JSON, and is not run again (`--retry`: failures are).
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from autotp import compiler as pipeline
from autotp.compiler import ModelCompiler
from autotp.oprules import rulebook
from autotp.options import read_request
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.records.trace import Trace
from autotp.runtime.group.process_group import Group
from autotp.verification import compare_ranks
from tests import zoo
from tests.benchmarks.coverage_report import report

STAGES = (  # as autotp.compiler names them
    "capture", "propagate", "match", "formulate", "solve", "rewrite", "check_types", "summarise",
    "outline",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
SHORT = 1500  # characters of a reason
Rows: TypeAlias = Callable[..., Iterator[dict[str, Any]]]


def main(
    arguments: Sequence[str] | None = None,
    rows: Rows | None = None,
    page: Callable[..., str] = report,
    description: str | None = __doc__,
) -> int:
    """The exit code. `rows` makes the lines of one type, `page` the document of them all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--tasks", default=",".join(zoo.TASKS))
    parser.add_argument("--types", default="", help="default: all")
    parser.add_argument("--tp", default="2,4")
    parser.add_argument("--limit", type=int, default=180, help="seconds a type")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    chosen = parser.parse_args(arguments)
    sizes = [int(tp) for tp in chosen.tp.split(",")]
    if chosen.action == "report":
        print(page(_known(chosen.out).values(), zoo.exportable()))
        return 0
    types = set(chosen.types.split(",")) - {""}
    for task, kind in zoo.exportable():
        if task in chosen.tasks.split(",") and (kind in types or not types):
            made = rows or _rows
            _one(chosen.out, task, kind, sizes, made, chosen.limit, retry=chosen.retry)
    return 0


def _known(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The last line of each task, type and tp."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["task"], row["type"], row["tp"]): row for row in rows}


def _one(
    path: Path, task: str, kind: str, sizes: list[int], rows: Rows, limit: int, *, retry: bool
) -> None:
    """Run one type, in a process of its own, at those sizes that are not in the file."""
    known = _known(path)
    before = {tp: known.get((task, kind, tp), {}).get("result") for tp in sizes}
    todo = [tp for tp, result in before.items() if result is None or (retry and result != "ok")]
    if not todo:
        return
    started = time.time()
    # forked, not spawned: the imports alone would take longer than most types
    process = multiprocessing.get_context("fork").Process(
        target=_measured, args=(path, task, kind, todo, rows)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: none runs
        process.start()
    process.join(limit)
    reason = f"took more than {limit} s"
    if process.is_alive():
        process.kill()
        process.join()
    elif process.exitcode:
        reason = f"the process ended with {process.exitcode}"
    left = _known(path)
    for tp in todo:
        if left.get((task, kind, tp)) == known.get((task, kind, tp)):
            _add(path, _failed(task, kind, tp, "process", reason))
    found = [_known(path)[task, kind, tp] for tp in todo]
    words = ", ".join(f"tp {row['tp']} {row['result']} {row['reason'][:150]}" for row in found)
    print(f"{task} {kind}: {words} ({time.time() - started:.0f} s)", flush=True)


def _measured(path: Path, task: str, kind: str, sizes: list[int], rows: Rows) -> None:
    """Append a line for each size; what fails before a plan exists fails for all of them."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    times = _Times()
    done: list[int] = []
    try:
        for row in rows(task, kind, sizes, times):
            _add(path, row)
            done.append(row["tp"])
    except Exception as error:  # noqa: BLE001 any failure is a figure
        reason = _reason(error)
        for tp in sizes:
            if tp not in done:
                _add(path, _failed(task, kind, tp, times.stage, reason))


class _Times:
    """The seconds of each stage of the pipeline, and the stage that ran last."""

    def __init__(self) -> None:
        self.stage, self.seconds = "build", Counter[str]()
        for name in STAGES:
            setattr(pipeline, name, self.timed(name, getattr(pipeline, name)))

    def timed(self, name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.stage, start = name, time.perf_counter()
            result = stage(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            return result

        return run

    def taken(self) -> dict[str, float]:
        """The seconds since the last call."""
        found = {name: round(seconds, 2) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return found


def _rows(task: str, kind: str, sizes: list[int], times: _Times) -> Iterator[dict[str, Any]]:
    model, inputs = times.timed("build", zoo.build)(kind, task)
    work = ModelCompiler(model, read_request(training=True), inputs)
    for tp in sizes:
        try:
            yield _proven(work, task, kind, tp, times)
        except Exception as error:  # noqa: BLE001 any failure is a figure
            yield _failed(task, kind, tp, times.stage, _reason(error)) | {"seconds": times.taken()}


def _proven(work: ModelCompiler, task: str, kind: str, tp: int, times: _Times) -> dict[str, Any]:
    made = work.compile(tp, "tp")
    device = torch.device("cpu")
    ranks = [work.build(made, Group("tp", tp, rank, device)) for rank in range(tp)]
    evidence = times.timed("prove", compare_ranks)(
        work.model,
        ranks,
        work.inputs,
        made.plan,
        Trace(made.rewritten.values),
        program=work.program,
        gradients=True,
        seed=0,
    )
    return {
        **_row(task, kind, tp, "ok" if evidence.ok else "wrong", _doubt(evidence)),
        "output_error": evidence.max_rel_error,
        "gradient_error": max(evidence.gradients.values(), default=0.0),
        "whole": round(made.plan.replicated_fraction, 4),
        "unused": round(made.plan.unused_fraction, 4),
        "layers": _layers(made.plan),
        "collectives": dict(Counter(f"{c.phase} {c.kind}" for c in made.plan.collectives)),
        "unruled": dict(Counter(entry.split(" at ")[0] for entry in made.plan.unruled)),
        "discovered": dict(Counter(record.op for record in made.plan.discovered)),
        "largest": _largest(made.plan),
        "fixed": work.program.reason,
        "gap": made.plan.gap,
        "stage": "",
        "seconds": times.taken(),
    }


def _largest(plan: Plan) -> list[str]:
    """The parameters that every rank holds whole and that are over 1 % of the bytes, with why."""
    total = sum(record.bytes for record in plan.parameters.values())
    whole = [record for record in plan.parameters.values() if record.dim is None]
    large = sorted((r for r in whole if r.bytes > total / 100), key=lambda r: -r.bytes)[:6]
    return [f"{r.name} ({r.bytes / total:.1%}): {r.reason}" for r in large]


def _doubt(evidence: Evidence) -> str:
    """Why the evidence is bad; empty if it is good."""
    if evidence.ok:
        return ""
    return " | ".join([evidence.first_divergence or "collectives differ", *evidence.notes])[:SHORT]


def _layers(plan: Plan) -> dict[str, int]:
    """How many layers have how many collectives, `forward/backward`: `{"2/2": 12}`."""
    phases: dict[str, Counter[str]] = {}
    for name in plan.parameters:
        if layer := _layer(name):
            phases.setdefault(layer, Counter())
    for collective in plan.collectives:
        if (layer := _layer(collective.where + ".")) in phases:
            phases[layer][collective.phase] += 1
    return dict(Counter(f"{p['forward']}/{p['backward']}" for p in phases.values()))


def _layer(path: str) -> str:
    """The path up to its first number: `model.layers.3`; empty where there is none."""
    words = path.split(".")[:-1]
    at = next((i for i, word in enumerate(words) if word.isdigit()), None)
    return "" if at is None else ".".join(words[: at + 1])


def _row(task: str, kind: str, tp: int, result: str, reason: str) -> dict[str, Any]:
    return {
        "task": task, "type": kind, "tp": tp, "result": result, "reason": reason, "commit": COMMIT,
    }  # fmt: skip


def _failed(task: str, kind: str, tp: int, stage: str, reason: str) -> dict[str, Any]:
    return _row(task, kind, tp, "error", reason) | {"stage": stage}


def _reason(error: Exception) -> str:
    """The error, and where in the project it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(str(ROOT / "autotp"))] or list(frames)
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    return f"{type(error).__name__} ({where}): {error}"[:SHORT]


def _add(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _commit() -> str:
    """The commit that runs, with `+` if files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "autotp", "rules")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


COMMIT = os.environ.get("COVERAGE_COMMIT") or _commit()
rulebook.load_rulebook()  # once, before any process is forked: all types meet the same rules

if __name__ == "__main__":
    sys.exit(main())
