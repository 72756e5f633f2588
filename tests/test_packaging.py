"""The project as a package: what a wheel holds, and that the documents and the files agree."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [
    "autotp",
    "rules",
    "examples",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "constraints.txt",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel of a clean copy of the sources, as pip would install it."""
    folder = tmp_path_factory.mktemp("packaging")
    clean = folder / "clean"
    for name in SOURCES:
        source, target = ROOT / name, clean / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    subprocess.run([*build, str(clean)], check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("autotp-*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    shutil.rmtree(clean)
    return folder / "site"


def _answer(site: Path, code: str) -> str:
    """What `code` prints where only the wheel's own files can be found."""
    # the wheel's folder first, so that an editable installation of the checkout does not answer
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def answers(installed: Path) -> dict[str, str]:
    """What one process says in which only the wheel's own files can be found, and no extra."""
    code = """
import json, sys
sys.modules['transformers'] = None
import autotp
from autotp.cost.machine import list_machines
from autotp.model_source import find_presets, list_presets
from autotp.oprules import rulebook
print(json.dumps({
    'plan': autotp.plan.__name__,
    'rules': f'{rulebook.find_rules_root()} {len(rulebook.load_rulebook().rows) > 40}',
    'machines': ' '.join(list_machines(rulebook.find_rules_root())),
    'presets': ' '.join([str(find_presets()), *list_presets()]),
}))
"""
    found: dict[str, str] = json.loads(_answer(installed, code))
    return found


@pytest.mark.slow
def test_an_installed_wheel_finds_its_rules(installed: Path, answers: dict[str, str]) -> None:
    assert f"{installed}/autotp/rules True" == answers["rules"]


@pytest.mark.slow
def test_an_installed_wheel_verifies_its_rules(installed: Path) -> None:
    code = "from autotp.cli.main import main; main(['rules', 'check', '--op', 'aten.mm.default'])"

    assert "1 rows: 1 right, 0 wrong, 0 untested" in _answer(installed, code)


@pytest.mark.slow
def test_an_installed_wheel_finds_its_machines(answers: dict[str, str]) -> None:
    assert "gloo h100" == answers["machines"]


@pytest.mark.slow
def test_an_installed_wheel_finds_its_presets(installed: Path, answers: dict[str, str]) -> None:
    presets = "gpt2 llama-3.1-405b llama-3.1-70b llama-3.1-8b"

    assert f"{installed}/autotp/presets {presets}" == answers["presets"]


@pytest.mark.slow
def test_an_installed_wheel_has_its_command(installed: Path) -> None:
    entry_points = next(installed.glob("autotp-*.dist-info")) / "entry_points.txt"

    assert "autotp = autotp.cli.main:main" in entry_points.read_text()


@pytest.mark.slow
def test_autotp_is_imported_without_transformers(answers: dict[str, str]) -> None:
    assert "plan" == answers["plan"]


@pytest.mark.slow
def test_a_wheel_holds_the_package_alone(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}

    assert {"autotp"} == tops
    assert (installed / "autotp" / "py.typed").is_file()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text().splitlines()

    assert 2 == len(commands)
    assert commands[1] == script[-1]
    assert commands[1].endswith("-m pytest")


def test_the_command_of_the_readme_runs_a_script_that_exists() -> None:
    command = re.search(
        r"python (examples/\S+\.py)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )

    assert command
    assert (ROOT / command[1]).is_file()


def test_the_changelog_and_the_citation_have_the_version_and_its_date() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert newest
    assert (PROJECT["version"], citation["date-released"]) == newest.groups()
    assert PROJECT["version"] == citation["version"]
    assert PROJECT["license"] == citation["license"]


def test_the_project_has_one_address() -> None:
    urls = PROJECT["urls"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    site = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8"))

    assert urls["Homepage"] == citation["repository-code"] == site["repo_url"]
    assert urls["Documentation"] == citation["url"] == site["site_url"]
    assert all(urls[name].startswith(f"{urls['Homepage']}/") for name in ("Changelog", "Issues"))


def test_constraints_satisfy_the_lower_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {r.name: r.specifier for r in map(Requirement, lines[1:])}
    extras = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    wanted = [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]

    for requirement in wanted:
        if requirement.name == "autotp":
            continue
        version = next(iter(pinned[requirement.name])).version

        assert requirement.specifier.contains(version)


def test_the_top_level_is_as_agreed() -> None:
    agreed = {"pyproject.toml", "README.md", "autotp", "rules", "examples", "tests", "docs"}
    agreed |= {"LICENSE", "constraints.txt", "CITATION.cff"}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    tops = {line.split("/")[0] for line in listed if line}

    assert tops <= agreed | {top for top in tops if top.startswith(".")}
