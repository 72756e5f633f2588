"""What users read is in the field's words: messages, help, docstrings, reports and pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotp.cli.arguments import parse_arguments
from autotp.records.evidence import Evidence
from autotp.report.evidence import render_evidence
from autotp.report.plan import format_plan
from autotp.report.terminal import print_to_terminal
from tests.plans import decoder_plan

ROOT = Path(__file__).parents[1]
PAGES_LEFT = ("coverage.md",)
"""Generated pages that quote reasons of rooms that are left; it ends up empty."""

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in PAGES_LEFT
]
MODULES = sorted((ROOT / "autotp").rglob("*.py"))
COMMANDS = ["plan", "dry-run", "verify", "rules", "shard", "merge", "generate"]

RETIRED = {
    "tokens": r"(?:new|next|last|drawn?|more|numbers? of|of|its|these|the) words?\b(?! of)",
    "replicated, unsharded, unshardable": (
        r"\bwhole (?:model|weights?|tensors?|parameters?|state|ranks?|table|cache|checkpoint)\b"
        r"|\b(?:bytes|holds?(?: it)?|needs? it|stays?|acts?) whole\b"
    ),
    "split, shard": r"\bcut (?:along|in|into|by|so)\b|\b(?:is|are|be|been) cut\b",
    "shard": r"\brank's parts?\b|\bparts? of (?:rank|each rank|a rank)\b",
    "verify": (
        r"\bproofs? (?:by|compares?|runs?|asks?)\b"
        r"|\bprov(?:e|es|ing) (?:that )?(?:the model|equal|it)\b"
    ),
    "embedding": r"\b(?:looked-up|word|position) tables?\b|\btable of (?:words|positions)\b",
    "is laid out, is placed": r"\b(?:lies|lie|lying)\b",
    "compared with, next to, besides": r"\bbeside\b",
    "cost estimated at": r"\bpriced for\b",
    "tolerance": r"\bheld to\b",
    "requested, reported, sampled": r"\b(?:asked|told)\b|\bdrawn (?:from|at|with)\b",
    "per rank": r"\b(?:one|once|entry|file|bytes|row) a rank\b|\ba file a\b",
    "is not a": r"(?<!there )\bis no (?!(?:longer|more|less|such|better|other)\b)\w+",
    "none of": r"\b0 of (?:its|the)\b",
    "gather, concatenate, merge": r"\b(?:brings?|bringing|brought) \w* ?together\b",
}
"""The field's term to a pattern of what it replaces; other uses of the same letters pass."""


def find_retired(text: str) -> list[str]:
    """The retired phrases of a text, each with the term that stands for it."""
    flat = " ".join(text.split())
    return [
        f"{match[0]!r} ({term}): …{flat[max(0, match.start() - 40) : match.end() + 40]}…"
        for term, pattern in RETIRED.items()
        for match in re.finditer(pattern, flat, re.IGNORECASE)
    ]


def find_prose(page: str) -> str:
    """A page without its code: fences and code in backticks."""
    return re.sub(r"`[^`]*`", "`…`", re.sub(r"^ *```.*?^ *```$", "", page, flags=re.M | re.S))


def list_strings(tree: ast.AST) -> Iterator[str]:
    """The strings with a space inside, pieces of f-strings put together; no docstrings."""
    skipped = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
            yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def list_docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module and of what is public in it, without code in backticks."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and not getattr(node, "name", "").startswith("_"):
            yield find_prose(ast.get_docstring(node) or "")


def read_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_and_docstrings_use_the_fields_words(path: Path) -> None:
    tree = read_module(path)

    assert [] == [f for text in list_strings(tree) for f in find_retired(text)]
    assert [] == [f for text in list_docstrings(tree) for f in find_retired(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_fields_words(page: Path) -> None:
    assert [] == find_retired(find_prose(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("training", [False, True])
def test_the_printed_plan_uses_the_fields_words(training: bool) -> None:
    plan = decoder_plan(training=training)

    assert [] == find_retired(format_plan(plan, 200).partition("\nReplicated parameters")[0])


@pytest.mark.parametrize("ok", [True, False])
def test_the_report_of_verify_uses_the_fields_words(
    ok: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"forward all_reduce": 2}
    evidence = Evidence(
        ok, 2, 0.1, 0.1, 1e-5, "rounding", {"w": 0.1}, counts, counts, None, 0.1, "f"
    )
    print_to_terminal(render_evidence(evidence))
    printed = capsys.readouterr().out

    assert "unsharded model" in printed
    assert [] == find_retired(printed)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_uses_the_fields_words(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_arguments([*command, "--help"])
    printed = capsys.readouterr().out

    assert "usage: autotp" in printed
    assert [] == find_retired(printed)


def test_no_command_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(["--help"])
    listed = re.findall(r"^ {4}([\w-]+)", capsys.readouterr().out, re.M)

    assert COMMANDS == [name for name in listed if name in COMMANDS]
    assert set(listed) <= set(COMMANDS), listed


# ── twins: a retired word is seen, and ordinary English is not ───────────────────────────────────


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("draw at most 5 new words", "tokens"),
        (
            "every rank holds 12 % of the parameter bytes whole",
            "replicated, unsharded, unshardable",
        ),
        ("load the whole model", "replicated, unsharded, unshardable"),
        ("weights that are cut along dim 0", "split, shard"),
        ("copy this rank's part", "shard"),
        ("a proof by numbers", "verify"),
        ("verify proves the model equal", "verify"),
        ("rows of a looked-up table", "embedding"),
        ("how a dim lies on ranks", "is laid out, is placed"),
        ("each figure beside its tolerance", "compared with, next to, besides"),
        ("priced for batch 1", "cost estimated at"),
        ("the tolerance it is held to", "tolerance"),
        ("what is asked in vain", "requested, reported, sampled"),
        ("one entry a rank", "per rank"),
        ("out is no directory", "is not a"),
        ("0 of its layers", "none of"),
        ("bring them together", "gather, concatenate, merge"),
    ],
)
def test_a_retired_word_is_seen(text: str, term: str) -> None:
    found = find_retired(f"Model:\n{text}.")

    assert any(f"({term})" in each for each in found), found


@pytest.mark.parametrize(
    "text",
    [
        "pass it by keyword; the keywords of the call",
        "proven optimal by the solver; the proof is in the next section",
        "there is no graph for these sizes",
        "a shortcut that cuts no corners",
        "the plan underlies the graph",
        "there is no longer a group",
        "none of its layers",
        "one file per rank",
        "on the whole page",
        "besides the tensor",
    ],
)
def test_ordinary_english_is_not(text: str) -> None:
    assert [] == find_retired(text)


def test_a_planted_message_docstring_and_page_are_seen() -> None:
    tree = ast.parse(
        'def f():\n    """Load the whole model."""\n    raise E(f"{x}: {y} is "\n "no directory")\n'
    )

    assert 1 == sum(len(find_retired(text)) for text in list_strings(tree))
    assert 1 == sum(len(find_retired(text)) for text in list_docstrings(tree))
    assert 1 == len(find_retired(find_prose("the whole model\n\n```text\nthe whole model\n```\n")))
