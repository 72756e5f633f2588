"""Models of words and images, and of sound, are cut like others; text models in them as alone."""

import pytest

import autotp
from tests import multimodal


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", multimodal.BUILDS)
def test_equals_the_whole_model(name: str, tp: int) -> None:
    model, inputs = multimodal.build(name)
    evidence = autotp.verify(model, tp=tp, training=True, example_inputs=inputs)

    assert evidence.ok, (evidence.first_divergence, evidence.notes)
    assert all(gradient < evidence.tolerance for gradient in evidence.gradients.values())
    assert evidence.replicated_fraction < 0.15
