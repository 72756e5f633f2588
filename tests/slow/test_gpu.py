"""The script for a GPU, run dry: its steps work, and a failing one is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.run import CHECKS, outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_all_checks_pass_on_a_cpu() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [sys.executable, "tests/gpu/run.py", "--device", "cpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]

    assert {check.__name__: True for check in CHECKS} == {f["check"]: f["ok"] for f in found}
    assert 0 == done.returncode, done.stderr


def test_what_a_check_raises_is_a_failure() -> None:
    def broken(_: object) -> dict[str, object]:
        raise torch.OutOfMemoryError("no room")

    found = outcome(broken, None)  # pyright: ignore[reportArgumentType]

    assert ("broken", False) == (found["check"], found["ok"])
    assert "OutOfMemoryError: no room" == found["error"]
