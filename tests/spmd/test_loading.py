"""Loading and saving by real processes: each rank reads its slices, and all write one model."""

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import autotp
from autotp.checkpoint.atomic_write import open_draft
from autotp.cli.shard_merge import shard_checkpoint
from autotp.errors import AutotpError
from tests.checkpoints import FAULTS, IDS, saved
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]


def outputs(found: Any) -> torch.Tensor:
    """The first output of a model."""
    return found[0].detach()


def loaded(rank: int, world: int, directory: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs of a loaded model, and its buffers."""
    model = autotp.from_pretrained(directory, world)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return outputs(model(input_ids=IDS)), buffers


@pytest.mark.parametrize(
    ("kind", "world", "size"),
    [
        ("tied", 2, "20KB"),
        ("qwen2_moe", 2, "20KB"),
        ("bert", 2, "50GB"),
        ("gpt2", 2, "50GB"),
    ],
)
def test_a_loaded_model_equals_the_unsharded_one(
    kind: str, world: int, size: str, pool: Pools, tmp_path: Path
) -> None:
    whole = saved(kind, tmp_path, size)
    with torch.no_grad():
        expected = outputs(whole(input_ids=IDS))
    real = dict(whole.named_buffers())
    for found, buffers in pool(world).run(loaded, str(tmp_path)):
        torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)

        assert all(torch.equal(real[n], b) for n, b in buffers.items() if n in real)
        assert not real.keys() - buffers.keys()


def saved_again(rank: int, world: int, directory: str, target: str, size: str) -> dict[str, Any]:
    """The full state on each rank, after loading and saving."""
    model = autotp.from_pretrained(directory, world)
    model.save_pretrained(target, max_shard_size=size)
    return {"rank 0": model.full_state_dict(rank0_only=True), "all": model.full_state_dict()}


@pytest.mark.parametrize(("kind", "size"), [("tied", "20KB"), ("mixtral", "20KB")])
def test_a_saved_model_is_the_one_that_transformers_saves(
    kind: str, size: str, pool: Pools, tmp_path: Path
) -> None:
    """At tp 2 it is saved, file for file and byte for byte; at tp 4 it is loaded again."""
    source, target, plain = (tmp_path / name for name in ("source", "target", "plain"))
    whole = saved(kind, source)
    whole.save_pretrained(plain, max_shard_size=size)
    first, second = pool(2).run(saved_again, str(source), str(target), size)
    state = whole.state_dict()

    assert contents(plain) == contents(target)
    assert {} == second["rank 0"]
    for found in (first["rank 0"], first["all"], second["all"]):
        assert state.keys() == found.keys()
        assert all(torch.equal(state[name], found[name]) for name in state)

    again = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(state[n], t) for n, t in again.state_dict().items())

    if kind == "tied":
        return
    with torch.no_grad():
        expected = outputs(whole(input_ids=IDS))
    for found, _ in pool(4).run(loaded, str(target)):
        torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def refused(rank: int, world: int, directory: str) -> str:
    """The error of a rank that loads."""
    try:
        autotp.from_pretrained(directory, world)
    except AutotpError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_error_on_all_ranks(fault: str, pool: Pools, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit, said = FAULTS[fault]
    edit(tmp_path)
    found = pool(2).run(refused, str(tmp_path), timeout=60)

    assert [found[0]] * 2 == found
    with pytest.raises(AutotpError, match=said):
        raise AutotpError(found[0])


def full_disk(rank: int, world: int, directory: str, target: str, limit: int) -> str:
    """The error of a rank that saves where rank 0 may write at most `limit` bytes per file."""
    model = autotp.from_pretrained(directory, world)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        model.save_pretrained(target)
    except AutotpError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return ""


def test_a_full_disk_leaves_what_was_there(pool: Pools, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    saved("llama", source)
    found = pool(2).run(full_disk, str(source), str(target), 40_000, timeout=60)

    assert found[0] == found[1]
    assert "model.safetensors: cannot be written at tensor model.layers" in found[0]
    assert not target.exists()

    saved("tied", target)
    before = contents(target)
    found = pool(2).run(full_disk, str(source), str(target), 40_000, timeout=60)

    assert "cannot be written" in found[1]
    assert before == contents(target)


def mixed(rank: int, world: int, directories: list[str]) -> str:
    """The error of a rank that is given a directory of its own."""
    return refused(rank, world, directories[rank])


def test_ranks_with_a_sharded_and_a_plain_checkpoint_are_refused(
    pool: Pools, tmp_path: Path
) -> None:
    """They would take different paths, and wait for each other."""
    saved("llama", tmp_path / "plain")
    shard_checkpoint(tmp_path / "plain", tmp_path / "sharded", 2)
    directories = [str(tmp_path / "plain"), str(tmp_path / "sharded")]
    first, second = pool(2).run(mixed, directories, timeout=60)

    assert first == second
    assert r"not of one kind on all 2 ranks: ranks [1] were given" in first


def unsavable(rank: int, world: int, directory: str, targets: list[str]) -> list[str]:
    """The errors of a rank that saves where nothing can be written."""
    model = autotp.from_pretrained(directory, world)
    found: list[str] = []
    for target in targets:
        try:
            model.save_pretrained(target)
        except AutotpError as error:
            found.append(str(error))
    return found


def test_a_directory_that_cannot_be_made_is_one_error_on_all_ranks(
    pool: Pools, tmp_path: Path
) -> None:
    """Only rank 0 makes it: the others must not wait for its files."""
    saved("llama", tmp_path / "source")
    (tmp_path / "file").touch()
    taken = tmp_path / "taken"
    (taken / "model.safetensors").mkdir(parents=True)
    targets = [tmp_path / "file" / "inside", tmp_path / ("long" * 99), taken]
    first, second = pool(2).run(
        unsavable, str(tmp_path / "source"), [str(target) for target in targets], timeout=60
    )

    assert first == second
    assert [True, True, False] == ["cannot be written" in said for said in first]
    assert "is a directory" in first[2]
    assert [taken / "model.safetensors"] == list(taken.iterdir())


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with open_draft(tmp_path) as held:  # by another that saves here now
        (tmp_path / ".saving-killed").mkdir()
        (tmp_path / ".saving-killed" / "model.safetensors").touch()
        autotp.from_pretrained(tmp_path, 1).save_pretrained(tmp_path)

        assert [held] == list(tmp_path.glob(".saving-*"))


def test_no_rank_is_asked_for_a_class_of_its_own(tmp_path: Path) -> None:
    """The smallest group: one process, no group at all."""
    whole = saved("bert", tmp_path)
    alone = autotp.from_pretrained(tmp_path, 1)

    assert isinstance(alone, AutoModel.from_pretrained(tmp_path).__class__)
    assert torch.equal(outputs(whole(input_ids=IDS)), outputs(alone(input_ids=IDS)))
