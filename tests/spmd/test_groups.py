"""Groups in real processes: strided sub-groups, meshes, and ranks that disagree."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autotp.algebra.split import block
from autotp.errors import PlanError
from autotp.runtime.group.agreement import require_agreement
from autotp.runtime.group.process_group import Group, resolve_group
from autotp.runtime.ops import library as conjugates
from tests.spmd.placed import whole
from tests.spmd.pool import Pool

Pools = Callable[[int], Pool]

OPS = torch.ops.autotp
assert conjugates.LIBRARY.ns == "autotp"


def strided_group(rank: int) -> Group:
    """Two groups of two: world ranks 0 and 2, and 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return resolve_group(2, group=groups[rank % 2])


def mesh_group(rank: int) -> Group:
    return resolve_group(None, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data")))


MAKERS = {"group": strided_group, "mesh": mesh_group}


def in_replicas(rank: int, world: int, way: str) -> tuple[int, int, list[Tensor]]:
    group = MAKERS[way](rank)
    replica, split = rank % 2, block(4).encode()
    x = whole((4, 2), replica)
    local = OPS.scatter(x, 0, split, group.name)
    gathered = OPS.gather(local, 0, split, group.name)
    summed = OPS.reduce(torch.tensor([float(rank)]), group.name)
    first = OPS.keep_first(torch.ones(1), group.name)
    return group.size, group.rank, [local, gathered, summed, first]


@pytest.mark.parametrize("way", list(MAKERS))
def test_two_replicas_of_tp_2_keep_to_themselves(pool: Pools, way: str) -> None:
    for rank, (size, member, values) in enumerate(pool(4).run(in_replicas, way)):
        x, place = whole((4, 2), rank % 2), rank // 2
        total, first = 2.0 * (rank % 2) + 2.0, 1.0 - place
        expected = [x[2 * place : 2 * place + 2], x, torch.tensor([total]), torch.tensor([first])]

        assert (2, place) == (size, member)
        assert all(torch.equal(e, v) for e, v in zip(expected, values, strict=True))


def message_of(run: Callable[[], object]) -> str:
    try:
        run()
    except PlanError as error:
        return str(error)
    return ""


def as_outsider(rank: int, world: int) -> str:
    group = dist.new_group([0])
    return message_of(lambda: resolve_group(None, group=group))


def test_an_outsider_is_told_so(pool: Pools) -> None:
    inside, outside = pool(2).run(as_outsider)

    assert inside == ""
    assert "world rank 1 of 2 is not a member of the given group" in outside


def wrong_size(rank: int, world: int) -> str:
    return message_of(lambda: resolve_group(3))


def test_tp_unlike_the_world_is_refused_on_every_rank(pool: Pools) -> None:
    for message in pool(2).run(wrong_size):
        assert "tp is 3, but the group has 2 members" in message


def compared(rank: int, world: int, texts: list[str]) -> str:
    group = resolve_group(world)
    return message_of(lambda: require_agreement(group, texts[rank], "the plan"))


@pytest.mark.parametrize(
    ("texts", "odd"),
    [(["a", "a", "b"], [2]), (["b", "a", "a"], [0]), (["a", "b", "c"], [1, 2])],
)
def test_ranks_that_disagree_all_say_the_same(
    pool: Pools, texts: list[str], odd: list[int]
) -> None:
    first, *others = pool(3).run(compared, texts)

    assert f"the plan is not the same on all 3 ranks: {3 - len(odd)} have the hash " in first
    assert f"but ranks {odd} have " in first
    assert [first, first] == others


def test_ranks_that_agree_say_nothing(pool: Pools) -> None:
    assert ["", "", ""] == pool(3).run(compared, ["a", "a", "a"])
