"""Bad input through the public interface: one message each: where, what, and what to do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotp
from autotp.cli.main import main
from autotp.errors import AutotpError, CaptureError, PlanError, UnknownOpError
from autotp.records.plan import Plan
from tests.models import build
from tests.toys import MLP


@pytest.fixture(scope="module")
def hand() -> tuple[nn.Module, dict[str, Any]]:
    return build("hand", layers=1)


@pytest.fixture(scope="module")
def plan(hand: tuple[nn.Module, dict[str, Any]]) -> Plan:
    return autotp.plan(hand[0], 2, example_inputs=hand[1])


Hand = tuple[nn.Module, dict[str, Any]]


def message_of(error: type[AutotpError], run: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        run()
    return str(raised.value)


def says(message: str, *parts: str) -> None:
    """Asserts that a message has all `parts`, in this order: where, what, what to do."""
    places = [message.find(part) for part in parts]

    assert all(place >= 0 for place in places), message
    assert places == sorted(places), message


# ── the number of ranks ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", [autotp.plan, autotp.parallelize, autotp.verify])
@pytest.mark.parametrize("tp", [0, -1, "2", True])
def test_tp_must_be_a_number_of_ranks(hand: Hand, call: Callable[..., object], tp: Any) -> None:
    message = message_of(PlanError, lambda: call(hand[0], tp, example_inputs=hand[1]))

    says(message, "tp", repr(tp), "must be the number of ranks, 1 or more")


@pytest.mark.slow
def test_tp_larger_than_every_axis_gives_a_plan_that_says_which_would(hand: Hand) -> None:
    plan = autotp.plan(hand[0], 1024, example_inputs=hand[1])
    notes = {pair.role: pair.note for pair in plan.pairs}

    assert notes["attention"] == "heads (8): too few for tp 1024; tp sizes that split it: 2 to 8"
    assert notes["mlp"] == "ffn (128): too few for tp 1024; tp sizes that split it: 2 to 128"
    assert not any(pair.split for pair in plan.pairs)
    assert "100 % of the parameter bytes are replicated on every rank" in plan.warnings[0]


@pytest.mark.slow
def test_tp_larger_than_every_axis_is_refused_when_strict(hand: Hand) -> None:
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], 1024, example_inputs=hand[1], strict=True)
    )

    says(
        message,
        "HandGPT",
        "100 % of the parameter bytes are replicated on every rank",
        "Choose a smaller tp",
    )


def test_without_processes_the_line_that_starts_them_is_told(hand: Hand) -> None:
    message = message_of(PlanError, lambda: autotp.parallelize(hand[0], 4, example_inputs=hand[1]))

    says(message, "tp is 4", "no process group", "torchrun --nproc-per-node 4")


@pytest.mark.slow
def test_a_rank_without_processes_is_to_look_at(hand: Hand) -> None:
    sharded = autotp.parallelize(hand[0], 2, rank=1, example_inputs=hand[1])
    message = message_of(PlanError, lambda: sharded(**hand[1]))

    says(
        message,
        "HandGPT: rank 1 of 2 was called",
        "no process group",
        "torchrun --nproc-per-node 2",
    )


@pytest.mark.slow
def test_a_plan_without_training_cannot_train(hand: Hand) -> None:
    sharded = autotp.parallelize(hand[0], 2, rank=0, example_inputs=hand[1], training=False)
    message = message_of(PlanError, sharded.train)

    says(message, "HandGPT: train() was called", "no backward pass", "Pass training=True")


# ── options ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"overides": {}}, ("'overides'", "known are example_inputs", "mean 'overrides'?")),
        ({"machine": "h1000"}, ("machine 'h1000' is unknown", "mean 'h100'?", "gloo, h100")),
        ({"optimizer": "adamm"}, ("'adamm' is unknown", "adamw, sgd-momentum, sgd")),
        ({"reduce_dtype": "float33"}, ("reduce_dtype", "'float33'", "'float32'")),
        ({"state_dtype": "float33"}, ("'float33' has no known size", "float32")),
        ({"shard_threshold": 1.5}, ("shard_threshold", "is 1.5", "from 0 to 1")),
        ({"overrides": ["*.up"]}, ("overrides", "type list", "Give a mapping")),
        ({"plan": 3}, ("plan", "type int", "Give a Plan, or the path of one")),
    ],
)
def test_an_option_that_is_wrong_is_named(
    hand: Hand, options: Mapping[str, Any], parts: tuple[str, ...]
) -> None:
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], 2, example_inputs=hand[1], **options)
    )

    says(message, *parts)


@pytest.mark.slow
def test_a_plan_and_overrides_exclude_each_other(hand: Hand, plan: Plan) -> None:
    options: dict[str, Any] = {"plan": plan, "overrides": {"*.up": "column"}}
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], 2, example_inputs=hand[1], **options)
    )

    says(message, "plan and overrides", "1 overrides", "one of the two")


def test_an_input_that_the_forward_does_not_take_is_named(hand: Hand) -> None:
    inputs = {"idz": hand[1]["ids"]}
    message = message_of(CaptureError, lambda: autotp.plan(hand[0], 2, example_inputs=inputs))

    says(message, "HandGPT", "does not take 'idz', only 'ids'", "mean 'ids'?")


# ── overrides ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tp", "override", "parts"),
    [
        (2, {"*.upp": "row"}, ("'*.upp'", "none of the 21 parameters", "Similar names are")),
        (2, {"*.up": "colum"}, ("'*.up'", "'colum'", "column, row, vocab", "mean 'column'?")),
        (
            2,
            {"*.norm1": "row"},
            (
                "'*.norm1'",
                "blocks.0.norm1.weight [64] cannot",
                "contracts one of its dims",
                "replicated",
            ),
        ),
        (
            2,
            {"*.up.weight": "expert"},
            (
                "blocks.0.up.weight [128, 64]",
                "not one weight of several experts",
                "its axis ffn (128)), row (dim 1",
            ),
        ),
        (
            2,
            {"*.down": "vocabulary"},
            (
                "blocks.0.down.weight",
                "neither an embedding nor a classification head",
                "row (dim 1",
            ),
        ),
        (
            16,
            {"*.query.weight": "column"},
            (
                "'column'",
                "over 16 ranks",
                "heads (8) cannot be sharded over 16 ranks",
                "split it: 2, 3, 4, 5",
            ),
        ),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_an_impossible_override_says_why_and_what_is_possible(
    hand: Hand, tp: int, override: dict[str, str], parts: tuple[str, ...], training: bool
) -> None:
    options: dict[str, Any] = {"overrides": override, "training": training}
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], tp, example_inputs=hand[1], **options)
    )

    says(message, "overrides:", *parts)


def test_a_bias_follows_the_product_that_an_override_names(hand: Hand) -> None:
    options: dict[str, Any] = {"overrides": {"*.down": "row", "head": "vocabulary"}}
    plan = autotp.plan(hand[0], 2, example_inputs=hand[1], **options)

    assert plan.parameters["blocks.0.down.weight"].layout == "row"
    assert plan.parameters["blocks.0.down.bias"].layout == "replicated"


# ── plans to follow ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def others() -> dict[str, nn.Module]:
    """Models that are not the one planned for: one layer more, one size other."""
    return {
        "layers": build("hand", layers=2)[0],
        "ffn": build("hand", layers=1, ffn=256)[0],
    }


def test_a_plan_of_another_tp_is_refused(hand: Hand, plan: Plan) -> None:
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], 4, plan=plan, example_inputs=hand[1])
    )

    says(message, "plan= (for HandGPT, tp 2)", "tp is 4 here", "a plan for tp 4, or tp=2")


def test_a_plan_of_another_mode_is_refused(hand: Hand, plan: Plan) -> None:
    message = message_of(
        PlanError,
        lambda: autotp.plan(hand[0], 2, plan=plan, example_inputs=hand[1], training=True),
    )

    says(message, "plan=", "training=False", "training=True", "make another plan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("layers", "its 21 parameters are not the 37"),
        ("ffn", "blocks.0.up.weight is [128, 64] in the plan, [256, 64] in the model"),
    ],
)
def test_a_plan_of_another_model_is_refused(
    hand: Hand, plan: Plan, others: dict[str, nn.Module], other: str, difference: str
) -> None:
    message = message_of(
        PlanError, lambda: autotp.plan(others[other], 2, plan=plan, example_inputs=hand[1])
    )

    says(message, "plan= (for HandGPT, tp 2)", difference, "the plan of this very model")


def test_a_plan_file_that_was_cut_off_is_refused(hand: Hand, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json()[:5000])
    message = message_of(
        PlanError, lambda: autotp.plan(hand[0], 2, plan=path, example_inputs=hand[1])
    )

    says(message, str(path), "line ", "is it truncated?", "Write it (again)")


# ── models ───────────────────────────────────────────────────────────────────────────────────────


class Undecided(nn.Module):
    """Branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


