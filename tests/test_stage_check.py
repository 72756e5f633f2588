"""The switch of the postconditions, and the error that a fault becomes."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autotp import compiler
from autotp.compiler import ModelCompiler
from autotp.errors import AutotpError, CaptureError, PlanError, RuleError
from autotp.options import read_request
from autotp.stage_check import SWITCH, Stage, check_stage, is_switched_on
from tests.models import build

STAGES: list[tuple[Stage, type[AutotpError]]] = [
    ("capture", CaptureError),
    ("propagate", RuleError),
    ("match", PlanError),
    ("formulate", PlanError),
]


def list_checked(monkeypatch: pytest.MonkeyPatch, *, requested: bool) -> list[str]:
    """The stages that are checked while a small model is planned."""
    seen: list[str] = []

    def note(stage: str, model: str, faults: Iterator[str]) -> None:
        seen.append(stage)
        assert [] == list(faults)

    monkeypatch.setattr(compiler, "check_stage", note)
    model, inputs = build("hand", layers=1)
    request = replace(read_request(), check_stages=requested)
    ModelCompiler(model, request, inputs).compile(2, "tp")
    return seen


def test_the_tests_run_with_every_stage_checked() -> None:
    assert is_switched_on()
    assert "1" == os.environ[SWITCH]


def test_every_stage_is_checked_that_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)

    assert [stage for stage, _ in STAGES] == list_checked(monkeypatch, requested=True)
    assert [] == list_checked(monkeypatch, requested=False)


@pytest.mark.parametrize(("stage", "error"), STAGES)
def test_a_fault_is_raised_as_the_error_of_its_stage(
    stage: Stage, error: type[AutotpError]
) -> None:
    with pytest.raises(
        error, match=f"Tiny: after the stage {stage}, (.|\n)*- one\nThis is a fault"
    ):
        check_stage(stage, "Tiny", iter(["one"]))


def test_many_faults_are_counted() -> None:
    with pytest.raises(PlanError, match="- fault 4\n- and 3 more"):
        check_stage("match", "Tiny", (f"fault {k}" for k in range(8)))


def test_no_fault_raises_nothing() -> None:
    check_stage("capture", "Tiny", iter(()))


def test_a_fault_in_a_captured_graph_stops_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("hand", layers=1)
    capture = compiler.capture

    def faulty(*args: object, **kwargs: object) -> object:
        program = capture(*args, **kwargs)  # type: ignore[arg-type]
        node = program.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)[0]
        del node.meta["val"]
        return program

    monkeypatch.setattr(compiler, "capture", faulty)
    with pytest.raises(CaptureError, match=r'gelu at blocks.0 .*has no meta\["val"\]'):
        ModelCompiler(model, read_request(), inputs)
