"""Costs: the figures that the articles on tensor parallelism give, and exactness."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotp.cost.collectives import (
    count_dtype_bytes,
    count_wire_bytes,
    estimate_memory_bytes,
    estimate_time_ps,
)
from autotp.cost.machine import Link, Machine, load_machine
from autotp.errors import PlanError

H100 = load_machine("h100", Path(__file__).parents[2] / "rules")
PAYLOAD = 4096 * 2048 * 2  # hidden 4096, sequence 2048, batch 1, bfloat16
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def _machine(bytes_per_second: int) -> Machine:
    link = Link("plain", 0, bytes_per_second, 1 << 20)
    return Machine("plain", "", (link,))


def test_the_payload_of_one_block_is_16_8_megabytes() -> None:
    assert 16.8 == round(PAYLOAD / 1e6, 1)


def test_a_ring_of_two_sends_the_payload_once() -> None:
    assert PAYLOAD == count_wire_bytes("all_reduce", PAYLOAD, 2)


def test_128_all_reduces_send_4_3_gigabytes_in_the_limit_of_many_ranks() -> None:
    sent = 128 * count_wire_bytes("all_reduce", PAYLOAD, 1 << 20)

    assert 4.3 == round(sent / 1e9, 1)


@pytest.mark.parametrize(("gigabytes", "milliseconds"), [(600, 7.2), (50, 85.9)])
def test_128_all_reduces_take_the_time_of_their_bytes(gigabytes: int, milliseconds: float) -> None:
    taken = 128 * estimate_time_ps("all_reduce", PAYLOAD, 1 << 20, _machine(gigabytes * 10**9))

    assert milliseconds == round(taken / 1e9, 1)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_one_pass_sends_all_but_a_ranks_own_part(kind: str) -> None:
    assert 750 == count_wire_bytes(kind, 1000, 4)
    assert 751 == count_wire_bytes(kind, 1001, 4)


def test_latency_and_bytes_add_up_on_the_link_of_the_group() -> None:
    moving = -(-PAYLOAD * 7 * 10**12 // (8 * 450 * 10**9))

    assert 10_000_000 + moving == estimate_time_ps("all_gather", PAYLOAD, 8, H100)


def test_crossing_nodes_costs_more() -> None:
    assert 5 * estimate_time_ps("all_reduce", PAYLOAD, 8, H100) < estimate_time_ps(
        "all_reduce", PAYLOAD, 16, H100
    )


@given(payload=st.integers(0, 1 << 50), tp=st.integers(1, 4096))
def test_an_all_reduce_is_exactly_a_reduce_scatter_and_an_all_gather(payload: int, tp: int) -> None:
    halves = ("reduce_scatter", "all_gather")

    assert count_wire_bytes("all_reduce", payload, tp) == sum(
        count_wire_bytes(k, payload, tp) for k in halves
    )
    assert estimate_time_ps("all_reduce", payload, tp, H100) == sum(
        estimate_time_ps(k, payload, tp, H100) for k in halves
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing(kind: str) -> None:
    assert (0, 0) == (count_wire_bytes(kind, PAYLOAD, 1), estimate_time_ps(kind, PAYLOAD, 1, H100))


def test_seven_billion_parameters_train_in_56_gigabytes() -> None:
    memory = estimate_memory_bytes({"bfloat16": 14 * 10**9})

    assert {"parameters": 14 * 10**9, "gradients": 14 * 10**9, "optimizer": 28 * 10**9} == memory


def test_two_ranks_halve_all_of_it() -> None:
    memory = estimate_memory_bytes({"bfloat16": 7 * 10**9})

    assert 28 * 10**9 == sum(memory.values())


def test_float32_states_with_a_master_copy_are_16_bytes_a_parameter() -> None:
    memory = estimate_memory_bytes({"bfloat16": 14 * 10**9}, state_dtype="float32")

    assert 112 * 10**9 == sum(memory.values())


@pytest.mark.parametrize(
    ("optimizer", "states"), [("adamw", 800), ("sgd-momentum", 400), ("sgd", 0)]
)
def test_each_optimizer_keeps_its_states(optimizer: str, states: int) -> None:
    assert states == estimate_memory_bytes({"float32": 400}, optimizer)["optimizer"]


def test_plain_sgd_keeps_no_master_copy() -> None:
    assert 0 == estimate_memory_bytes({"bfloat16": 400}, "sgd", "float32")["optimizer"]


def test_inference_keeps_parameters_only() -> None:
    memory = estimate_memory_bytes({"float32": 400}, training=False)

    assert {"parameters": 400, "gradients": 0, "optimizer": 0} == memory


def test_dtypes_go_by_either_name() -> None:
    assert (2, 2) == (count_dtype_bytes("bfloat16"), count_dtype_bytes("torch.bfloat16"))


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(
        PlanError, match="'adam' is unknown. The known optimizers are adamw, sgd-momentum, sgd"
    ):
        estimate_memory_bytes({"float32": 4}, "adam")
    with pytest.raises(PlanError, match="'float7' has no known size. The known dtypes are bool"):
        count_dtype_bytes("float7")
