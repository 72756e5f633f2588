"""`autotp rules check`: every row is run on shards, wrong and untested ones are told."""

import json
import re
from pathlib import Path

import pytest
import torch

from autotp.cli import main as cli
from autotp.errors import RuleError
from autotp.oprules.rulebook import load_rulebook
from autotp.verification.rules.cases import (
    call,
    complexes,
    fixed,
    flags,
    integers,
    positive,
    real,
    short,
)
from autotp.verification.rules.check import check_rules
from autotp.verification.rules.written import parse_sample

ROWS = """
[[row]]
ops = ["aten.sin.default"]
rule = "... -> ..."
samples = ["real(6, 2, 12)"]

[[row]]
ops = ["aten.tanh.default"]
rule = "... -> ..."
linear = [[0]]
samples = ["real(6, 2, 12)"]

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
    found = {v.op: (v.verdict, v.reason) for v in check_rules(load_rulebook(directory))}

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
    (verdict,) = check_rules(load_rulebook(directory), ops="aten.sin.default")

    assert 2 == verdict.calls


def test_a_directory_without_rules_is_a_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == cli.main(["rules", "check", "--rules", str(tmp_path / "none")])
    assert f"{tmp_path / 'none'}: cannot be read" in capsys.readouterr().err


def test_a_sample_is_written_as_a_call() -> None:
    text = "[real(6, 2)], (integers(4, below=6), None), -1, 'floor', eps=1e-6, dtype=torch.int32"
    arguments = [real(6, 2)], [integers(4, below=6), None], -1, "floor"

    assert call(*arguments, eps=1e-6, dtype=torch.int32) == parse_sample(text)


def test_every_kind_of_random_tensor_can_be_written() -> None:
    text = "real(high=0), positive(2), integers(2, low=1, below=4), flags(2), complexes(2), "

    assert call(
        real(high=0), positive(2), integers(2, low=1, below=4), flags(2), complexes(2), fixed(2),
        short(2, 0),
    ) == parse_sample(f"{text} fixed(2), short(2, 0)")  # fmt: skip


def test_a_tensor_can_be_written_out() -> None:
    ends, mask = parse_sample("torch.tensor([2, 5], dtype=torch.int32), torch.tensor([True])").args

    assert (torch.int32, [2, 5]) == (ends.dtype, ends.tolist())
    assert (torch.bool, [True]) == (mask.dtype, mask.tolist())


@pytest.mark.parametrize(
    ("text", "why"),
    {
        "real(": "'(' was never closed",
        "open('x')": "'open' does not describe a tensor",
        "real(2).clone()": "'real(2).clone' does not describe a tensor",
        "torch.ones(2)": "'torch.ones' does not describe a tensor",
        "torch.load": "'torch.load' is neither a literal nor a dtype",
        "[x for x in 'ab']": "is neither a literal nor a dtype",
        "*[1]": "'*[1]' is neither a literal nor a dtype",
        "**{'dim': 1}": "** is not allowed: name each argument",
        "1), print(2": "more than the arguments of one call",
        "1)(2": "more than the arguments of one call",
        "real(2.5)": "real(2.5): sizes are integers, 0 or larger",
        "real(-1)": "real(-1): sizes are integers, 0 or larger",
        "integers(4)": "missing 1 required keyword-only argument: 'below'",
        "torch.tensor([real(2)])": "torch.tensor([real(2)])",
    }.items(),
)
def test_what_is_no_sample_is_refused(text: str, why: str) -> None:
    with pytest.raises(RuleError, match=re.escape(why)) as caught:
        parse_sample(text)
    assert f"sample {text!r}: " in str(caught.value)
    assert "Write the arguments of one call of the op: literals, lists," in str(caught.value)


def test_a_sample_that_cannot_be_read_is_reported_with_its_file_and_op(tmp_path: Path) -> None:
    rows = '[[row]]\nops = ["aten.sin.default"]\nrule = "... -> ..."\nsamples = ["rael(6)"]\n'
    (tmp_path / "aten").mkdir()
    (tmp_path / "aten" / "mine.toml").write_text(rows)
    (tmp_path / "roles.toml").write_text("")

    message = "mine.toml, aten.sin.default: sample 'rael(6)': 'rael' does not describe a tensor"
    with pytest.raises(RuleError, match=re.escape(message)):
        list(check_rules(load_rulebook(tmp_path)))
