"""The public CI workflow agrees with the project: versions, commands, and when they run."""

import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# a loader without types: YAML 1.1 reads the key `on` as a boolean
WORKFLOW = yaml.load(
    (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"), yaml.BaseLoader
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
TESTS = ".venv/bin/python -m pytest"


def steps(job: str) -> dict[str, tuple[str, str]]:
    """The command and the condition of each step that runs a command, by its name."""
    found = [step for step in JOBS[job]["steps"] if "run" in step]
    return {step["name"]: (step["run"], step.get("if", "")) for step in found}


def test_every_supported_python_is_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    matrix = JOBS["tests"]["strategy"]["matrix"]

    assert [f"3.{minor}" for minor in named] == matrix["python"]


def test_the_oldest_versions_are_those_that_the_project_names() -> None:
    oldest, newest = JOBS["tests"]["strategy"]["matrix"]["include"]
    extras = PROJECT["optional-dependencies"]
    bounds = {r.name: r for r in map(Requirement, PROJECT["dependencies"] + extras["transformers"])}

    for name in ("torch", "transformers"):
        lowest = str(bounds[name].specifier).removeprefix(">=")

        assert f"{name}=={lowest}.*" == oldest[name]
        assert name == newest[name]


def test_fast_tests_run_on_a_change_and_all_tests_at_night() -> None:
    changed = "github.event_name == 'push' || github.event_name == 'pull_request'"
    nightly = "github.event_name == 'schedule' || github.event_name == 'workflow_dispatch'"
    commands = steps("tests")

    assert {"push", "pull_request", "schedule", "workflow_dispatch"} == set(WORKFLOW["on"])
    assert (f'{TESTS} -m "not slow" --durations=30', changed) == commands["Fast tests"]
    assert (f"{TESTS} --durations=30", nightly) == commands["All tests"]


def test_the_hooks_run_on_every_event() -> None:
    commands = steps("hooks")

    assert "if" not in JOBS["hooks"]
    assert commands["Hooks"][0].startswith(".venv/bin/pre-commit run --all-files")


def test_the_commands_of_the_readme_run_at_night() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = steps("pinned")

    assert commands["Real models"][0] in readme
    assert ".ci/run" == commands["All tests"][0]
