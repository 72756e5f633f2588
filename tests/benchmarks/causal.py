"""What a causal mask costs at a long prompt: one model's graphs with and without it, in turns.

    python tests/benchmarks/causal.py --length 4096 --rounds 15

A graph captured with a padding mask comes in two forms: one that makes the mask, and one for calls
in which the mask hides nothing, where each attention says `is_causal`. Both run in one process, in
turns, on the same weights and words. Peaks are of the process beyond what it held before the call;
on CUDA, of the allocator.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

MB = 1 << 20
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


def resident(field: str) -> int:
    """Bytes of the process that `field` of its status tells."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(field))


def measured(call: Callable[[], Any], device: torch.device) -> tuple[float, float, float]:
    """Seconds on the clock, seconds of the CPU, and the peak in bytes beyond what was held."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held = resident("VmRSS")
    clock, cpu = time.perf_counter(), time.process_time()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resident("VmHWM")
    return time.perf_counter() - clock, time.process_time() - cpu, peak - held


def figures(length: int, rounds: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Medians of both forms, and of the ratios within a round."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, max_position_embeddings=length)
    model = LlamaForCausalLM(config).eval().to(device, dtype)
    ids = torch.randint(0, SIZES["vocab_size"], (1, length), device=device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
    few = {name: v[:, :16] if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    sharded = autotp.parallelize(model, tp=1, example_inputs=few)
    (variant,) = sharded.variants.values()
    leaves = [given[name] for name in variant.program.inputs]
    ((_, shorter),) = variant.shorter
    forms: dict[str, Callable[[], Any]] = {
        "mask": lambda: variant.function(sharded, *leaves),
        "is_causal": lambda: shorter(sharded, *leaves),
        "whole model": lambda: model(**given),
    }
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    with torch.no_grad():
        apart = (forms["mask"]()[0] - forms["is_causal"]()[0]).abs().max().item()
        for _ in range(rounds + 1):
            for name, form in forms.items():
                seen[name].append(measured(form, device))
    found: dict[str, Any] = {"length": length, "dtype": str(dtype), "largest difference": apart}
    for name, runs in seen.items():
        clock, cpu, peak = (statistics.median(column) for column in zip(*runs[1:], strict=True))
        found[name] = {"seconds": clock, "cpu seconds": cpu, "peak MB": peak / MB}
    ratios = [a[1] / b[1] for a, b in zip(seen["is_causal"][1:], seen["mask"][1:], strict=True)]
    found["cpu seconds, is_causal to mask"] = statistics.median(ratios)
    return found


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    for length in asked.length:
        dtype, device = getattr(torch, asked.dtype), torch.device(asked.device)
        print(json.dumps(figures(length, asked.rounds, dtype, device), indent=1))


if __name__ == "__main__":
    main()
