"""Options that no plan can have: one error each, which says what was given and what to give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import autotp
from autotp.errors import AutotpError, PlanError
from tests.toys import MLP

X = {"x": torch.ones(2, 5, 24)}


def refusal(act: Callable[[], object], kind: type[AutotpError] = PlanError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overrides": {"up": None}}, "'up' asks for None"),
        ({"overrides": {"up": 5}}, "'up' asks for 5"),
        ({"overrides": {5: "row"}}, "overrides: its key 5 is not a name"),
        ({"overrides": None}, "overrides: is of type NoneType"),
        ({"example_inputs": {0: X["x"]}}, "example_inputs: its key 0 is not a name"),
        ({"example_inputs": {"x": np.ones((2, 5, 24))}}, "Pass torch.as_tensor(x)"),
        ({"shard_threshold": "a"}, "shard_threshold: is 'a'"),
        ({"shard_threshold": float("nan")}, "shard_threshold: is nan"),
        ({"state_dtype": 5}, "state_dtype: is of type int"),
        ({"reduce_dtype": 5}, "reduce_dtype: 5 is not a dtype"),
        ({"reduce_dtype": "int8"}, "reduce_dtype: 'int8' cannot be summed in"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype: torch.int32 cannot be summed in"),
        ({"reduce_dtype": "float8_e4m3fn"}, "reduce_dtype: 'float8_e4m3fn' cannot be summed in"),
        (
            {"reduce_dtype": "bfloat16"},
            "bfloat16 cannot represent all values of float32, the dtype of up.w",
        ),
        ({"machine": 5}, "machine: is of type int"),
        ({"optimizer": 5}, "optimizer: is of type int"),
        ({"training": "yes"}, "training: is of type str"),
    ],
)
def test_options_of_a_wrong_kind(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: autotp.plan(MLP(24, 48), 2, **{"example_inputs": X, **options}))


def test_a_state_dtype_may_be_one_of_torch() -> None:
    plan = autotp.plan(MLP(24, 48), 2, example_inputs=X, state_dtype=torch.float64)

    assert "float64" == plan.options["state_dtype"]


@pytest.mark.parametrize("rank", [1.0, "a", True])
def test_a_rank_is_an_integer(rank: Any) -> None:
    assert f"rank={rank!r}" in refusal(
        lambda: autotp.parallelize(MLP(24, 48), 2, rank=rank, example_inputs=X)
    )


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"seed": "a"}, "seed='a'"),
        ({"gradients": True, "training": False}, "gradients=True and training=False"),
    ],
)
def test_what_cannot_be_verified(keywords: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: autotp.verify(MLP(24, 48), 2, example_inputs=X, **keywords))


@pytest.mark.parametrize("model", ["gpt2", None])
def test_what_is_not_a_module_cannot_be_sharded(model: Any) -> None:
    assert "parallelize was given" in refusal(lambda: autotp.parallelize(model, 1))
    assert "verify was given" in refusal(lambda: autotp.verify(model, 2))


def test_a_shard_of_a_model_has_no_plan() -> None:
    sharded = autotp.parallelize(MLP(24, 48), 1, example_inputs=X)

    assert "is sharded already" in refusal(lambda: autotp.plan(sharded, 2, example_inputs=X))


def test_plans_are_read_from_text_and_refused_shortly() -> None:
    plan = autotp.plan(MLP(24, 48), 2, example_inputs=X)
    text = plan.to_json()
    odd = text.replace('"gap": 0.0', '"gap": NaN')
    read: Any = autotp.Plan.from_json

    assert plan.parameters == autotp.plan(MLP(24, 48), 2, example_inputs=X, plan=text).parameters
    assert "NaN is not a finite number" in refusal(lambda: read(odd))
    assert "1e999 is not a finite number" in refusal(lambda: read(odd.replace("NaN", "1e999")))
    assert "plan: it is of type bytes" in refusal(lambda: read(text.encode()))
    assert 200 > len(
        refusal(lambda: autotp.plan(MLP(24, 48), 2, example_inputs=X, plan="x" * 3000))
    )
