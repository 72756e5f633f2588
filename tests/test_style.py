"""Format, lint and types, as part of the tests: what CI runs is the README's test command alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "tool",
    [
        ("ruff", "format", "--check", "."),
        ("ruff", "check", "."),
        pytest.param(("pyright", "--pythonpath", sys.executable), marks=pytest.mark.slow),
    ],
    ids=["format", "lint", "types"],
)
def test_the_tools_have_no_complaint(tool: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode, done.stdout + done.stderr
