"""The documentation is correct: its Python and commands run, and print what it shows.

A fence is one of

    python    run, in one namespace per page     text    what the last Python printed
    sh        command lines, run                 toml    data to read; so is a fence without a kind
    console   `$ command` lines, each run, and what it prints
    python title="run.py"    saved under that name, for a command to run

and `<!-- not run: reason -->` before a fence says why it is not run. In output, `…` stands for
any characters of a line, and for any lines where it is alone in a line. `./my-model` is a small
checkpoint with random weights.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autotp.cli import main as cli
from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.cost import conversions as price
from autotp.oprules import rulebook
from autotp.options import read_request
from autotp.planner.formulate import interpret_solution
from autotp.solver.solve import solve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
KINDS = {"", "toml", "python", "text", "sh", "console"}
SET_UP = "python3 -m venv .venv && "
"""How the README's two commands begin; one runs an example, the other these very tests."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
"""The configuration of the checkpoint `./my-model`."""
PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
"""The programs that a page may run besides autotp, as arguments of the Python interpreter."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fence: its kind, the line before its text, and why it is not run (None: it is).

    - `title`: the name of the file that it is saved as, empty if it is not saved.
    """

    kind: str
    title: str
    line: int
    text: str
    excuse: str | None


def blocks(page: str) -> Iterator[Block]:
    lines, excuse, opened = page.splitlines(), None, None
    for number, line in enumerate(lines, 1):
        if opened is not None:
            if line == "```":
                text = "".join(f"{shown}\n" for shown in lines[opened : number - 1])
                kind, _, title = lines[opened - 1][3:].partition(' title="')
                yield Block(kind, title.removesuffix('"'), opened, text, excuse)
                opened = excuse = None
        elif line.startswith("```"):
            opened = number
        elif found := re.fullmatch(r"<!-- not run: (.+) -->", line):
            excuse = found[1]
        elif line:
            excuse = None
    assert opened is None, f"the fence of line {opened} is not closed"


def shows(expected: str, printed: str) -> bool:
    """Whether `expected`, with `…` for what varies, shows what was printed."""
    pattern = ""
    for line in _plain(expected).splitlines():
        parts = map(re.escape, line.split("…"))
        pattern += r"(?:.*\n)*?" if line.strip() == "…" else ".*?".join(parts) + r"\n"
    return re.fullmatch(pattern, _plain(printed)) is not None


def _plain(printed: str) -> str:
    """What was printed, without blanks at the ends of lines, or lines at either end."""
    return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"