def test_a_model_that_cannot_be_captured_names_its_line() -> None:
    inputs = {"x": torch.ones(2, 8)}
    message = message_of(CaptureError, lambda: autotp.plan(Undecided(), 2, example_inputs=inputs))

    says(message, "Undecided", "test_errors.py", "in forward: if y.sum() > 0:", "torch.export")
    says(message, "GuardOnDataDependentSymNode", "rewrite this line so that no Python branch")


@torch.library.custom_op("autotp_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Strange(MLP):
    """Calls an op that no rule is about."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return twice(x)


@torch.library.custom_op("autotp_tests::shuffled", mutates_args=())
def shuffled(x: torch.Tensor) -> torch.Tensor:
    return x[..., torch.randperm(x.shape[-1])]


@shuffled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Shuffled(Strange):
    """Calls an op whose results are not the same twice."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return shuffled(x)


STRANGE = {"x": torch.ones(2, 8)}


def test_an_op_without_a_rule_is_refused_when_strict() -> None:
    message = message_of(
        UnknownOpError, lambda: autotp.plan(Strange(8, 32), 2, example_inputs=STRANGE, strict=True)
    )

    says(
        message, "autotp_tests.twice", "has no rule, and strict=True", "with a row for it as rules="
    )


def test_an_op_without_a_rule_that_cannot_be_tried_acts_whole_and_the_plan_says_so() -> None:
    plan = autotp.plan(Shuffled(8, 32), 2, example_inputs=STRANGE)
    why = "two runs on equal operands differ"

    assert (f"autotp_tests.shuffled.default at shuffled: {why}",) == plan.unruled
    assert any(
        "1 nodes have no rule and run on replicated operands" in warning
        for warning in plan.warnings
    )


def test_a_module_without_a_config_is_asked_for_its_inputs() -> None:
    message = message_of(PlanError, lambda: autotp.plan(Strange(8, 32), 2))

    says(message, "Strange", "no config", "its forward takes 'x'", "Pass example_inputs=")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("has no config.json", "MODEL is a directory with config.json")),
        ("{", ("config.json: line 1 column 2", "Restore")),
        (json.dumps({"architectures": ["X"]}), ("the key 'model_type' is missing", "Restore")),
    ],
)
def test_a_broken_directory_is_one_message_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, parts: tuple[str, ...]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    code = main(["plan", str(tmp_path), "--tp", "2"])
    captured = capsys.readouterr()

    assert code == 2
    assert captured.out == ""
    says(captured.err, "autotp: error:", str(tmp_path), *parts)
    assert "Traceback" not in captured.err


def test_an_unknown_preset_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "gpt-2", "--tp", "2"])

    assert code == 2
    says(
        capsys.readouterr().err,
        "'gpt-2'",
        "Did you mean 'gpt2'?",
        "The presets are gpt2,",
        "MODEL is",
    )
