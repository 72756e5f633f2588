"""The command line: what it passes on, what it prints where, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotp.cli import main as cli
from autotp.errors import PlanError
from autotp.records.evidence import Evidence
from autotp.report.plan import format_plan
from tests.plans import decoder_plan

ROOT = Path(__file__).parents[2]
PLAN = decoder_plan(layers=2, tp=2)
EVIDENCE = Evidence(
    ok=True,
    tp=2,
    max_abs_error=1e-6,
    max_rel_error=2e-7,
    tolerance=1e-5,
    tolerance_reason="float32",
    gradients={},
    collectives_predicted={"forward all_reduce": 4},
    collectives_seen={"forward all_reduce": 4},
    first_divergence=None,
    replicated_fraction=0.01,
    dtype="float32",
)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
Calls = list[tuple[str, nn.Module, dict[str, Any]]]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the command line requested of the API, which answers with fixed results."""
    seen: Calls = []

    def answering(name: str, answer: Callable[[dict[str, Any]], object]) -> Callable[..., object]:
        def function(model: nn.Module, **arguments: Any) -> object:
            seen.append((name, model, arguments))
            return answer(arguments)

        return function

    fake = SimpleNamespace(
        plan=answering("plan", lambda _: PLAN),
        dry_run=answering(
            "dry_run",
            lambda _: {
                "plan.json": PLAN.to_json(),
                "graph.py": "x = 1\n",
                "problem.json.gz": b"\x1f",
            },
        ),
        verify=answering("verify", lambda asked: replace(EVIDENCE, tp=asked["tp"])),
    )
    monkeypatch.setattr(cli, "api", fake)
    return seen


