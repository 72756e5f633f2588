"""How the tests share two cores: two workers, and every test of processes in the same one.

A pool of worker processes a world size, and what a file's tests capture, are then made once.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process its own core

_PROCESSES = Path(__file__).parent / "spmd"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by file, those that start processes in one group, the longest first."""
    for item in items:
        name = "spmd" if _PROCESSES in item.path.parents else item.path.name
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: _PROCESSES not in item.path.parents)
