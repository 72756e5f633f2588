"""Imports run downward only, and the other laws of the house; a planted violation is seen."""

from pathlib import Path

import pytest

from tests.layering import violations

ROOT = Path(__file__).parents[1]


def test_the_house_keeps_its_laws() -> None:
    assert [] == violations(ROOT)


@pytest.mark.parametrize(
    ("where", "code", "seen"),
    [
        ("autotp/cost/collectives.py", "import torch", "core imports torch"),
        (
            "autotp/cost/collectives.py",
            "from autotp import rulebook",
            "core imports autotp.oprules.rulebook",
        ),
        ("autotp/errors.py", "import autotp.records.plan", "errors imports autotp.records.plan"),
        ("autotp/run/new.py", "from autotp.passes import solve", "run imports autotp.solver.solve"),
        (
            "autotp/run/new.py",
            "from autotp.report.units import x",
            "run imports autotp.report.units",
        ),
        ("autotp/show/new.py", "import autotp.solver.solve", "show imports autotp.solver.solve"),
        ("autotp/solver/solve.py", "import autotp.api", "passes imports autotp.api"),
        (
            "autotp/solver/solve.py",
            "from autotp.planner.propagate import x",
            "stage solve imports stage analyse",
        ),
        (
            "autotp/solver/solve.py",
            "from autotp.passes import capture_inputs",
            "stage solve imports stage capture",
        ),
        (
            "autotp/cost/collectives.py",
            "def f() -> None:\n    import json",
            "f imports json inside a function",
        ),
        (
            "autotp/cost/collectives.py",
            "import importlib\ndef f() -> None:\n    importlib.import_module('torch')",
            "f imports torch when called",
        ),
        ("autotp/core/utils.py", "X = 1", "a file called utils"),
        ("autotp/new.py", "X = 1", "new has no place in the layers"),
        ("autotp/cost/collectives.py", "class PlanManager: ...", "a class called PlanManager"),
        ("autotp/cost/collectives.py", "KIND = 'llama'", "names a model family: llama"),
        ("autotp/cost/collectives.py", "def is_gpt2() -> None: ...", "names a model family: gpt2"),
        ("autotp/cost/collectives.py", "print('x')", "calls print"),
        ("autotp/cost/collectives.py", "X = 1\n" * 400, "more than 400"),
        ("rules/machines/h100.toml", "kind = 'Qwen2Model'", "names a model family: Qwen"),
    ],
)
def test_a_planted_violation_is_seen(tmp_path: Path, where: str, code: str, seen: str) -> None:
    original, path = ROOT / where, tmp_path / where
    before = original.read_text() if original.exists() else ""
    path.parent.mkdir(parents=True)
    path.write_text(f"{before}\n{code}\n")

    assert any(seen in line and line.startswith(where) for line in violations(tmp_path))


def test_prose_may_name_a_family(tmp_path: Path) -> None:
    (tmp_path / "autotp").mkdir()
    (tmp_path / "autotp" / "errors.py").write_text('"""As in Llama."""\n')

    assert [] == violations(tmp_path)
