"""Format, lint and types: the commands of the pre-commit hooks, run as part of the tests."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYTHON = ".venv/bin/python"
"""The interpreter that the README's commands install into, and that the hooks call."""


def hooks() -> list[dict[str, Any]]:
    """The hooks of this repository, as pre-commit reads them."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (local,) = yaml.safe_load(text)["repos"]
    return local["hooks"]


def _marked(hook: dict[str, Any]) -> Any:
    """The hook, as a slow test where it checks types."""
    marks = [pytest.mark.slow] if "pyright" in hook["entry"] else []
    return pytest.param(hook, marks=marks, id=hook["id"])


@pytest.mark.parametrize("hook", [_marked(hook) for hook in hooks()])
def test_the_hooks_have_no_complaint(hook: dict[str, Any]) -> None:
    command = [part.replace(PYTHON, sys.executable) for part in shlex.split(hook["entry"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr


def test_the_hooks_check_everything_with_the_environment_of_the_readme() -> None:
    commands = {hook["id"]: hook["entry"] for hook in hooks()}

    assert {
        "format": f"{PYTHON} -m ruff format --check .",
        "lint": f"{PYTHON} -m ruff check .",
        "types": f"{PYTHON} -m pyright --pythonpath {PYTHON}",
    } == commands
    assert all("system" == hook["language"] for hook in hooks())
    assert not any(hook["pass_filenames"] for hook in hooks())
