"""How far sharded models in narrow dtypes are from exact, and whether that grows with tp.

    python -m tests.benchmarks.precision --write docs/explanation/precision.md

Random models (hidden 256, four layers, weights so large that every layer matters) run in lockstep
over 1, 2, 4 and 8 ranks. What is exact is the same weights, cast up, in float64. The error of a
word's logits is their distance from those over the length of those; shown is the median over words
and draws of the weights.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotp.cli.random_weights import randomise
from autotp.compiler import ModelCompiler
from autotp.options import read_request
from autotp.runtime.group.process_group import Group
from autotp.verification.simulate import simulate
from tests.models import build

SIZES = (1, 2, 4, 8)
WIDE: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", WIDE),
    "GPT-2": ("gpt2", {"n_embd": 256, "n_layer": 4, "n_head": 8}),
    "Mixtral (4 experts)": ("mixtral", WIDE),
}
SUMS: Sequence[tuple[torch.dtype, torch.dtype | None]] = (
    (torch.float32, None),
    (torch.float32, torch.float64),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
    (torch.float16, None),
    (torch.float16, torch.float32),
)
MARKS = ("<!-- errors: begin -->", "<!-- errors: end -->")


@dataclass(frozen=True)
class Row:
    """The errors of one model in one dtype, with sums made in one, by tp."""

    model: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    errors: Mapping[int, float]

    def __str__(self) -> str:
        """A line of the table."""
        one = self.errors[SIZES[0]]
        cells = [f"{self.errors[tp]:.2e}" for tp in SIZES]
        most = max(error / one for error in self.errors.values())
        return " | ".join(
            ["", self.model, _word(self.dtype), _word(self.reduce_dtype), *cells, f"{most:.2f}", ""]
        ).strip()


def measured(
    name: str,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    seeds: int,
    sizes: Sequence[int] = SIZES,
    **config: Any,
) -> dict[int, float]:
    """The median error of a word's logits, by tp, of a tiny model called `name`."""
    model, given = build(name, **config)
    inputs = {"input_ids": words(given["input_ids"].shape[0], 64)}
    model = model.to(dtype)
    asked = {"example_inputs": inputs, "training": False}
    work = ModelCompiler.of(model, read_request(reduce_dtype=reduce_dtype, **asked))
    made = {tp: work.compile(tp, "tp") for tp in sizes if tp > 1}
    errors: dict[int, list[Tensor]] = {tp: [] for tp in sizes}
    for seed in range(seeds):
        randomise(model, seed)
        exact = exactly(model, inputs)
        for tp in sizes:
            if tp == 1:
                found = model(**inputs).logits
            else:
                groups = [Group("tp", tp, rank, torch.device("cpu")) for rank in range(tp)]
                ranks = [work.build(made[tp], group) for group in groups]
                found = simulate(ranks, inputs).outputs[0].logits
            errors[tp].append(distances(found, exact))
    return {tp: statistics.median(torch.cat(all_).tolist()) for tp, all_ in errors.items()}


def exactly(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of the same weights in float64, of which grouped products know nothing."""
    twin: Any = copy.deepcopy(model).double()
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")
    return twin(**inputs).logits


def words(batch: int, sequence: int) -> Tensor:
    """Words drawn once for all."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 500, (batch, sequence), generator=generator)


def distances(found: Tensor, exact: Tensor) -> Tensor:
    """For each word, how far its logits are from the exact ones, over the length of those."""
    return ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten()


def table(rows: Sequence[str], seeds: int) -> str:
    """The rows as a page shows them."""
    told = f"{seeds} seeds, 2 × 64 tokens, torch {torch.__version__.split('+')[0]}, CPU"
    heads = ["model", "dtype", "reduced in", *(f"tp {tp}" for tp in SIZES), "largest / tp 1"]
    rule = "|".join(["", *("---" for _ in heads), ""])
    return "\n".join([f"{told}.\n", f"| {' | '.join(heads)} |", rule, *rows])


def main() -> None:
    """Measures, prints the table, and writes it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--known", type=Path, help="rows of an earlier run, kept and added to")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    known = options.known.read_text().splitlines() if options.known else []
    lines: list[str] = []
    for label, (name, config) in MODELS.items():
        for dtype, reduce_dtype in SUMS:
            begun = f"| {label} | {_word(dtype)} | {_word(reduce_dtype)} |"
            line = next((k for k in known if k.startswith(begun)), "")
            if not line:
                errors = measured(name, dtype, reduce_dtype, options.seeds, **config)
                line = str(Row(label, dtype, reduce_dtype, errors))
            lines.append(line)
            print(line, file=sys.stderr, flush=True)
    text = table(lines, options.seeds)
    if options.write is None:
        print(text)
        return
    before, _, rest = options.write.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page = f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}"
    options.write.write_text(page, encoding="utf-8")


def _word(dtype: torch.dtype | None) -> str:
    return "its own" if dtype is None else str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
