"""Ops whose results ranks may disagree on are told where ranks take them to be equal."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.errors import RuleError
from autotp.oprules.rulebook import find_rules_root, load_rulebook
from autotp.records.plan import DifferingRecord, Plan
from autotp.report.plan import format_plan
from tests.toys import MLP

TIES = "equal values may be taken in any order"
SUMMED = "its gradient is summed in an order of its own on CUDA"


class Chosen(MLP):
    """A table, a top-k over what all ranks hold, and one over rows that a rank has alone."""

    def __init__(self) -> None:
        super().__init__(32, 64)
        self.words = nn.Embedding(4, 32)
        self.score = nn.Linear(32, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + torch.rand(32)
        best = self.score(x + self.body(x)).topk(2)[0]
        return best.index_select(1, torch.tensor([0, 0, 3]))

    def inner(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (8, 8)).topk(8)[0].flatten(-2)


def plan(tp: int, *, training: bool) -> Plan:
    torch.manual_seed(0)
    inputs = {"ids": torch.randint(0, 4, (2, 5))}
    return autotp.plan(Chosen(), tp, example_inputs=inputs, training=training)


@pytest.mark.slow
def test_an_op_on_whole_values_is_told_and_one_on_parts_is_not() -> None:
    found = {(r.op, r.phase): r for r in plan(2, training=False).differing}

    assert {("aten.topk.default", "forward"), ("aten.rand.default", "forward")} == set(found)
    topk = found["aten.topk.default", "forward"]
    assert DifferingRecord("aten.topk.default", "forward", TIES, ("topk_1",)) == topk


@pytest.mark.slow
def test_gradients_that_all_ranks_make_are_told_in_training() -> None:
    found = [r for r in plan(2, training=True).differing if r.phase == "backward"]

    assert [
        DifferingRecord("aten.index_select.default", "backward", SUMMED, ("index_select",))
    ] == found


@pytest.mark.slow
def test_one_rank_agrees_with_itself() -> None:
    assert () == plan(1, training=True).differing


@pytest.mark.slow
def test_the_plan_prints_them_and_keeps_them_in_json() -> None:
    made = plan(2, training=True)
    section = format_plan(made, 160).partition("Results that may differ between ranks\n")[2]

    assert f"  1 × aten.topk.default, forward, at topk_1: {TIES}\n" in section
    assert made == Plan.from_json(made.to_json())


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "roles.toml").write_text((find_rules_root() / "roles.toml").read_text())
    (tmp_path / "differing.toml").write_text('[[differing]]\nops = ["x"]\nphase = "forward"\n')

    with pytest.raises(RuleError, match=r"differing.toml, entry 1: needs a `phase`"):
        load_rulebook(tmp_path)


def test_every_op_named_is_one_of_torch() -> None:
    names = [name.split(".") for name in load_rulebook().differing]

    assert [] == [n for n in names if not hasattr(getattr(torch.ops.aten, n[1], None), n[2])]
