"""Checkpoints of full size, read by real processes: the whole model's greedy answers, or not.

    python -m tests.benchmarks.real_models --tp 1 2 3 4
    python -m tests.benchmarks.real_models --tp 2 4 --model llama

SmolLM2-135M-Instruct, all 30 layers, answers ten prompts, 12 words each; a Llama of 669 MiB with
random weights in bfloat16, as Transformers writes it, is read in float32 and goes on from ten
random prompts. Exit code 1 if any rank's words differ from the whole model's.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import autotp
from tests.benchmarks.loading import LARGE, write
from tests.spmd.pool import Pool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import fetch
import real_models

WORDS = 12


def answers(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The new words after each prompt, greedily."""
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=WORDS, do_sample=False, pad_token_id=0)
    return made[:, inputs["input_ids"].shape[1] :]


def answered(
    rank: int, world: int, directory: str, inputs: dict[str, Tensor]
) -> tuple[Tensor, int, dict[str, float]]:
    """A rank's words, the bytes that it holds, and its CPU seconds a stage."""
    began = time.process_time()
    model: Any = autotp.from_pretrained(
        directory, world, dtype="float32", example_inputs=inputs, new_tokens=WORDS
    )
    ready = time.process_time()
    words = answers(model, inputs)
    seconds = {"plan and read": ready - began, "generate": time.process_time() - ready}
    return words, sum(p.nbytes for p in model.parameters()), seconds


def compared(name: str, directory: str, inputs: dict[str, Tensor], sizes: list[int]) -> bool:
    """Whether every rank at every tp says what the whole model says; prints a line a tp."""
    whole: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected, total = answers(whole, inputs), sum(p.nbytes for p in whole.parameters())
    del whole
    right = True
    for tp in sizes:
        pool = Pool(tp)
        ranks = pool.run(answered, directory, inputs, timeout=3000)
        pool.close()
        same = [torch.equal(expected, words) for words, *_ in ranks]
        held = max(size for _, size, _ in ranks) / total
        spent = ", ".join(f"{stage} {s:.0f}" for stage, s in ranks[0][2].items())
        print(
            f"{name}, tp {tp}: {sum(same)} of {tp} ranks say the whole model's words "
            f"({expected.shape[0]} prompts, {expected.shape[1]} words); the fullest holds "
            f"{held:.1%} of the parameters; CPU seconds of rank 0: {spent}",
            flush=True,
        )
        right = right and all(same)
    return right


def main() -> int:
    """Both models, or the one named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--model", choices=["smollm2", "llama", "both"], default="both")
    options = parser.parse_args()
    right = True
    if options.model != "llama":
        directory = str(fetch.model_directory("smollm2"))
        inputs = real_models.tokenize_prompts(directory)
        right = compared("SmolLM2-135M-Instruct", directory, inputs, options.tp)
    if options.model != "smollm2":
        with tempfile.TemporaryDirectory(prefix="autotp-llama-") as folder:
            write(Path(folder), LARGE, torch.bfloat16)
            words = real_models.make_random_tokens(10, 32)
            right = compared("a Llama of 669 MiB", folder, words, options.tp) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
