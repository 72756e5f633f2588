"""Plans in float32 and in bfloat16 are the same, but for what bytes cost.

The architectures stand for the conversions in the zoo; `tests/benchmarks/dtypes.py` has them all.
"""

import pytest

from tests.dtypes import Compared, compare

SAME = {
    "no conversion": ("causal-lm", "gpt2", "inference"),
    "norms, as type_as": ("causal-lm", "gemma3_text", "training"),
    "norms, as to": ("causal-lm", "granite", "training"),
    "another kernel for experts": ("causal-lm", "laguna", "training"),
    "a scan": ("causal-lm", "mamba2", "inference"),
    "masks": ("masked-lm", "roberta", "training"),
    "an encoder and a decoder": ("seq2seq", "t5", "training"),
    "images": ("image-classification", "vit", "training"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type", "mode"), SAME.values(), ids=SAME)
def test_plans_are_the_same_in_both_dtypes(task: str, model_type: str, mode: str) -> None:
    assert Compared() == compare(model_type, task, training=mode == "training")


@pytest.mark.slow
def test_logits_that_become_float32_are_gathered_before() -> None:
    found = compare("dory", "causal-lm", training=True)

    assert () == found.by_elements
    assert ["layout lm_head.logit_scale"] == [line.partition(":")[0] for line in found.by_bytes]
