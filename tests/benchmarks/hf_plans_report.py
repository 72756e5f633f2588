"""docs/tables/hf-plans.md, from the lines that the comparison with Transformers' plans wrote."""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Key = tuple[str, str]

HEAD = """# Compared with the plans of Transformers

Transformers has a handwritten tensor-parallel plan for some types. For each type of
`tests/zoo.tsv` that has one, a tiny model was made, and Transformers applied its plan, on a group
that does not communicate; the collectives of one forward pass were counted. They are compared
with autotp's plans for the same model, for inference and for training.

*Replicated* is the share of the parameter bytes that is on every rank; *forward* gives the
collectives of a forward pass. Ours is **worse** if it replicates more (2 % slack), or as much
with more forward collectives. In a plan for training, a forward collective may save a more
expensive one in the backward pass, so the plan for inference is the one that is judged.

Generated from a run on commit {commits} by `tests/benchmarks/hf_plans.py`; do not edit.

At tp {sizes}: {compared} comparisons of {types} types. Ours is worse in {worse}, theirs cannot run
in {died}; {without} types have no plan, of {wanted} {unknown} were not run or failed.
"""
TABLE = """
## All types

| task | type | tp | replicated: theirs | ours | forward: theirs | ours | ours, training | |
|---|---|---|---|---|---|---|---|---|"""


def report(rows: Iterable[Row], wanted: list[Key]) -> str:
    """The page."""
    known = sorted(rows, key=lambda r: (r["task"], r["type"], r["tp"]))
    compared = [r for r in known if "theirs" in r]
    without = {(r["task"], r["type"]) for r in known if r["result"] == "no plan"}
    types = {(r["task"], r["type"]) for r in compared}
    head = HEAD.format(
        commits=", ".join(dict.fromkeys(f"`{r['commit']}`" for r in known)) or "none",
        sizes=" and ".join(str(tp) for tp in sorted({r["tp"] for r in known})) or "none",
        compared=len(compared),
        types=len(types),
        worse=sum(_worse(r) for r in compared),
        died=sum(bool(r["theirs"]["died"]) for r in compared),
        without=len(without),
        wanted=len(wanted),
        unknown=len(wanted) - len(without) - len(types),
    )
    return "\n".join([head, *_exceptions(compared), TABLE, *map(_line, compared)])


def _worse(row: Row) -> bool:
    return row["result"] in ("more whole", "more collectives")


def _exceptions(rows: list[Row]) -> list[str]:
    """Where ours is worse, with where its collectives are; where training costs one more."""
    lines = ["## Where ours is worse\n"]
    lines += [
        f"- {r['type']} ({r['task']}, tp {r['tp']}): {r['result']}: {_listed(r['ours'])}"
        for r in rows
        if _worse(r)
    ] or ["Nowhere."]
    lines += ["\n## Where only the plan for training has more forward collectives\n"]
    found = [r for r in rows if not _worse(r) and not r["theirs"]["died"] and _dearer(r)]
    return lines + ([f"- {r['type']} ({r['task']}, tp {r['tp']})" for r in found] or ["Nowhere."])


def _dearer(row: Row) -> bool:
    """Whether the plan for training, as much whole as theirs, has more forward collectives."""
    ours, theirs = row["ours"]["training"], row["theirs"]
    equal = abs(ours["whole"] - theirs["whole"]) <= 0.02
    return equal and sum(ours["forward"].values()) > sum(theirs["forward"].values())


def _listed(ours: Mapping[str, Row]) -> str:
    """What is whole, and the collectives, of the plan for inference."""
    places = ", ".join(f"{n} {place}" for place, n in ours["inference"]["places"].items())
    return "; ".join([*ours["inference"]["largest"][:3], places]).replace("*", "\\*")


def _line(row: Row) -> str:
    theirs, ours = row["theirs"], row["ours"]
    died = f"theirs dies: {theirs['died'][:80]}" if theirs["died"] else ""
    note = (row["result"] if _worse(row) else died).replace("|", "/").replace("<", "&lt;")
    return (
        f"| {row['task']} | {row['type']} | {row['tp']} | {theirs['whole']:.1%} "
        f"| {ours['inference']['whole']:.1%} | {_counts(theirs)} | {_counts(ours['inference'])} "
        f"| {_counts(ours['training'])} | {note} |"
    )


def _counts(plan: Row) -> str:
    """`4 all-reduce, 2 all-gather`."""
    words = [f"{n} {kind.replace('_', '-')}" for kind, n in plan["forward"].items()]
    return ", ".join(words) or "none"
