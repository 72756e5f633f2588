"""Laws of the dim algebra on random refinements, and the fused layouts of real models in print."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.algebra.partition import Part, Partition
from autotp.algebra.size import Size, product
from autotp.algebra.split import Split, segment
from autotp.runtime.ops.blocks import slice_block
from tests.analysed import Analysed, analysed, family

FACTORS = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "split", "unify"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 150),
    ),
    max_size=8,
)


def dims_of(forest: Forest, sizes: list[int]) -> Dim:
    return tuple(atom for n in sizes for atom in forest.add_dim(Size(n)))


def total(forest: Forest, dim: Dim) -> int:
    return forest.size(dim).coefficient


def alone(axis: Atom) -> Partition:
    return Partition((Part(axis.name),))


@dataclass
class Refined:
    """Four dims of one size, refined step by step; what came of each step."""

    forest: Forest
    dims: list[Dim]
    made: list[object] = field(default_factory=list)

    def step(self, kind: str, i: int, j: int, number: int) -> None:
        one, other = self.dims[i], self.dims[j]
        size = total(self.forest, one)
        if kind == "cut":
            self.made.append(self.forest.split_at(one, number % (size + 1)))
        elif kind == "split":
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            self.made.append(self.forest.split_dim(one, Size(divisors[number % len(divisors)])))
        else:
            self.made.append(self.forest.unify(one, other))


def refined(orders: list[list[int]], steps: list[tuple[str, int, int, int]]) -> Refined:
    forest = Forest()
    found = Refined(forest, [dims_of(forest, sizes) for sizes in orders])
    for step in steps:
        found.step(*step)
    return found


ORDERS = FACTORS.flatmap(lambda sizes: st.lists(st.permutations(sizes), min_size=4, max_size=4))


@given(ORDERS, STEPS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_refinement_changes_a_size(
    orders: list[list[int]], steps: list[tuple[str, int, int, int]]
) -> None:
    found = refined(orders, steps)

    assert [math.prod(sizes) for sizes in orders] == [total(found.forest, d) for d in found.dims]


@given(ORDERS, STEPS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_united_dims_are_one_expression(
    orders: list[list[int]], steps: list[tuple[str, int, int, int]]
) -> None:
    found = refined(orders, steps)
    one, other = found.dims[0], found.dims[1]
    united = found.forest.unify(one, other)

    assert not united or found.forest.flatten(one) == found.forest.flatten(other)


@given(ORDERS, STEPS, st.integers(0, 150))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_cut_has_the_two_sizes_asked_for(
    orders: list[list[int]], steps: list[tuple[str, int, int, int]], number: int
) -> None:
    found = refined(orders, steps)
    size = total(found.forest, found.dims[0])
    offset = number % (size + 1)
    halves = found.forest.split_at(found.dims[0], offset)

    assert halves is None or [offset, size - offset] == [total(found.forest, h) for h in halves]


@given(ORDERS, STEPS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_shares_of_all_ranks_partition_a_covered_dim(
    orders: list[list[int]], steps: list[tuple[str, int, int, int]]
) -> None:
    forest, dims = (found := refined(orders, steps)).forest, found.dims
    for dim in dims:
        for axis in set(forest.list_leaves(dim)):
            split, size = forest.split(dim, alone(axis)), axis.size.coefficient
            for tp in (n for n in (2, 3) if size >= n):
                if split is None or not split.is_exact(tp):
                    continue
                held = [
                    k
                    for rank in range(tp)
                    for start, stop in split.ranges(rank, tp)
                    for k in range(start, stop)
                ]

                assert list(range(total(forest, dim))) == sorted(held)


@given(ORDERS, STEPS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ranges_are_the_elements_that_a_rank_takes(
    orders: list[list[int]], steps: list[tuple[str, int, int, int]]
) -> None:
    forest, dims = (found := refined(orders, steps)).forest, found.dims
    for axis in set(forest.list_leaves(dims[0])):
        split = forest.split(dims[0], alone(axis))
        if split is not None and axis.size.coefficient > 1:
            whole = torch.arange(total(forest, dims[0]))
            ranges = split.ranges(1, 2)
            held = [k for start, stop in ranges for k in range(start, stop)]

            assert held == slice_block(whole, 0, split, 1, 2).tolist()
            assert len(held) == split.local_length(1, 2)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────


def test_equal_sizes_unite_and_divisible_ones_split() -> None:
    forest = Forest()
    one, other = dims_of(forest, [12, 2]), dims_of(forest, [4, 6])

    assert forest.unify(one, other)
    assert "4*3*2" == forest.format(one) == forest.format(other)


def test_sizes_that_do_not_divide_do_not_unite() -> None:
    forest = Forest()

    assert not forest.unify(dims_of(forest, [2, 3]), dims_of(forest, [3, 2]))


def test_refinement_reaches_dims_that_were_there_before() -> None:
    forest = Forest()
    early, late = forest.add_dim(Size(24)), forest.add_dim(Size(24))
    forest.unify(early, late)
    forest.split_dim(late, Size(4))
    forest.split_at(late, 8)

    assert "(2 + 4)*4" == forest.format(early)


def test_symbols_are_divided_but_never_ordered() -> None:
    forest = Forest()
    both = forest.add_dim(Size(8, ("s0",)))
    parts = (*forest.add_dim(Size(1, ("s0",)), data=True), *forest.add_dim(Size(8)))

    assert forest.unify(both, parts)
    assert "s0*8" == forest.format(both)
    assert not forest.unify(forest.add_dim(Size(1, ("s0",))), forest.add_dim(Size(1, ("s1",))))
    assert forest.split_at(forest.add_dim(Size(1, ("s0",))), 3) is None


def test_a_data_size_marks_what_it_unites_with() -> None:
    forest = Forest()
    data, plain = forest.add_dim(Size(6), data=True), forest.add_dim(Size(6))
    forest.unify(plain, data)

    assert all(atom.data for atom in forest.list_leaves(plain))


def test_sums_cut_at_the_same_places_unite_segment_by_segment() -> None:
    forest = Forest()
    one, other = forest.add_dim(Size(12)), forest.add_dim(Size(12))
    forest.split_at(one, 4)
    forest.split_at(other, 6)

    assert forest.unify(one, other)
    assert "(4 + 2 + 6)" == forest.format(one) == forest.format(other)


def test_a_dim_that_some_segments_lack_is_not_covered() -> None:
    forest = Forest()
    heads, size = forest.add_dim(Size(4)), forest.add_dim(Size(2))
    fused = (forest.make_sum([heads + size, forest.add_dim(Size(6))]),)

    assert forest.contains(fused, heads[0])
    split = forest.split(fused, alone(heads[0]))
    assert Split(1, (segment(1, 4, 2), segment(1, 0, 6))) == split
    assert not split.is_exact(2)


def test_an_axis_in_two_factors_of_one_dim_has_no_split() -> None:
    forest = Forest()
    axis = forest.add_dim(Size(4))

    assert forest.split(axis + axis, alone(axis[0])) is None


def test_size_one_is_the_empty_product() -> None:
    forest = Forest()

    assert () == forest.add_dim(Size(1))
    assert "1" == forest.format(())
    assert Size(1) == product([])


# ── fused layouts of real models ─────────────────────────────────────────────────────────────────


def printed(found: Analysed, name: str, dim: int, names: dict[int, str]) -> str:
    """A dim with atoms called by their sizes' names."""
    forest = found.analysis.forest
    atoms = {atom: names[n] for atom in _static(forest) if (n := atom.size.coefficient) in names}
    return forest.format(found.dims(name)[dim], atoms)


