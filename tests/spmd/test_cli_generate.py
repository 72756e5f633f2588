"""`autotp generate` starts its own processes, which generate what the unsharded model would."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autotp.cli import main as cli
from tests.models import build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A checkpoint without a tokenizer, and what its model generates after 5, 6, 7, 8."""
    model: Any = build("llama", num_hidden_layers=1)[0]
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    ids = torch.tensor([[5, 6, 7, 8]])
    asked = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return directory, model.generate(ids, **asked)[0, 4:].tolist()


def test_the_tokens_come_from_two_processes(
    saved: tuple[Path, list[int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, tokens = saved
    written = tmp_path / "written.json"
    asked = ["--token-ids", "5,6,7,8", "--max-new-tokens", "40", "--json", str(written)]
    code = cli.main(["generate", str(directory), "--tp", "2", *asked])
    out, err = capfd.readouterr()

    assert 0 == code, err
    assert ",".join(map(str, tokens)) == out.strip()
    assert tokens == json.loads(written.read_text())["ids"]
    assert f"{len(tokens)} tokens: the first after" in err
    assert "tokens/s" in err


KILLED = """
import os, signal, sys
from autotp import loading
from autotp.cli import main as cli

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1":
    loading.read_shards = die
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_rank_that_is_killed_ends_all_with_a_message(
    saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run += [str(script), "generate", str(saved[0]), "--tp", "2", "--token-ids", "5,6,7"]
    root = str(Path(__file__).parents[2])
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **alone}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=180, check=False)

    assert 0 != done.returncode
    assert "autotp: error: reading weights: rank 0 of 2 waited for rank 1" in done.stderr
    assert "closed its connection: it exited or was killed" in done.stderr
    assert [] == [pid for pid in Path("/proc").glob("[0-9]*") if str(script) in _command(pid)]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has ended since
        return ""


def test_what_cannot_start_is_told_before_any_process_does(
    saved: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == cli.main(["generate", str(saved[0]), "--tp", "2", "--prompt", "Hello"])
    assert "has no tokenizer files" in capsys.readouterr().err
    assert 2 == cli.main(["generate", str(tmp_path), "--tp", "2", "--token-ids", "1"])
    assert "has no config.json" in capsys.readouterr().err