class Reader:
    """Someone who types in all that a page says, in order."""

    def __init__(self, where: str, capture: pytest.CaptureFixture[str]) -> None:
        self.where, self.capture = where, capture
        self.namespace: dict[str, Any] = {"__name__": "docs"}
        self.printed = ""

    def read(self, page: str) -> None:
        for block in blocks(page):
            assert block.kind in KINDS, f"{self.where}, line {block.line}: fence {block.kind!r}"
            if block.excuse is None:
                self._follow(block)

    def _follow(self, block: Block) -> None:
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            self.printed = self._run(block)
        elif block.kind == "text":
            self._compare(block, block.text, self.printed)
        elif block.kind == "sh":
            for command in block.text.splitlines():
                self._command(command.partition("  #")[0])
        elif block.kind == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M):
                self._compare(block, expected, self._command(command))

    def _run(self, block: Block) -> str:
        code = compile("\n" * block.line + block.text, str(ROOT / self.where), "exec")
        self.capture.readouterr()
        exec(code, self.namespace)
        return self.capture.readouterr().out

    def _command(self, command: str) -> str:
        """What a command prints; it must end well."""
        if command.startswith(SET_UP):
            return ""
        program, *arguments = shlex.split(command)
        if program == "autotp":
            self.capture.readouterr()
            code = cli.main(arguments)
            out, err = self.capture.readouterr()
        else:
            assert program in PROGRAMS, f"{self.where}: who runs {command!r}?"
            arguments = [*PROGRAMS[program], *arguments]
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, text=True, check=False
            )
            code, out, err = done.returncode, done.stdout, done.stderr

        assert 0 == code, f"{self.where}: {command}\n{out}\n{err}"
        return out

    def _compare(self, block: Block, expected: str, printed: str) -> None:
        if not shows(expected, printed):
            where = f"{self.where}, line {block.line}"
            pytest.fail(f"{where} shows\n{expected}\nbut printed is\n{_plain(printed)}")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a checkout, whose rules are its own: a page may add to them."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "my-model")
    shutil.copytree(ROOT / "rules", tmp_path / "rules")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for `python -m`: a page may import its own files
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "examples"))))
    monkeypatch.setattr(rulebook, "find_rules_root", lambda: tmp_path / "rules")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_page_does_what_it_says(
    name: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Reader(name, capsys).read((ROOT / name).read_text(encoding="utf-8"))


# ── links ────────────────────────────────────────────────────────────────────────────────────────


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that are not there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [t for t in targets if not t.startswith("https://") and not _leads(page, t)]


def _leads(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    if not path.exists():
        return False
    return not anchor or anchor in map(_slug, _headings(path))


def _headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)


def _slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    assert [] == broken_links(page)


def linked_pages(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set[Path](), {PAGES[0]}
    while todo:
        reached |= todo
        todo = set[Path]().union(*map(linked_pages, todo)) - reached

    assert [] == [str(page.relative_to(ROOT)) for page in PAGES if page not in reached]


def test_the_architecture_is_the_second_link_of_the_readme() -> None:
    links = re.findall(r"\]\(([^)\s#]+\.md)", PAGES[0].read_text(encoding="utf-8"))

    assert "docs/architecture.md" == links[1]


# ── figures that are stated in prose ─────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def work() -> ModelCompiler:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    return ModelCompiler(model, read_request(training=True))


def planned(work: ModelCompiler) -> tuple[CompiledVariant, list[str]]:
    """The optimum at tp 2, and the parameters whose gradient is partial in it."""
    posed = work.formulate(2)
    solution = solve(posed.problem)
    placements = interpret_solution(posed, solution).parameters
    partial = [name for name, placement in placements.items() if placement.kind == "R~"]
    return work.lower(posed, solution, 2, "tp"), partial


@pytest.mark.parametrize(
    ("unpriced", "time", "partial", "backward"),
    [
        ({("R~", "R"), ("S", "R~")}, 200_983_043, 0, 5),
        ({("R~", "R")}, 190_949_484, 5, 6),
        (set[tuple[str, str]](), 190_947_204, 1, 6),
    ],
    ids=["as searched", "with S to R~", "with both"],
)
def test_what_the_two_conversions_left_out_would_bring(
    work: ModelCompiler,
    monkeypatch: pytest.MonkeyPatch,
    unpriced: set[tuple[str, str]],
    time: int,
    partial: int,
    backward: int,
) -> None:
    """The figures of docs/explanation/solver.md."""
    monkeypatch.setattr(price, "_UNPRICED", unpriced)
    made, names = planned(work)
    collectives = made.plan.collectives

    assert time == made.plan.cost["time_ps"]
    assert partial == len(names)
    assert all("norm" in name for name in names)
    assert backward == sum(c.phase == "backward" for c in collectives)


# ── twins: a page that is wrong is seen ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("page", "seen"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```", "but printed is\n1"),
        ("```python\nraise ValueError('no')\n```", "no"),
        ("```console\n$ python -c 'print(1)'\n2\n```", "but printed is\n1"),
        ("```sh\npython -c 'raise SystemExit(3)'\n```", "0 == 3"),
        ("```sh\nmake\n```", "who runs 'make'"),
        ("```bash\npython\n```", "fence 'bash'"),
        ("```python\nprint(1)", "the fence of line 1 is not closed"),
        ("<!-- not run: because -->\n\nprose\n\n```python\n1 / 0\n```", "division by zero"),
    ],
)
def test_a_wrong_page_is_seen(
    page: str, seen: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BaseException, match=re.escape(seen)):
        Reader("page.md", capsys).read(page)


def test_a_block_with_an_excuse_is_not_run(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "<!-- not run: it would divide by zero -->\n```python\n1 / 0\n```\n"
    Reader("page.md", capsys).read(page)

    assert ["it would divide by zero"] == [block.excuse for block in blocks(page)]


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\nb", "a\nc\n", False),
        ("a\n…\nd", "a\nb\nc\nd\n", True),
        ("a\n…\nd", "a\nb\nc\n", False),
        ("took … s", "took 1.5 s", True),
        ("took … s", "took 1.5\n s", False),
        ("a.c", "abc", False),
    ],
)
def test_what_varies_is_marked(expected: str, printed: str, right: bool) -> None:
    assert right == shows(expected, printed)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[a](page.md#a-b) [b](#c) [c](none.md)\n```\n[d](x.md)\n```\n")

    assert ["#c", "none.md"] == broken_links(page)
