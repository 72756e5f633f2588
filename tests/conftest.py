"""How the tests share two cores: two workers, each test file in one, all files of processes in one.

A pool of worker processes a world size, and what a file's tests capture, are then made once.
"""

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process its own core
os.environ.setdefault("AUTOTP_CHECK_STAGES", "1")  # here, and in the processes that tests start


class ByFile(LoadScopeScheduling):
    """Hands out whole files, and everything under tests/spmd as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "spmd" if "spmd/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """The scheduler of this session."""
    return ByFile(config, log)
