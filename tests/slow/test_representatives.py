"""Twenty-five architectures that together have every kind of attention, mixing and layout.

Each is a tiny model as its library has it, captured once and verified, gradients included, at tp
2 and 4; the whole matrix is a benchmark's (tests/benchmarks/coverage.py).
"""

from collections import Counter
from dataclasses import dataclass

import pytest

from autotp.records.plan import Plan
from tests import zoo
from tests.benchmarks.coverage import _layers
from tests.proven import Captured


@dataclass(frozen=True)
class Kind:
    """What an architecture stands for.

    - `whole`: the largest share of the bytes that every rank may hold.
    - `layers`: the most collectives of a layer, forward and backward. Two and two are those of a
      sequential block cut by hand, one and one those of a parallel block.
    """

    what: str
    whole: float = 0.01
    layers: tuple[int, int] = (2, 2)
    task: str = "causal-lm"


BLOCK, MORE = (1, 1), (4, 4)
KINDS = {
    "qwen3": Kind("queries and keys normed a head"),
    "flex_olmo": Kind("queries and keys normed over all heads; experts", layers=MORE),
    "glm4_moe_lite": Kind("latent attention; experts and a shared one", 0.05, (3, 2)),
    "gpt_oss": Kind("sinks; a sliding window; experts with biases"),
    "gemma2": Kind("scores and logits capped; norms around each part"),
    "llama4_text": Kind("attention in chunks; one expert beside a shared one", layers=(3, 3)),
    "qwen2_moe": Kind("experts and a gated shared one", layers=(3, 3)),
    "plbart": Kind("encoder and decoder with attention across", 0.09, MORE, "seq2seq"),
    "mt5": Kind("bias of relative positions, shared by layers", layers=MORE, task="seq2seq"),
    "bloom": Kind("linear biases; queries, keys and values fused a head"),
    "mpt": Kind("linear biases; queries, keys and values fused in blocks"),
    "falcon_mamba": Kind("a scan of channels"),
    "mamba2": Kind("a scan of heads; a convolution before the segments", layers=BLOCK),
    "jamba": Kind("a hybrid of scans, attention and experts", layers=(3, 3)),
    "lfm2": Kind("a hybrid of gated convolutions and attention"),
    "minimax": Kind("a hybrid of linear and full attention; experts", layers=(3, 3)),
    "pp_lcnet": Kind("a net of convolutions", 0.015, (6, 6), task="image-classification"),
    "vit": Kind("patches of images", 0.19, task="image-classification"),
    "roberta": Kind("an encoder of masked words", 0.13, task="masked-lm"),
    "gpt_neox": Kind("a parallel block; queries, keys and values fused a head", layers=BLOCK),
    "falcon": Kind("a parallel block; groups of fused heads", layers=BLOCK),
    "codegen": Kind("a parallel block; fused in four blocks", layers=BLOCK),
    "gpt_bigcode": Kind("one key and value head, fused", 0.1),
    "opt": Kind("learned positions, biases everywhere", 0.09),
    "diffllama": Kind("differences of attentions", 0.19),
}


def most(plan: Plan) -> tuple[int, int]:
    """The most collectives of any layer, forward and backward."""
    counts = [tuple(map(int, text.split("/"))) for text in _layers(plan)]
    return max((f for f, _ in counts), default=0), max((b for _, b in counts), default=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_right_and_nearly_all_cut(name: str) -> None:
    """Of other tools, users reported kinds that were replicated or failed (C027, C055 to C060)."""
    kind = KINDS[name]
    captured = Captured(*zoo.build(name, kind.task))
    for tp in (2, 4):
        proof = captured.proof(tp)
        forward, backward = most(proof.plan)

        assert proof.evidence.ok, (proof.evidence.first_divergence, proof.evidence.notes)
        assert kind.whole >= proof.plan.replicated_fraction
        assert kind.layers[0] >= forward
        assert kind.layers[1] >= backward


def test_they_are_twenty_five() -> None:
    tasks = Counter(kind.task for kind in KINDS.values())

    assert 25 == len(KINDS)
    assert set(zoo.TASKS) == set(tasks)
    assert set(zoo.exportable()) >= {(kind.task, name) for name, kind in KINDS.items()}
