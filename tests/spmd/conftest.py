"""The pools of worker processes, shared by all tests of a session."""

from collections.abc import Callable, Iterator

import pytest

from tests.spmd.pool import Pool, close_all, pool_of


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(world).run(fn, *args)`: each rank's `fn(rank, world, *args)`, in its own process."""
    yield pool_of
    close_all()
