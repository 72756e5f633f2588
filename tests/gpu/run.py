"""What a GPU alone can show, on one of them, in at most five minutes; one line of JSON a check.

    python tests/gpu/run.py                # a CUDA device, NCCL
    python tests/gpu/run.py --device cpu   # the same steps on a CPU, gloo, a tiny model

- group: a group of one rank, whose model equals the whole one
- lockstep: both ranks of tp 2 in bfloat16, on the one device, beside the whole model
- compiled: with fullgraph=True the same words, and nothing compiled anew while they come
- cuda_graph: a step with a cache is captured as a CUDA graph, and replayed for another word
- flash: attention runs in a flash kernel, by the profiler's names
- speed: words a second beside the model that is not sharded

Exit code 1 if any check fails. Where the device cannot do what a check is of (a CUDA graph on a
CPU), its line says so.
"""

import argparse
import copy
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
CLOSE = 3e-2  # of the largest logit: bfloat16 keeps 8 bits, and fused kernels round elsewhere


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the whole model on it, and the same model over a group of one rank."""

    device: torch.device
    whole: Any
    sharded: Any
    words: int
    slowest: float

    def ids(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """Random words, (batch, length), the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        size = self.whole.config.vocab_size
        return torch.randint(3, size, (batch, length), generator=generator).to(self.device)

    def generate(self, model: Any, ids: Tensor) -> Tensor:
        """The greedy words after `ids`, (batch, words)."""
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        made = model.generate(ids, max_new_tokens=self.words, min_new_tokens=self.words, **how)
        return made[:, ids.shape[1] :]

    def settled(self) -> float:
        """The time, when the device has done all that it was asked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def random_model(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama of these sizes whose words depend on what was before them."""
    config = LlamaConfig(**sizes, max_position_embeddings=4096, initializer_range=0.05)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(device=device, dtype=dtype)


def group(setting: Setting) -> dict[str, Any]:
    """A group of one rank: the logits of the whole model."""
    ids = setting.ids(2, 64)
    expected, found = setting.whole(input_ids=ids).logits, setting.sharded(input_ids=ids).logits
    gap = float((expected - found).abs().max() / expected.abs().max())
    return {"ok": gap <= CLOSE, "gap": gap, "backend": dist.get_backend()}


def lockstep(setting: Setting) -> dict[str, Any]:
    """Both ranks of tp 2 in bfloat16, in this process, on this device."""
    model = random_model(SMALL, torch.bfloat16, setting.device)
    evidence = autotp.verify(model, 2, dtype=torch.bfloat16)
    figures = {"max_rel_error": evidence.max_rel_error, "tolerance": evidence.tolerance}
    return {"ok": evidence.ok, **figures, "collectives": dict(evidence.collectives_seen)}


def compiled(setting: Setting) -> dict[str, Any]:
    """fullgraph=True: the same words; the second run compiles nothing."""
    ids = setting.ids(1, 32)
    expected = setting.generate(setting.sharded, ids)
    model = copy.deepcopy(setting.sharded)
    # a compiler of C++ takes longer than all of this, and is not what a dry run is of
    backend = "inductor" if setting.device.type == "cuda" else "eager"
    model.compile(fullgraph=True, backend=backend)
    first = setting.generate(model, ids)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again = setting.generate(model, setting.ids(1, 48, seed=1))
    more = torch._dynamo.utils.counters["stats"]["unique_graphs"] - counted
    same = float((expected == first).float().mean())
    # in bfloat16 a fused kernel may round a tie the other way, after which words differ
    right = same == 1.0 if expected.device.type == "cpu" else bool((expected == first)[0, 0])
    return {
        "ok": right and more == 0 and again.shape == first.shape,
        "same_words": same,
        "graphs": counted,
        "more_graphs": more,
    }


def cuda_graph(setting: Setting) -> dict[str, Any]:
    """A step with a cache, captured once and replayed for another word."""
    model, ids = setting.sharded, setting.ids(1, 32)
    kept = model(input_ids=ids, use_cache=True).past_key_values
    words = [setting.ids(1, 1, seed=seed) for seed in (1, 2)]

    def step(word: Tensor, cache: Any) -> Tensor:
        return model(input_ids=word, past_key_values=cache, use_cache=True).logits

    expected = [step(word, copy.deepcopy(kept)) for word in words]
    if setting.device.type != "cuda":
        return {"ok": not torch.equal(*expected), "captured": False, "why": "no CUDA device"}
    word, cache = words[0].clone(), copy.deepcopy(kept)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what is made on first use must not be captured
        step(word, copy.deepcopy(kept))
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(word, cache)
    gaps: list[float] = []
    for given, wanted in zip(words, expected, strict=True):
        word.copy_(given)
        graph.replay()
        gaps.append(float((logits - wanted).abs().max() / wanted.abs().max()))
    return {"ok": max(gaps) <= CLOSE, "captured": True, "gaps": gaps}


def flash(setting: Setting) -> dict[str, Any]:
    """The names of the attention kernels that a prompt runs in."""
    activities = [ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ids = setting.ids(1, 256)
    setting.sharded(input_ids=ids)
    with profile(activities=activities) as seen:
        setting.sharded(input_ids=ids)
        setting.settled()
    names = sorted({e.key for e in seen.key_averages() if "flash" in e.key.lower()})
    return {"ok": bool(names), "kernels": [name[:100] for name in names]}


def speed(setting: Setting) -> dict[str, Any]:
    """Words a second, the two models by turns; the better of three runs each."""
    ids = setting.ids(4, 128)
    best = {"whole": 0.0, "sharded": 0.0}
    for _ in range(4):  # the first warms up
        for name in best:
            began = setting.settled()
            made = setting.generate(getattr(setting, name), ids)
            best[name] = max(best[name], made.numel() / (setting.settled() - began))
    ratio = best["sharded"] / best["whole"]
    return {"ok": ratio >= setting.slowest, "ratio": ratio, "words_per_second": best}


CHECKS: tuple[Callable[[Setting], dict[str, Any]], ...] = (
    group,
    lockstep,
    compiled,
    cuda_graph,
    flash,
    speed,
)


def outcome(check: Callable[[Setting], dict[str, Any]], setting: Setting) -> dict[str, Any]:
    """What a check found; whatever it raised is told, and is a failure."""
    began = time.perf_counter()
    try:
        found = check(setting)
    except Exception as error:  # noqa: BLE001  the others are to run all the same
        where = traceback.format_exc().strip().splitlines()[-6:]
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600], "where": where}
    return {"check": check.__name__, **found, "seconds": round(time.perf_counter() - began, 1)}


def setting_of(device: torch.device) -> Setting:
    """The models on a device; sizes are such that a GPU has something to do."""
    large = device.type == "cuda"
    dtype = torch.bfloat16 if large else torch.float32
    whole = random_model(LARGE if large else SMALL, dtype, device)
    sharded = autotp.parallelize(whole, training=False)
    return Setting(device, whole, sharded, 64 if large else 4, 0.8 if large else 0.0)


def main() -> int:
    """Runs all checks, or those named; 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=300, help="seconds in all (default 300)")
    parser.add_argument("--only", nargs="*", default=[c.__name__ for c in CHECKS])
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    signal.alarm(options.limit)  # a hung kernel ends the process, with exit code 142
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        meet = f"file://{Path(folder, 'meet')}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meet, rank=0, world_size=1)
        setting, right = setting_of(device), True
        for check in (c for c in CHECKS if c.__name__ in options.only):
            found = outcome(check, setting)
            print(json.dumps(found), flush=True)
            right = right and found["ok"]
        dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
