"""Models of words and images, and of sound, equal the whole model when cut.

That a text model in one of images keeps its plan is in tests/regressions/test_names.py.
"""

import functools

import pytest
import torch

from autotp.capture.program import find_broken_guard
from tests import multimodal
from tests.proven import Captured


@functools.cache
def captured(name: str) -> Captured:
    """A model captured once for all tp."""
    return Captured(*multimodal.build(name))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", multimodal.BUILDS)
def test_equals_the_whole_model(name: str, tp: int) -> None:
    proof = captured(name).proof(tp)
    evidence = proof.evidence

    assert evidence.ok, (evidence.first_divergence, evidence.notes)
    assert evidence.collectives_seen == evidence.collectives_predicted
    assert proof.plan.replicated_fraction < 0.15


def test_values_that_sizes_depend_on_are_guarded() -> None:
    work = captured("qwen2_vl").work
    other = dict(work.inputs)
    other["image_grid_thw"] = torch.tensor([[1, 2, 8], [1, 4, 4]])
    broken = find_broken_guard(work.program, other)

    assert find_broken_guard(work.program, work.inputs) is None
    assert broken is not None
    assert "L['image_grid_thw'].tolist() == [[1, 4, 4], [1, 4, 4]]" == broken.expression