def _refusing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def plan(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(cli, "api", SimpleNamespace(plan=plan))


def test_plan_prints_the_report(
    calls: Calls,
    directory: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code = cli.main(["plan", directory, "--tp", "2"])

    assert 0 == code
    assert (format_plan(PLAN, 120), "") == capsys.readouterr()


def test_plan_passes_on_what_was_asked(calls: Calls, directory: str) -> None:
    more = ["--training", "--machine", "gloo", "--strict", "--batch", "3", "--sequence", "5"]
    more += ["--reduce-dtype", "float32"]
    cli.main(["plan", directory, "--tp", "2", "--override", "*.down=row", *more])
    name, model, asked = calls[0]
    inputs = asked.pop("example_inputs")

    assert ("plan", "LlamaForCausalLM") == (name, type(model).__name__)
    assert {
        "tp": 2,
        "training": True,
        "machine": "gloo",
        "overrides": {"*.down": "row"},
        "strict": True,
        "new_tokens": 0,
        "reduce_dtype": "float32",
        "rules": [],
    } == asked
    assert (3, 5) == inputs["input_ids"].shape
    assert inputs["input_ids"].is_meta


def test_plan_writes_json_besides_the_report(calls: Calls, directory: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    cli.main(["plan", directory, "--tp", "2", "--json", str(path)])

    assert PLAN.to_json() == path.read_text()


def test_plan_writes_only_json_to_standard_output(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["plan", directory, "--tp", "2", "--json", "-"])

    assert PLAN.to_json() == capsys.readouterr().out


def test_dry_run_writes_its_files(calls: Calls, directory: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    code = cli.main(["dry-run", directory, "--tp", "2", "--rank", "1", "-o", str(out)])

    assert (0, 1) == (code, calls[0][2]["rank"])
    assert ["graph.py", "plan.json", "plan.txt", "problem.json.gz"] == sorted(os.listdir(out))
    assert format_plan(PLAN) == (out / "plan.txt").read_text()
    assert b"\x1f" == (out / "problem.json.gz").read_bytes()


def test_dry_run_into_a_file_is_refused(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["dry-run", directory, "--tp", "2", "-o", f"{directory}/config.json"])

    assert 2 == code
    assert not calls
    assert "-o: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--machine", "h10"], "machine 'h10' is unknown. Did you mean 'h100'?"),
        (["--override", "*=colum"], "requests layout 'colum'; the layouts are"),
        (["--json", "/no/such/place.json"], "--json: /no/such is not a directory"),
        (["--sequence", "99"], "sequence 99, but its config has 32 positions"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_captured(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    code = cli.main(["plan", directory, "--tp", "2", *options])

    assert (2, []) == (code, calls)
    assert said in capsys.readouterr().err


def test_a_rank_that_there_is_not_is_refused(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["dry-run", directory, "--tp", "2", "--rank", "2", "-o", "out"])

    assert (2, []) == (code, calls)
    assert "--rank 2: the ranks of --tp 2 are 0 to 1" in capsys.readouterr().err


def test_a_factory_without_inputs_is_told_what_to_return(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "load_with_inputs", lambda _: (nn.Linear(4, 4), None), raising=True)
    code = cli.main(["plan", "some:factory", "--tp", "2"])
    said = capsys.readouterr().err

    assert (2, []) == (code, calls)
    assert "its forward takes 'input'. Let the factory return (module, inputs), a tuple" in said


def test_verify_draws_weights_and_tries_every_tp(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["verify", directory, "--tp", "2,4", "--seed", "7"])
    shown = capsys.readouterr().out

    assert 0 == code
    assert [("verify", 2, 7), ("verify", 4, 7)] == [(n, a["tp"], a["seed"]) for n, _, a in calls]
    assert not any(p.is_meta for p in calls[0][1].parameters())
    assert (2, 16) == calls[0][2]["example_inputs"]["input_ids"].shape
    assert not calls[0][2]["example_inputs"]["input_ids"].is_meta
    assert shown.startswith("tp 2: matches the unsharded model (float32)\n")
    assert "\n\ntp 4: matches the unsharded model (float32)\n" in shown
    assert "2.00e-07" in shown
    assert "4 forward all-reduce" in shown


def test_verify_of_a_wrong_model_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(EVIDENCE, ok=False, first_divergence="linear_3 at layers.0")
    monkeypatch.setattr(cli, "api", SimpleNamespace(verify=lambda *_, **__: wrong))
    code = cli.main(["verify", directory, "--tp", "2"])
    shown = capsys.readouterr().out

    assert 1 == code
    assert "tp 2: DIFFERS from the unsharded model" in shown
    assert "first wrong node: linear_3 at layers.0" in shown


def test_verify_writes_its_evidence_as_json(
    calls: Calls, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["verify", directory, "--tp", "2,4", "--json", "-"])
    found = json.loads(capsys.readouterr().out)

    assert [(2, True), (4, True)] == [(e["tp"], e["ok"]) for e in found]


def test_rules_lists_every_op(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert 0 == cli.main(["rules"])
    assert "aten.linear.default" in capsys.readouterr().out


def test_rules_can_be_read_on_a_narrow_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["rules"])
    shown = capsys.readouterr().out

    assert re.match(r"\d+ ops\n", shown)
    assert "b m i, b i o -> b m o" in shown


def test_rules_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["rules", "--json", "-"])
    rows = json.loads(capsys.readouterr().out)

    assert {"i": "sum"} == rows["aten.linear.default"]["reduce"]


def test_an_error_is_one_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refusing(monkeypatch, PlanError("layers.0: 2 heads over 3 ranks. Choose tp 1 or 2."))
    code = cli.main(["plan", directory, "--tp", "3"])

    assert 1 == code
    assert (
        "",
        "autotp: error: layers.0: 2 heads over 3 ranks. Choose tp 1 or 2.\n",
    ) == capsys.readouterr()


def test_a_bug_is_one_message_too(
    monkeypatch: pytest.MonkeyPatch, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refusing(monkeypatch, KeyError("x"))
    code = cli.main(["plan", directory, "--tp", "3"])

    assert 1 == code
    assert (
        "autotp: error: unexpected KeyError: 'x' (--debug shows where)\n" == capsys.readouterr().err
    )


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refusing(monkeypatch, PlanError("no"))
    cli.main(["plan", directory, "--tp", "3", "--debug"])

    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["vrify"], "Did you mean 'verify'?"),
        (["plan", "gpt2", "--tp", "2", "--trainig"], "Did you mean '--training'?"),
        (["plan", "gpt2"], "required: --tp"),
        (["plan", "gpt2", "--tp", "0"], "0 is too small; the minimum is 1"),
        (["plan", "gpt2", "--tp", "-2"], "-2 is too small; the minimum is 1"),
        (["plan", "gpt2", "--tp", "many"], "'many' is not an integer"),
        (["plan", "gpt2", "--tp", "2,4"], "'2,4' is not an integer; only verify takes several"),
        (["plan", "gpt2", "--tp", "2", "--override", "mlp"], "'mlp' is not GLOB=LAYOUT"),
        (["dry-run", "gpt2", "--tp", "2"], "required: -o/--output"),
        (["verify", "gpt2", "--tp", "2,x"], "'x' is not an integer"),
        (["generate", "d", "--tp", "2", "--temperature", "-1"], "-1 is not a temperature"),
        (["generate", "d", "--tp", "2", "--temperature", "nan"], "nan is not a temperature"),
    ],
)
def test_misuse_exits_with_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    assert 2 == caught.value.code
    assert reason in capsys.readouterr().err


def test_token_ids_outside_the_vocabulary_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 512}}')

    assert 2 == cli.main(["generate", str(tmp_path), "--tp", "2", "--token-ids", "5,512"])
    assert (
        "token id 512 is out of range: the vocabulary has 512 tokens (0 to 511)"
        in capsys.readouterr().err
    )


