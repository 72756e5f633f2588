"""`rules=` and `--rules`: TOML files of a user's, merged over autotp's rules and verified."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp.cli import main as cli
from autotp.errors import AutotpError, PlanError, RuleError
from tests import shop
from tests.models import build
from tests.toys import MLP

OP = "shop_tests.tiled.default"
NO_SILU = """
[[row]]
ops = ["aten.silu.default"]
rule = "... d -> ... d"
whole = ["d"]
samples = ["real(4, 6)"]
"""
LINEAR = shop.RULE.replace("samples", "linear = [[0]]\nsamples")
Writer = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(text: str, name: str = "shop.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def plan(**options: Any) -> autotp.Plan:
    return autotp.plan(shop.model(), 2, example_inputs=shop.inputs(), **options)


def layouts(plan: autotp.Plan) -> dict[str, str]:
    return {name: record.layout for name, record in plan.parameters.items()}


def refusal(kind: type[AutotpError], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# ── a right rule ─────────────────────────────────────────────────────────────────────────────────


def test_a_rule_shards_what_running_the_op_does_not_reveal(write: Writer) -> None:
    """Discovery runs the op at small sizes, which this op refuses in its last dim."""
    without, ruled = plan(training=True), plan(training=True, rules=write(shop.RULE))

    assert [(OP, "a b c -> a b c; whole: c")] == [(d.op, d.rule) for d in without.discovered]
    assert "replicated" == layouts(without)["up.weight"]
    assert ((), ()) == (ruled.discovered, ruled.unruled)
    assert ("column", "row") == (layouts(ruled)["up.weight"], layouts(ruled)["down.weight"])
    assert ruled.replicated_fraction < 0.05 < without.replicated_fraction


def test_strict_accepts_an_op_with_a_rule_of_the_users(write: Writer) -> None:
    assert f"op {OP} has no rule" in refusal(autotp.UnknownOpError, lambda: plan(strict=True))
    assert "column" == layouts(plan(strict=True, rules=write(shop.RULE)))["up.weight"]


@pytest.mark.parametrize("tp", [2, 3])
def test_a_model_with_such_a_rule_verifies(write: Writer, tp: int) -> None:
    found = autotp.verify(
        shop.model(), tp, example_inputs=shop.inputs(), training=True, rules=write(shop.RULE)
    )

    assert found.ok, found.first_divergence
    assert {"forward all_reduce": 1} == found.collectives_seen


def test_a_rank_is_built_by_such_a_rule(write: Writer) -> None:
    sharded = autotp.parallelize(
        shop.model(), 2, rank=1, example_inputs=shop.inputs(), rules=[write(shop.RULE)]
    )

    assert (32, 32) == sharded.get_parameter("up.weight").shape
    assert "shop_tests.tiled" in sharded.graph_module.code


def test_a_row_replaces_that_of_autotp(write: Writer) -> None:
    model, x = MLP(32, 64, torch.nn.functional.silu), shop.inputs()
    ours = autotp.plan(model, 2, example_inputs=x)
    theirs = autotp.plan(model, 2, example_inputs=x, rules=write(NO_SILU))

    assert ["all_reduce"] == [c.kind for c in ours.collectives if c.phase == "forward"]
    assert "all_gather" in [c.kind for c in theirs.collectives if c.phase == "forward"]
    assert autotp.verify(model, 2, example_inputs=x, rules=write(NO_SILU)).ok


def test_of_several_files_the_later_ones_win(write: Writer) -> None:
    first = write(shop.RULE)
    unshardable = shop.RULE.replace("... -> ...", "... d -> ... d").replace(
        "samples", 'whole = ["d"]\nsamples'
    )
    second = write(unshardable, "second.toml")

    assert "column" == layouts(plan(rules=[second, first]))["up.weight"]
    assert "column" != layouts(plan(rules=[first, second]))["up.weight"]


def test_a_plan_names_the_files_and_their_content(write: Writer) -> None:
    """By the hash of the plan ranks find that their files differ (spmd/test_rules_files.py)."""
    first = plan(rules=write(shop.RULE))
    again = plan(rules=write(shop.RULE))
    commented = plan(rules=write(f"# a comment\n{shop.RULE}"))
    read = autotp.Plan.from_json(first.to_json())

    assert "rules" not in plan().options
    assert [True] == [bool(re.fullmatch(r"shop\.toml [0-9a-f]{16}", f)) for f in _files(first)]
    assert (first.hash, _files(first)) == (again.hash, _files(again))
    assert layouts(first) == layouts(commented)
    assert first.hash != commented.hash
    assert (_files(first), first.hash) == (_files(read), read.hash)


def _files(plan: autotp.Plan) -> list[str]:
    files: Any = plan.options["rules"]
    return list(files)


@pytest.mark.slow
def test_from_pretrained_reads_rules_too(write: Writer, tmp_path: Path) -> None:
    model: Any = build("llama", num_hidden_layers=1)[0]
    model.save_pretrained(tmp_path / "model")

    def load(text: str) -> autotp.ShardedModel:
        return autotp.from_pretrained(tmp_path / "model", 2, rank=0, rules=write(text))

    sharded = load(NO_SILU)
    wrong = NO_SILU.replace('whole = ["d"]', "linear = [[0]]").replace("... d", "...")

    assert ["shop.toml"] == [f.split()[0] for f in _files(sharded.sharded_state.plan)]
    assert "aten.silu.default" in refusal(RuleError, lambda: load(wrong))


# ── a wrong one ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", [autotp.plan, autotp.verify, partial(autotp.parallelize, rank=0)])
def test_a_wrong_rule_is_refused_with_what_broke(write: Writer, call: Callable[..., Any]) -> None:
    path = write(LINEAR)
    said = refusal(
        RuleError, lambda: call(shop.model(), 2, example_inputs=shop.inputs(), rules=path)
    )

    assert (
        f"shop.toml: the rule of {OP} (... -> ...; linear in 0) is wrong: tp 2, partial:0" in said
    )
    assert "differs by" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('samples = ["real(4, 48)"]', "", 'is untested: no sample: give the row samples = ["…"]'),
        ("tiled", "missing", "is untested: no such op: import what registers it"),
        ('"real(4, 48)"', '"real(4, 8)"', "sample 'real(4, 8)' cannot be run: 8 features, and a"),
        ('"real(4, 48)"', '"real(4, 48"', "sample 'real(4, 48': '(' was never closed. Write the"),
        ('rule = "... -> ..."', 'derive = "magic"', "`derive` is 'magic', not one of"),
        ("samples", 'emit = "magic"\nsamples', "`emit` is 'magic', not one of"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_advice(
    write: Writer, old: str, new: str, said: str
) -> None:
    assert old in shop.RULE
    message = refusal(RuleError, lambda: plan(rules=write(shop.RULE.replace(old, new))))

    assert said in message
    assert "shop.toml" in message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("samples", "sample", "shop.toml, row 1: unknown key 'sample'; the keys are aligned,"),
        ("[[row]]", "[row]", "shop.toml: 'row' is not a list of tables. Write [[row]] above each"),
        ("[[row]]", "[[rows]]", "shop.toml: has the unknown table 'rows'"),
        ("[[row]]", "[[row", "shop.toml: cannot be read: Expected ']]'"),
        (f'["{OP}"]', f'"{OP}"', "row 1: `ops` must be a list of ops, such as"),
        (f'["{OP}"]', "[]", "row 1: names no op: set ops = "),
        ('"... -> ..."', "5", "row 1: `rule` must be text, such as"),
        ('rule = "... -> ..."', "", "row 1: needs exactly one of `rule` and `derive`"),
        ("samples", 'reduce = "sum"\nsamples', "row 1: `reduce` must be a table, such as"),
        ("samples", "linear = [0]\nsamples", "row 1: `linear` must be a list of sets of operands"),
        ("samples", "bias = 2\nsamples", "row 1: `bias` must be a list of operands, such as [2]"),
        ("samples", "whole = 5\nsamples", "row 1: `whole` must be a list of names"),
        ("samples", 'loss = "no"\nsamples', "row 1: `loss` must be true or false, not 'no'"),
        ('["real(4, 48)"]', "5", "row 1: `samples` must be a list of calls as text"),
        ('["real(4, 48)"]', f'["real(4, 48)"]\n{shop.RULE}', f"op {OP} has two rows. Give it one"),
    ],
)
def test_a_malformed_file_is_named_with_row_and_key(
    write: Writer, old: str, new: str, said: str
) -> None:
    assert old in shop.RULE
    path = write(shop.RULE.replace(old, new))
    message = refusal(RuleError, lambda: plan(rules=path))

    assert said in message
    assert str(path) in message


def test_rules_must_be_files(tmp_path: Path) -> None:
    assert "rules: is of type int" in refusal(PlanError, lambda: plan(rules=5))
    assert "rules: is of type list" in refusal(PlanError, lambda: plan(rules=["a.toml", 5]))
    assert f"{tmp_path} is a directory" in refusal(PlanError, lambda: plan(rules=tmp_path))
    assert "none.toml: cannot be read" in refusal(RuleError, lambda: plan(rules="none.toml"))
    (tmp_path / "empty.toml").touch()
    assert "empty.toml: is empty" in refusal(RuleError, lambda: plan(rules=tmp_path / "empty.toml"))


# ── the command line ─────────────────────────────────────────────────────────────────────────────


def test_the_command_line_plans_with_a_file(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "tests.shop:factory", "--tp", "2", "--json", "-", "--rules"]

    assert 0 == cli.main([*arguments, str(write(shop.RULE))])
    parameters = json.loads(capsys.readouterr().out)["parameters"]
    assert "column" == parameters["up.weight"]["layout"]
    assert 1 == cli.main([*arguments, str(write(LINEAR))])
    assert "(... -> ...; linear in 0) is wrong" in capsys.readouterr().err
    assert 2 == cli.main([*arguments, "none.toml"])
    assert "none.toml: cannot be read" in capsys.readouterr().err


def test_the_command_line_checks_a_file(write: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["rules", "check", "--op", "shop_tests.*", "--json", "-", "--rules"]

    assert 0 == cli.main([*check, str(write(shop.RULE))])
    assert [(OP, "right")] == [(v["op"], v["verdict"]) for v in json.loads(capsys.readouterr().out)]
    assert 1 == cli.main([*check, str(write(LINEAR))])
    assert "wrong" == json.loads(capsys.readouterr().out)[0]["verdict"]
    assert 2 == cli.main([*check, str(write("row = 5"))])
    assert "'row' is not a list of tables" in capsys.readouterr().err


def test_the_command_line_imports_what_registers_the_ops(
    write: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('own_ops::same', mutates_args=())\n"
        "def same(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x.clone()\n"
        "same.register_fake(torch.empty_like)\n"
        "same.register_autograd(lambda ctx, g: g)\n"
    )
    path = write(shop.RULE.replace("shop_tests.tiled", "own_ops.same"))
    monkeypatch.chdir(tmp_path)
    check = ["rules", "check", "--op", "own_ops.*", "--rules", str(path)]

    assert 1 == cli.main(check)
    assert "0 right, 0 wrong, 1 untested" in capsys.readouterr().out
    assert 0 == cli.main([*check, "--import", "own_ops"])
    assert "1 right, 0 wrong, 0 untested" in capsys.readouterr().out
    assert 2 == cli.main([*check, "--import", "no_such_module"])
    assert "--import no_such_module: No module named" in capsys.readouterr().err


def test_a_listing_has_the_rows_of_a_file(
    write: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == cli.main(["rules", "--json", "-", "--rules", str(write(shop.RULE))])
    listed = json.loads(capsys.readouterr().out)

    assert "... -> ..." == listed[OP]["signature"]
    assert "aten.linear.default" in listed
