"""Imports run downward only, and the other laws of the house; a planted violation is seen."""

from pathlib import Path

import pytest

from tests.layering import LARGEST_FOLDER, LINES, violations

ROOT = Path(__file__).parents[1]


def test_the_house_keeps_its_laws() -> None:
    assert [] == violations(ROOT)


@pytest.mark.parametrize(
    ("where", "code", "seen"),
    [
        ("autotp/algebra/split.py", "import torch", "algebra imports torch"),
        (
            "autotp/algebra/split.py",
            "from autotp.oprules import rulebook",
            "algebra imports autotp.oprules, which is not below it",
        ),
        ("autotp/errors.py", "import autotp.records.plan", "errors imports autotp.records.plan"),
        (
            "autotp/runtime/new.py",
            "from autotp.oprules.rule import Row",
            "runtime imports autotp.oprules.rule, which is not below it",
        ),
        (
            "autotp/runtime/new.py",
            "from autotp.planner import match",
            "runtime imports autotp.planner",
        ),
        ("autotp/report/new.py", "import autotp.planner.match", "report imports autotp.planner"),
        ("autotp/solver/solve.py", "from autotp import api", "solver imports autotp.api"),
        (
            "autotp/algebra/split.py",
            "def f() -> None:\n    import json",
            "f imports json inside a function",
        ),
        (
            "autotp/algebra/split.py",
            "import importlib\ndef f() -> None:\n    importlib.import_module('torch')",
            "f imports torch when called",
        ),
        ("autotp/algebra/utils.py", "X = 1", "a file called utils"),
        ("autotp/new.py", "X = 1", "new is not among the rooms"),
        ("autotp/algebra/split.py", "class PlanManager: ...", "a class called PlanManager"),
        ("autotp/algebra/split.py", "KIND = 'llama'", "names a model family: llama"),
        ("autotp/algebra/split.py", "def is_gpt2() -> None: ...", "names a model family: gpt2"),
        ("autotp/algebra/split.py", "print('x')", "calls print"),
        ("rules/machines/h100.toml", "kind = 'Qwen2Model'", "names a model family: Qwen"),
        ("autotp/algebra/__init__.py", "", "a package without a sentence"),
    ],
)
def test_a_planted_violation_is_seen(tmp_path: Path, where: str, code: str, seen: str) -> None:
    original, path = ROOT / where, tmp_path / where
    before = original.read_text() if code and original.exists() else ""
    path.parent.mkdir(parents=True)
    path.write_text(f"{before}\n{code}\n")

    assert any(seen in line and line.startswith(where) for line in violations(tmp_path))


def test_prose_may_name_a_family(tmp_path: Path) -> None:
    (tmp_path / "autotp").mkdir()
    (tmp_path / "autotp" / "errors.py").write_text('"""As in Llama."""\n')

    assert [] == violations(tmp_path)


def test_a_heap_of_files_and_a_package_that_grows_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "autotp" / "algebra"
    folder.mkdir(parents=True)
    for number in range(LARGEST_FOLDER + 1):
        (folder / f"m{number}.py").write_text('"""A module."""\n' * (LINES // LARGEST_FOLDER))

    assert [
        f"autotp/algebra: {LARGEST_FOLDER + 1} files, more than {LARGEST_FOLDER}",
        f"autotp: {(LARGEST_FOLDER + 1) * (LINES // LARGEST_FOLDER)} lines, more than {LINES}",
    ] == violations(tmp_path)