def _static(forest: Forest) -> list[Atom]:
    return [atom for atom in forest.atoms if atom.size.static is not None]


# hidden 64; rotary embeddings cut the head size d of queries and keys into halves r
LAYOUTS = {
    "q, k, v one after the other": (
        ("gpt2", {"n_head": 4}, "transformer.h.0.attn.c_attn.weight", 1),
        {4: "H", 16: "d"},
        "(H*d + H*d + H*d)",
    ),
    "q, k, v head by head": (
        ("bloom", {"n_head": 4}, "transformer.h.0.self_attention.query_key_value.weight", 0),
        {4: "H", 16: "d"},
        "H*3*d",
    ),
    "q, k, v head by head, cut by chunk": (
        (
            "gpt_neox",
            {
                "num_attention_heads": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                },
            },
            "gpt_neox.layers.0.attention.query_key_value.weight",
            0,
        ),
        {4: "H", 16: "d", 8: "r"},
        "H*(r + r + r + r + d)",
    ),
    "unequal segments": (
        (
            "phi3",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            "model.layers.0.self_attn.qkv_proj.weight",
            0,
        ),
        {2: "kv", 3: "g", 16: "d", 8: "r"},
        "(kv*g*(r + r) + kv*(r + r) + kv*d)",
    ),
    "gate and up": (
        ("phi3", {}, "model.layers.0.mlp.gate_up_proj.weight", 0),
        {128: "f"},
        "(f + f)",
    ),
    "grouped heads": (
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            "model.layers.0.self_attn.q_proj.weight",
            0,
        ),
        {2: "kv", 3: "g", 16: "d", 8: "r"},
        "kv*g*(r + r)",
    ),
    "the heads that the output contracts": (
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            "model.layers.0.self_attn.o_proj.weight",
            1,
        ),
        {2: "kv", 3: "g", 16: "d", 8: "r"},
        "kv*g*d",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_layouts_print_as_they_are_written(layout: str) -> None:
    (model, overrides, name, dim), names, expected = LAYOUTS[layout]
    found = family(model, **overrides)

    assert expected == printed(found, name, dim, names)


class OneKeyForAll(nn.Module):
    """Many query heads over one key and one value head, projected in one."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(96, 8 * 16), nn.Linear(6 * 16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.fused(x).view(x.shape[0], x.shape[1], 8, 16)
        q, k, v = (part.transpose(1, 2) for part in fused.split([6, 1, 1], dim=2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_one_key_for_all_heads_prints_as_it_is_written() -> None:
    found = analysed(OneKeyForAll(), {"x": torch.randn(2, 5, 96)})

    assert "(H + 1 + 1)*d" == printed(found, "fused.weight", 0, {6: "H", 16: "d"})
