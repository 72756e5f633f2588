"""What of generating is a sharded model's own; generate() itself is tested in tests/spmd."""

from typing import Any

import pytest
import torch
from torch import nn

from autotp.errors import PlanError
from autotp.runtime.generation import override_generation
from tests.benchmarks.generating_report import report


class Sees(nn.Module):
    """A model of images, as Transformers' generation asks it."""

    def _supports_mm_encoder_outputs(self) -> bool:
        return True

    def _expand_inputs_for_generation(self, **given: Any) -> dict[str, Any]:
        return given


def test_towers_run_in_the_forward_and_images_are_not_repeated() -> None:
    own = override_generation(Sees)
    expand = own["_expand_inputs_for_generation"]
    images = {"pixel_values": torch.ones(2, 3)}

    assert own["_supports_mm_encoder_outputs"](Sees()) is False
    assert images | {"expand_size": 1} == expand(Sees(), expand_size=1, **images)
    assert {"expand_size": 2} == expand(Sees(), expand_size=2)
    with pytest.raises(PlanError, match="2 sequences per prompt were requested.*pixel_values"):
        expand(Sees(), expand_size=2, **images)


def test_a_module_that_generates_nothing_gets_nothing() -> None:
    assert {} == override_generation(nn.Linear)


def test_the_page_of_what_generates_counts_each_result() -> None:
    row = {"task": "causal-lm", "tp": 1, "commit": "abc", "reason": ""}
    rows = [
        row | {"type": "a", "result": "ok"},
        row | {"type": "b", "result": "wrong", "reason": "beams"},
        row | {"type": "c", "result": "none", "reason": "no cache"},
    ]
    page = report(rows, [("causal-lm", kind) for kind in "abcd"])

    assert "| causal-lm | 1 | 4 | 1 | 0 | 1 | 0 | 1 | 1 |" in page
    assert "- b (causal-lm, tp 1): wrong: beams" in page
    assert "- c (causal-lm): no cache" in page
    assert "- causal-lm, tp 1: a" in page
