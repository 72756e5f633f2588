"""Arguments that no plan can have, and calls that no graph can answer: one error each, in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import AutotpError, CaptureError, PlanError
from autotp.model_source import load

X = {"x": torch.ones(2, 5, 24)}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


def refusal(act: Callable[[], object], kind: type[AutotpError] = PlanError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overrides": {"up": None}}, "'up' asks for None"),
        ({"overrides": {"up": 5}}, "'up' asks for 5"),
        ({"overrides": {5: "row"}}, "overrides: its key 5 is no name"),
        ({"overrides": None}, "overrides: is of type NoneType"),
        ({"example_inputs": {0: X["x"]}}, "example_inputs: its key 0 is no name"),
        ({"example_inputs": {"x": np.ones((2, 5, 24))}}, "Pass torch.as_tensor(x)"),
        ({"shard_threshold": "a"}, "shard_threshold: is 'a'"),
        ({"shard_threshold": float("nan")}, "shard_threshold: is nan"),
        ({"state_dtype": 5}, "state_dtype: is of type int"),
        ({"reduce_dtype": 5}, "reduce_dtype: 5 is no dtype"),
        ({"reduce_dtype": "int8"}, "reduce_dtype: 'int8' holds no sums"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype: torch.int32 holds no sums"),
        ({"reduce_dtype": "float8_e4m3fn"}, "reduce_dtype: 'float8_e4m3fn' holds no sums"),
        ({"reduce_dtype": "bfloat16"}, "bfloat16 does not hold all values of float32, which up.w"),
        ({"machine": 5}, "machine: is of type int"),
        ({"optimizer": 5}, "optimizer: is of type int"),
        ({"training": "yes"}, "training: is of type str"),
    ],
)
def test_options_of_a_wrong_kind(options: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda: autotp.plan(Mlp(), 2, **{"example_inputs": X, **options}))


def test_a_state_dtype_may_be_one_of_torch() -> None:
    plan = autotp.plan(Mlp(), 2, example_inputs=X, state_dtype=torch.float64)

    assert "float64" == plan.options["state_dtype"]


@pytest.mark.parametrize("rank", [1.0, "a", True])
def test_a_rank_is_a_whole_number(rank: Any) -> None:
    assert f"rank={rank!r}" in refusal(
        lambda: autotp.parallelize(Mlp(), 2, rank=rank, example_inputs=X)
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
    assert said in refusal(lambda: autotp.verify(Mlp(), 2, example_inputs=X, **keywords))


@pytest.mark.parametrize("model", ["gpt2", None])
def test_what_is_no_module_has_no_parts(model: Any) -> None:
    assert "parallelize was given" in refusal(lambda: autotp.parallelize(model, 1))
    assert "verify was given" in refusal(lambda: autotp.verify(model, 2))


def test_a_part_of_a_model_has_no_plan() -> None:
    sharded = autotp.parallelize(Mlp(), 1, example_inputs=X)

    assert "is sharded already" in refusal(lambda: autotp.plan(sharded, 2, example_inputs=X))


def test_plans_are_read_from_text_and_refused_shortly() -> None:
    plan = autotp.plan(Mlp(), 2, example_inputs=X)
    text = plan.to_json()
    odd = text.replace('"gap": 0.0', '"gap": NaN')
    read: Any = autotp.Plan.from_json

    assert plan.parameters == autotp.plan(Mlp(), 2, example_inputs=X, plan=text).parameters
    assert "NaN is no finite number" in refusal(lambda: read(odd))
    assert "1e999 is no finite number" in refusal(lambda: read(odd.replace("NaN", "1e999")))
    assert "plan: is of type bytes" in refusal(lambda: read(text.encode()))
    assert 200 > len(refusal(lambda: autotp.plan(Mlp(), 2, example_inputs=X, plan="x" * 3000)))


def test_a_factory_gives_a_module_or_a_pair(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "three.py").write_text("def made():\n    return 1, 2, 3\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert "the factory returned 3 values" in refusal(lambda: load("three:made"))


class Starred(Mlp):
    def forward(self, *xs: Tensor) -> Tensor:
        return super().forward(xs[0])


@pytest.mark.parametrize("name", ["x", "xs"])
def test_inputs_without_names_are_told(name: str) -> None:
    inputs = {name: X["x"]}
    message = refusal(lambda: autotp.plan(Starred(), 2, example_inputs=inputs), CaptureError)

    assert "takes *xs, and inputs without names are not supported" in message


class Capped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16, max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_a_table_that_is_written_to_gets_true_advice() -> None:
    inputs = {"ids": torch.zeros(2, 3, dtype=torch.int64)}
    message = refusal(lambda: autotp.plan(Capped().eval(), 2, example_inputs=inputs), CaptureError)

    assert "max_norm" in message
    assert "eval()" not in message


class Recurrent(nn.Module):
    """Keeps the last words' values on itself, as recurrent models without a cache object do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(24, 48), nn.Linear(48, 24), None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        y = self.up(x)
        if use_cache:
            y = y + self.last if self.last is not None else y
            self.last = y[:, -1:]
        return self.down(y)


def test_state_that_a_module_keeps_by_itself_is_refused_and_not_lost() -> None:
    kept = {"x": torch.ones(2, 5, 24), "use_cache": True}

    said = refusal(lambda: autotp.plan(Recurrent(), 2, example_inputs=kept), CaptureError)

    assert "the model keeps last, a tensor" in said
    assert "use_cache=False" in said
    assert autotp.plan(Recurrent(), 2, example_inputs=kept | {"use_cache": False}).tp == 2
