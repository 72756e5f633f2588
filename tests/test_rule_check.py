"""`autotp rules check`: every row is run on shards, wrong and untested ones are told."""

import json
from pathlib import Path

import pytest

from autotp.cli import main as cli
from autotp.errors import RuleError
from autotp.oprules.rulebook import load
from autotp.verification.rules.cases import call, real, words
from autotp.verification.rules.check import check
from autotp.verification.rules.written import sample_of

ROWS = """
[[row]]
ops = ["aten.sin.default"]
rule = "... -> ..."

[[row]]
ops = ["aten.tanh.default"]
rule = "... -> ..."
linear = [[0]]

[[row]]
ops = ["aten.sinc.default"]
rule = "... -> ..."

[[row]]
ops = ["aten.cross.default"]
rule = "... c, ... c -> ... c"
whole = ["c"]
linear = [[0], [1]]
samples = ["real(5, 6, 3), real(5, 6, 3), dim=-1"]

[[row]]
ops = ["shop.unheard.default"]
rule = "... -> ..."
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "aten").mkdir()
    (tmp_path / "aten" / "rows.toml").write_text(ROWS)
    (tmp_path / "roles.toml").write_text("")
    return tmp_path


def test_a_row_is_right_wrong_or_untested(directory: Path) -> None:
    found = {v.op: (v.verdict, v.reason) for v in check(load(directory))}

    assert {
        "aten.cross.default": ("right", ""),
        "aten.sin.default": ("right", ""),
        "aten.sinc.default": ("untested", 'no sample: give the row samples = ["…"]'),
        "shop.unheard.default": ("untested", "no such op: import what registers it"),
    } == {op: told for op, told in found.items() if op != "aten.tanh.default"}
    assert "wrong" == found["aten.tanh.default"][0]
    assert found["aten.tanh.default"][1].startswith("tp 2, partial:0: result 0 as P on rank 0")


def test_a_wrong_row_gives_exit_code_1(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for every cell on one line
    code = cli.main(["rules", "check", "--rules", str(directory)])
    printed = " ".join(capsys.readouterr().out.split())

    assert 1 == code
    assert "wrong: tp 2, partial:0: result 0 as P on rank 0: differs" in printed
    assert "5 rows: 2 right, 1 wrong, 2 untested" in printed


def test_right_rows_give_exit_code_0_and_json(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(
        ["rules", "check", "--rules", str(directory), "--op", "aten.cross*", "--json", "-"]
    )
    (verdict,) = json.loads(capsys.readouterr().out)

    assert 0 == code
    assert ("aten.cross.default", "right") == (verdict["op"], verdict["verdict"])
    assert verdict["strategies"] > 10


def test_other_sizes_are_tried_than_the_samples_say(directory: Path) -> None:
    (verdict,) = check(load(directory), ops="aten.sin.default")

    assert 2 == verdict.calls


def test_a_directory_without_rules_is_a_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == cli.main(["rules", "check", "--rules", str(tmp_path / "none")])
    assert "roles.toml: cannot be read" in capsys.readouterr().err


def test_a_sample_is_written_as_a_call() -> None:
    text = "[real(6, 2)], words(4, below=6), -1, eps=1e-6, on=True"

    assert call([real(6, 2)], words(4, below=6), -1, eps=1e-6, on=True) == sample_of(text)


@pytest.mark.parametrize(
    ("text", "why"), {"real(": "never closed", "open('x')": "'open' makes no tensor"}.items()
)
def test_what_is_no_sample_is_refused(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=why):
        sample_of(text)
