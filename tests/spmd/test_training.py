"""What conjugates are for: right gradients in training, beside the naive twins that go wrong."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives
from torch import Tensor, fx, nn
from torch.nn.functional import embedding, linear

from autotp.algebra.split import block
from autotp.runtime.group.process_group import find_rank, find_size, resolve_group
from autotp.runtime.ops import library as conjugates
from autotp.runtime.ops.blocks import concatenate_shards, slice_block
from tests.spmd.placed import whole
from tests.spmd.pool import Pool
from tests.spmd.tally import Tally

Pools = Callable[[int], Pool]

OPS = torch.ops.autotp
RAW = torch.ops._c10d_functional
assert conjugates.LIBRARY.ns == "autotp"


def raw_reduce(x: Tensor, group: str) -> Tensor:
    return RAW.wait_tensor(RAW.all_reduce(x, "sum", group))


def gradient_of_replicated_loss(rank: int, world: int, raw: bool) -> Tensor:
    x = torch.full((3,), float(rank), requires_grad=True)
    reduce = raw_reduce if raw else OPS.reduce
    reduce(x, resolve_group(world).name).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_replicated_loss_is_not_scaled_by_tp(pool: Pools, world: int) -> None:
    for gradient in pool(world).run(gradient_of_replicated_loss, False):
        assert torch.equal(torch.ones(3), gradient)


def test_the_raw_all_reduce_scales_it(pool: Pools) -> None:
    for gradient in pool(2).run(gradient_of_replicated_loss, True):
        assert torch.equal(torch.full((3,), 2.0), gradient)


def naive_keep_first(x: Tensor, group: str) -> Tensor:
    return x * (find_rank(group) == 0)


def trained_row_linear(rank: int, world: int, naive: bool) -> tuple[Tensor, Tensor]:
    keep_first = naive_keep_first if naive else OPS.keep_first
    return trained(rank, world, keep_first, resolve_group(world).name)


def trained(
    rank: int, world: int, keep_first: Callable[[Tensor, str], Tensor], group: str
) -> tuple[Tensor, Tensor]:
    """Weight part and bias of a row-parallel linear after three AdamW steps."""
    weight = nn.Parameter(slice_block(whole((5, 12), 1) / 10, 1, block(12), rank, world).clone())
    bias = nn.Parameter(whole((5,), 2) / 10)
    optimizer = torch.optim.AdamW([weight, bias], lr=0.1)
    for step in range(3):
        x = slice_block(whole((4, 12), 10 + step), 1, block(12), rank, world)
        y = OPS.reduce(linear(x, weight, keep_first(bias, group)), group)
        optimizer.zero_grad()
        (y - whole((4, 5), 20 + step)).square().mean().backward()
        optimizer.step()
    return weight.detach(), bias.detach()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_row_parallel_bias_stays_equal_over_three_steps(pool: Pools, world: int) -> None:
    weight, bias = trained(0, 1, OPS.keep_first, resolve_group(1).name)
    weights, biases = zip(*pool(world).run(trained_row_linear, False), strict=True)

    assert all(torch.equal(biases[0], other) for other in biases)
    torch.testing.assert_close(biases[0], bias)
    torch.testing.assert_close(concatenate_shards(weights, 1, block(12)), weight)


def test_a_naive_bias_drifts(pool: Pools) -> None:
    biases = [bias for _, bias in pool(2).run(trained_row_linear, True)]

    assert (biases[0] - biases[1]).abs().max() > 0.01


def shared_gradients(rank: int, world: int, dtype: torch.dtype | None) -> tuple[list[Tensor], int]:
    w = whole((3, 2), 1).requires_grad_()
    unused = whole((4,), 2).requires_grad_()
    narrow = whole((2,), 3).float().requires_grad_()
    frozen = whole((2,), 4).half()
    xs = OPS.share_gradients(
        [w, frozen, unused, narrow], [[]] * 4, resolve_group(world).name, dtype=dtype
    )
    assert [w.data_ptr(), frozen.data_ptr()] == [xs[0].data_ptr(), xs[1].data_ptr()]
    loss = (xs[0] * (rank + 1)).t().sum() + (xs[1] * xs[3]).sum() * rank
    with Tally() as tally:
        loss.backward()
    gradients = [w.grad, unused.grad, narrow.grad]
    assert frozen.grad is None
    return [g for g in gradients if g is not None], tally.kinds.total()


@pytest.mark.parametrize(("dtype", "buckets"), [(None, 2), (torch.float64, 1)])
def test_shared_gradients_take_one_all_reduce_a_dtype(
    pool: Pools, dtype: torch.dtype | None, buckets: int
) -> None:
    expected = [
        torch.full((3, 2), 6.0).double(),
        torch.zeros(4).double(),
        3 * whole((2,), 4).float(),
    ]
    for gradients, seen in pool(3).run(shared_gradients, dtype):
        assert buckets == seen
        for wanted, gradient in zip(expected, gradients, strict=True):
            assert wanted.dtype == gradient.dtype
            assert torch.equal(wanted, gradient)


def without_gradients(rank: int, world: int) -> int:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    OPS.share_gradients([x], [[]], resolve_group(world).name)
    with Tally() as tally:
        y.sum().backward()
    assert x.grad is None
    return tally.kinds.total()


def test_shared_gradients_that_nobody_wants_cost_nothing(pool: Pools) -> None:
    assert [0, 0] == pool(2).run(without_gradients)


def looked_up(rank: int, world: int) -> tuple[Tensor, Tensor]:
    group, table = resolve_group(world).name, whole((12, 3), 1)
    local = slice_block(table, 0, block(12), rank, world).clone().requires_grad_()
    index, outside = OPS.local_index(torch.tensor([[0, 11, 5], [6, 3, 3]]), 12, group)
    rows = embedding(index, local).masked_fill(outside[..., None], 0.0)
    y = OPS.reduce(rows, group)
    y.backward(whole((2, 3, 3), 2))
    assert local.grad is not None
    return y.detach(), local.grad


def looked_up_in_vain(rank: int, world: int) -> list[str]:
    """What a lookup of ids that no rank has says, and what one of ids that stand for none gives."""
    group, found = resolve_group(world).name, list[str]()
    local = slice_block(whole((12, 3), 1), 0, block(12), rank, world)
    for ids in ([0, 12], [-1, 3], [1200, 11]):
        index, _ = OPS.local_index(torch.tensor(ids), 12, group)
        with pytest.raises(IndexError) as caught:
            embedding(index, local)
        found.append(str(caught.value))
    index, outside = OPS.local_index(torch.tensor([-1, 12]), 12, group, True)
    return [*found, str(embedding(index, local)[~outside].tolist())]


def test_an_id_that_no_rank_has_is_an_error_on_all(pool: Pools) -> None:
    for said in pool(3).run(looked_up_in_vain):
        assert ["index out of range in self"] * 3 + ["[]"] == said


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_lookup_split_along_the_vocabulary(pool: Pools, world: int) -> None:
    table = whole((12, 3), 1).requires_grad_()
    expected = embedding(torch.tensor([[0, 11, 5], [6, 3, 3]]), table)
    expected.backward(whole((2, 3, 3), 2))
    values, gradients = zip(*pool(world).run(looked_up), strict=True)

    assert table.grad is not None
    assert all(torch.equal(expected, value) for value in values)
    assert torch.equal(table.grad, concatenate_shards(gradients, 0, block(12)))


def mlp(x: Tensor, up: Tensor, down: Tensor, group: str) -> Tensor:
    """A column-parallel and a row-parallel product, and a gather and scatter of what is between."""
    split = block(-1).encode()
    local = (OPS.copy(x, group) @ up).relu()
    between = OPS.gather(local, 1, split, group)
    return OPS.reduce(OPS.scatter(between, 1, split, group) @ down, group)


def mlp_results(rank: int, world: int, way: str, group: str) -> list[Tensor]:
    up = slice_block(whole((4, 12), 2), 1, block(12), rank, world).clone().requires_grad_()
    down = slice_block(whole((12, 4), 3), 0, block(12), rank, world).clone().requires_grad_()
    results: list[Tensor] = []
    for rows in (3, 5):
        x = whole((rows, 4), rows).requires_grad_()
        y = WAYS[way](group)(x, up, down)
        results += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, up, down])]
    return results


def copied_graph(group: str) -> Callable[..., Tensor]:
    module = fx.symbolic_trace(mlp, concrete_args={"group": group})
    return lambda *args: copy.deepcopy(module)(*args, group)


def compiled(group: str) -> Callable[..., Tensor]:
    run = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    return lambda *args: run(*args, group)


def eager(group: str) -> Callable[..., Tensor]:
    return lambda *args: mlp(*args, group)


WAYS = {"eager": eager, "compiled": compiled, "copied graph": copied_graph}
COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


def mlp_in_process(rank: int, world: int, way: str) -> list[Tensor]:
    return mlp_results(rank, world, way, resolve_group(world).name)


@pytest.mark.parametrize("way", [COMPILED, "copied graph"])
def test_one_process_computes_the_same_every_way(way: str) -> None:
    group = resolve_group(1).name
    pairs = zip(mlp_results(0, 1, "eager", group), mlp_results(0, 1, way, group), strict=True)

    assert all(torch.equal(expected, actual) for expected, actual in pairs)


@pytest.mark.parametrize("way", ["eager", COMPILED, "copied graph"])
def test_two_processes_compute_what_one_does(pool: Pools, way: str) -> None:
    expected = mlp_results(0, 1, "eager", resolve_group(1).name)
    first, second = pool(2).run(mlp_in_process, way)
    for k, whole_result in enumerate(expected):
        dim = {2: 1, 3: 0}.get(k % 4)
        joined = (
            first[k] if dim is None else concatenate_shards([first[k], second[k]], dim, block(12))
        )

        assert torch.equal(whole_result, joined)


def shapes_without_data(rank: int, world: int) -> list[tuple[int, ...]]:
    group, split = resolve_group(world).name, block(12).encode()
    x = torch.empty(3, 12, device="meta")
    local = OPS.scatter(x, 1, split, group)
    results = [
        local,
        OPS.gather(local, 1, split, group),
        OPS.reduce_scatter(x, 1, split, group),
        OPS.exchange(local, 1, split, 0, block(3).encode(), group)
        if find_size(group) == 3
        else local,
        OPS.reduce(x, group),
    ]
    return [tuple(result.shape) for result in results]


def test_shapes_propagate_on_meta_tensors(pool: Pools) -> None:
    expected = [(3, 4), (3, 12), (3, 4), (1, 12), (3, 12)]

    assert [expected] * 3 == pool(3).run(shapes_without_data)
