"""docs/tables/coverage.md, from the lines that the coverage run wrote."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Key = tuple[str, str]

RESULTS = ("ok", "wrong", "error", "not run")
HEAD = """# Coverage

Which architectures of Transformers autotp shards, and whether the result is correct. Each type is
a tiny model with random weights: two layers, 8 heads (4 key-value heads if they are grouped),
hidden 64, ffn 128. It is captured once. For each tp it is planned for training and rewritten, and
all ranks are compared with the original model in float32: outputs and every parameter's gradient
([how](../explanation/verification.md)). The denominator is the {count} pairs of task and type
that can be built and exported at all (`tests/zoo.tsv`).

Generated from a run on commit {commits} by `tests/benchmarks/coverage.py`; do not edit.
"""
TABLE = """
**replicated** is the replicated share of the parameter bytes, in brackets what these inputs do
not use (a vision tower), which does not count above; **error** is the largest relative difference
of an output, and of a gradient; **collectives** is their number per layer, forward/backward (`2/2
×2`: two layers with two each).

| task | type | tp | result | replicated | error | collectives |
|---|---|---|---|---|---|---|"""


def report(rows: Iterable[Row], wanted: list[Key]) -> str:
    """The page."""
    known = sorted(rows, key=lambda row: (*_order(row, wanted), row["tp"]))
    commits = ", ".join(dict.fromkeys(f"`{row['commit']}`" for row in known)) or "none"
    parts = [HEAD.format(count=len(wanted), commits=commits), *_summary(known, wanted)]
    parts += [*_failures(known), *_whole(known)]
    parts += [*_ops(known, "unruled", "Ops without a rule", "They run on replicated operands.")]
    parts += [*_ops(known, "discovered", "Rules found by running ops", "They have no row.")]
    parts += ["\n## All types", TABLE]
    return "\n".join([*parts, *map(_line, known)])


def _order(row: Row, wanted: list[Key]) -> tuple[int, str]:
    key = (row["task"], row["type"])
    return (wanted.index(key) if key in wanted else len(wanted), row["type"])


def _summary(rows: list[Row], wanted: list[Key]) -> list[str]:
    """How many types ended how, by task and tp."""
    lines = ["| task | tp | types | " + " | ".join(RESULTS) + " | replicated > 10 % |"]
    lines += ["|---|---|---|" + "---|" * (len(RESULTS) + 1)]
    tasks = Counter(task for task, _ in wanted)
    for task, types in [*tasks.items(), ("all", len(wanted))]:
        for tp in sorted({row["tp"] for row in rows}):
            mine = [r for r in rows if r["tp"] == tp and task in (r["task"], "all")]
            counts = Counter(row["result"] for row in mine)
            counts["not run"] = types - len(mine)
            large = sum(_needlessly(row) > 0.1 for row in mine)
            figures = " | ".join(str(counts[result]) for result in RESULTS)
            lines.append(f"| {task} | {tp} | {types} | {figures} | {large} |")
    return lines


def _needlessly(row: Row) -> float:
    """The share of the bytes in use that every rank holds whole."""
    unused = row.get("unused", 0)
    return (row.get("whole", 0) - unused) / max(1 - unused, 1e-9)


def _failures(rows: list[Row]) -> list[str]:
    """What is wrong or fails, with the reason; types that fail alike together."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["result"] != "ok":
            stage = f", {row['stage']}" if row.get("stage") else ""
            text = f"**{row['result']}{stage}**: {_cell(row['reason'])}"
            found[text].append(f"{row['type']} ({row['task']}, tp {row['tp']})")
    lines = [f"- {', '.join(who)}: {text}" for text, who in found.items()]
    return ["\n## What fails\n", *(lines or ["Nothing."])]


def _whole(rows: list[Row]) -> list[str]:
    """The types of which more than a tenth stays whole, with the largest such parameters."""
    lines = ["\n## Where more than 10 % is replicated\n"]
    for row in rows:
        if row["tp"] == 4 and _needlessly(row) > 0.1:
            used = [f"{_cell(x)[:200]} …" for x in row.get("largest", ()) if "unused:" not in x]
            lines += [f"- **{row['type']}** ({row['task']}, {_needlessly(row):.0%})"]
            lines += [f"    - {text}" for text in used[:3]]
    return lines


def _ops(rows: list[Row], key: str, title: str, said: str) -> list[str]:
    """The ops that rows list under `key`, and the types that have them."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for op in row.get(key, ()):
            found[op].add(row["type"])
    lines = [f"- `{op}`: {', '.join(sorted(found[op]))}" for op in sorted(found)]
    return [f"\n## {title}\n", f"{said}\n", *(lines or ["None."])]


def _line(row: Row) -> str:
    head = f"| {row['task']} | {row['type']} | {row['tp']} | {row['result']} |"
    if "whole" not in row:
        return f"{head} | | |"
    layers = ", ".join(f"{kind} ×{count}" for kind, count in row["layers"].items())
    errors = f"{row['output_error']:.0e}, {row['gradient_error']:.0e}"
    unused = f" ({row['unused']:.1%})" if row.get("unused") else ""
    return f"{head} {row['whole']:.1%}{unused} | {errors} | {layers} |"


def _cell(text: str) -> str:
    """`text` in one line that Markdown leaves alone, files as they are called in their packages."""
    text = re.sub(r"[^\s(]*/site-packages/", "", text)
    return " ".join(text.split()).replace("|", "/").replace("<", "&lt;").replace("*", "\\*")
