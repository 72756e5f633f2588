"""How the tests share two cores, and which of them are slow.

Two workers take tests in groups, the longest first, so that no long one is begun at the end. What
is costly is made once a group: the pools of processes that all of tests/spmd run in, and captures
that the tests of several files share. Every other file is a group of its own.
"""

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # each its own core
os.environ.setdefault("AUTOTP_CHECK_STAGES", "1")  # here, and in the processes that tests start

TESTS = Path(__file__).parent
GROUPS = {
    "spmd/": "processes",
    "planner/test_analyse.py": "analysed",
    "planner/test_match.py": "analysed",
    "algebra/test_axis.py": "analysed",
    "planner/test_optimal.py": "random plans",
    "lower/test_random_plans.py": "random plans",
    "verification/test_planted_faults.py": "random plans",
}
"""The group of a file or folder, by how its path begins."""
FIRST = ("spmd", "slow", "planner", "verification", "lower", "capture", "checkpoint")
"""Folders in the order in which they are begun: those of the longest groups."""


def group_of(path: str) -> str:
    """The group of a file, given its path below tests/."""
    return next((group for start, group in GROUPS.items() if path.startswith(start)), path)


class ByGroup(LoadScopeScheduling):
    """Hands out whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0].removeprefix("tests/"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is under tests/slow as slow, and puts all tests into the order of `FIRST`."""
    for item in items:
        if item.path.is_relative_to(TESTS / "slow"):
            item.add_marker("slow")
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(TESTS).parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    """The scheduler of this session."""
    return ByGroup(config, log)
