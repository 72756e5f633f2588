"""docs/tables/generating-kinds.md, from the lines that the sweep over generate() wrote."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

HEAD = """# What generates

For each type of `tests/zoo.tsv` whose inputs and outputs are tokens, a tiny model with random
weights generated 12 tokens after each of two prompts, one of them padded, greedily and with two
beams: first the original model, then the sharded one (tp 1 in one process, larger tp in as many
processes). **ok**: the same tokens, both ways, on all ranks, in float32. **rounding**: the same
tokens in float64; in float32 two continuations have scores that are equal up to rounding.
**none**: the original model does not generate; if it fails in one of the two ways, that way is
left out. *Took more than … s* is a limit of the run, on a busy machine, and says nothing about
the type.

Generated from a run on commit {commits} by `tests/benchmarks/generating.py`; do not edit.

| task | tp | types | ok | rounding | wrong | error | none | not run |
|---|---|---|---|---|---|---|---|---|"""
TASKS = ("causal-lm", "seq2seq")


def report(rows: Iterable[Row], wanted: list[tuple[str, str]]) -> str:
    """The page."""
    known = sorted(
        (r for r in rows if r["task"] in TASKS), key=lambda r: (r["task"], r["type"], r["tp"])
    )
    commits = ", ".join(dict.fromkeys(f"`{r['commit']}`" for r in known)) or "none"
    lines = [HEAD.format(commits=commits)]
    for task in TASKS:
        types = sum(of == task for of, _ in wanted)
        for tp in sorted({r["tp"] for r in known}):
            lines.append(_counted(task, tp, types, known))
    lines += ["\n## What does not generate\n", *_reasons(known, ("rounding", "wrong", "error"))]
    lines += [
        "\n## What the original model does not generate\n",
        *_reasons(known, ("none",)),
        *_ways(known),
    ]
    lines += ["\n## What generates\n"]
    sizes = sorted({r["tp"] for r in known})
    return "\n".join(lines + [_named(task, tp, known) for task in TASKS for tp in sizes])


def _counted(task: str, tp: int, types: int, rows: list[Row]) -> str:
    found = Counter(r["result"] for r in rows if (r["task"], r["tp"]) == (task, tp))
    results = [str(found[name]) for name in ("ok", "rounding", "wrong", "error", "none")]
    return f"| {task} | {tp} | {types} | {' | '.join(results)} | {types - found.total()} |"


def _reasons(rows: list[Row], results: tuple[str, ...]) -> list[str]:
    """A line for each type and tp that ended so; one for all tp of a type that is none."""
    found = {
        (r["task"], r["type"], 0 if r["result"] == "none" else r["tp"]): r
        for r in rows
        if r["result"] in results
    }
    return [
        f"- {r['type']} ({r['task']}{f', tp {tp}' if tp else ''}): {_short(r)}"
        for (_, _, tp), r in found.items()
    ] or ["Nothing."]


def _ways(rows: list[Row]) -> list[str]:
    """A line for each type of which the whole model generates, but not both ways."""
    found = {(r["task"], r["type"]): r.get("none") for r in rows if r["result"] != "none"}
    return [f"- {kind} ({task}): {why[:120]}" for (task, kind), why in found.items() if why]


def _short(row: Row) -> str:
    reason = " ".join(row["reason"].split())
    return f"{row['result']}: {reason[:200]}" if row["result"] != "none" else reason[:120]


def _named(task: str, tp: int, rows: list[Row]) -> str:
    names = [r["type"] for r in rows if (r["task"], r["tp"], r["result"]) == (task, tp, "ok")]
    return f"- {task}, tp {tp}: {', '.join(names) or 'none run'}"
