"""Models of words and images, and of sound, equal the whole model when cut.

That a text model in one of images keeps its plan is in test_names.py.
"""

import functools

import pytest
import torch

from autotp.core.trace import Trace
from autotp.options import Options
from autotp.pipeline import _Work
from autotp.program import broken_guard
from autotp.proof import prove
from autotp.run.group import Group
from tests import multimodal


@functools.cache
def captured(name: str) -> _Work:
    """A model captured once for all tp."""
    model, inputs = multimodal.build(name)
    return _Work(model, Options(training=True), inputs)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3", "qwen2_vl", "whisper"])
def test_equals_the_whole_model(name: str, tp: int) -> None:
    work = captured(name)
    made = work.made(tp, "tp")
    evidence = prove(
        work.model,
        [work.built(made, Group("tp", tp, rank, torch.device("cpu"))) for rank in range(tp)],
        work.inputs,
        made.plan,
        Trace(made.rewritten.values),
        program=work.program,
        gradients=True,
        seed=0,
    )

    assert evidence.ok, (evidence.first_divergence, evidence.notes)
    assert evidence.collectives_seen == evidence.collectives_predicted
    assert made.plan.replicated_fraction < 0.15


def test_values_that_sizes_depend_on_are_guarded() -> None:
    work = captured("qwen2_vl")
    other = dict(work.inputs)
    other["image_grid_thw"] = torch.tensor([[1, 2, 8], [1, 4, 4]])
    broken = broken_guard(work.program, other)

    assert broken_guard(work.program, work.inputs) is None
    assert broken is not None
    assert "L['image_grid_thw'].tolist() == [[1, 4, 4], [1, 4, 4]]" == broken.expression