def test_a_former_name_of_an_option_is_accepted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    said: list[str] = []
    for spelled in (["--ids", "512"], ["--ids=512"], ["--token-ids", "512"]):
        assert 2 == cli.main(["generate", str(tmp_path), "--tp", "2", *spelled])
        said.append(capsys.readouterr().err)
    warning = "autotp: warning: --ids is now called --token-ids; use --token-ids.\n"

    assert [warning + said[2], warning + said[2], said[2]] == said
    assert "token id 512 is out of range" in said[2]


def test_processes_are_started_with_the_present_name_of_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise each process would warn again."""
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(cli.subprocess, "run", run)
    monkeypatch.delenv("RANK", raising=False)

    assert 0 == cli.main(["generate", str(tmp_path), "--tp", "2", "--ids", "5,6"])
    assert ["generate", str(tmp_path), "--tp", "2", "--token-ids", "5,6"] == started[0][-6:]
    assert 1 == capsys.readouterr().err.count("warning")


def test_more_new_tokens_than_positions_are_refused_with_the_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 2 == cli.main(["plan", "gpt2", "--tp", "2", "--new-tokens", "5000"])
    assert "Request at most 1023 new tokens" in capsys.readouterr().err


def test_only_finished_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out

    assert ["plan", "dry-run", "verify", "rules", "shard", "merge", "generate"] == [
        line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line.split()
    ]


def test_a_factory_gives_its_own_inputs(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": torch.zeros(2, 4)}
    monkeypatch.setattr(cli, "load_with_inputs", lambda _: (nn.Linear(4, 4), inputs), raising=True)
    cli.main(["plan", "some:factory", "--tp", "2"])

    assert inputs == calls[0][2]["example_inputs"]


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from autotp.cli.main import main; sys.exit(main(['rules']))"
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=closed,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )

    assert (0, b"") == (done.returncode, done.stderr)


@pytest.mark.slow
def test_output_fits_a_terminal_of_few_letters() -> None:
    code = (
        "from autotp.report.terminal import print_to_terminal; "
        "from autotp.report.plan import render_plan; from tests.plans import decoder_plan; "
        "print_to_terminal(render_plan(decoder_plan(layers=1, tp=2)))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, env=environment, check=True
    )

    assert done.stdout.isascii()
    assert b"us\n" in done.stdout
