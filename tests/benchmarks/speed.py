"""How fast a sharded model is beside one cut by hand: CPU seconds of both, in the same processes.

    python -m tests.benchmarks.speed --rounds 30

Two processes of one thread each over gloo hold both models (tests/benchmarks/megatron.py is the
hand-written one). A round runs each of them once, in an order drawn by lot; its ratio is autotp's
CPU seconds, of both ranks together, over the other's. The median of these is given with a 95 %
interval by bootstrap. The same file counts collectives and their bytes, and says what a graph costs
beside the modules that it was made of where nothing is cut (`--alone`).
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from tests.benchmarks.megatron import cut_by_hand
from tests.spmd.pool import pool_of

Sizes = Mapping[str, int]
Shape = tuple[int, int, int]  # batch, words of the prompt, new words
WORLD = 2
LARGE: Sizes = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
TINY: Sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
BATCH, PROMPT, NEW = 4, 128, 32
SIDES = ("autotp", "by hand")


@dataclass
class Ran:
    """What one rank measured: by task and side the CPU seconds of each round, traffic and result.

    - `traffic`: how often each collective ran in one go, and the bytes of its results.
    """

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    traffic: dict[str, dict[str, dict[str, tuple[int, int]]]] = field(default_factory=dict)
    results: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class Traffic(TorchDispatchMode):
    """Counts what goes through torch.distributed, in whichever way it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            if "reduce" in name:
                self._note("all-reduce", args[0])
            elif "gather" in name:
                self._note("all-gather", args[0] if func.namespace == "c10d" else result)
        return result

    def _note(self, kind: str, found: Tensor | list[Tensor]) -> None:
        tensors = found if isinstance(found, list | tuple) else [found]
        self.counts[kind] += 1
        self.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors)

    def found(self) -> dict[str, tuple[int, int]]:
        """Count and bytes of each kind."""
        return {kind: (n, self.bytes[kind]) for kind, n in self.counts.items()}


def whole(sizes: Sizes) -> LlamaForCausalLM:
    """The model, with random weights, the same in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).eval()


def words(sizes: Sizes, batch: int, length: int) -> Tensor:
    """Random numbers of words, (batch, length)."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(3, sizes["vocab_size"], (batch, length), generator=drawn)


def tasks(ids: Tensor, new: int, only: str = "") -> dict[str, Callable[[Any], Tensor]]:
    """What is measured, by name: each runs a model once."""
    asked = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    every: dict[str, Callable[[Any], Tensor]] = {
        "forward": lambda model: model(input_ids=ids, use_cache=False).logits,
        "generate": lambda model: model.generate(ids, **asked),
    }
    return {only: every[only]} if only else every


@torch.no_grad()
def measured(
    rank: int,
    world: int,
    sizes: Sizes,
    shape: Shape,
    rounds: int,
    only: str = "",
    embedding_whole: bool = False,
) -> Ran:
    """What one rank of a group measures of both models."""
    batch, length, new = shape
    ids = words(sizes, batch, length)
    model = whole(sizes)
    overrides = {"*.embed_tokens": "replicated"} if embedding_whole else {}
    sharded = autotp.parallelize(
        model, world, training=False, example_inputs={"input_ids": ids}, overrides=overrides
    )
    models = dict(zip(SIDES, (sharded, cut_by_hand(model, embedding_whole)), strict=True))
    ran = Ran()
    for task, run in tasks(ids, new, only).items():
        ran.results[task] = {side: run(models[side]) for side in SIDES}  # and graphs are captured
        ran.traffic[task] = {side: _traffic(run, models[side]) for side in SIDES}
        ran.seconds[task] = interleaved({s: partial(run, models[s]) for s in SIDES}, rounds)
    return ran


def _traffic(run: Callable[[nn.Module], Tensor], model: nn.Module) -> dict[str, tuple[int, int]]:
    with Traffic() as traffic:
        run(model)
    return traffic.found()


def interleaved(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of this process for each side, round by round, in an order drawn by lot."""
    lot = random.Random(0)  # the same on all ranks, which must run the same
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in lot.sample(list(sides), len(sides)):
            if dist.is_initialized():
                dist.barrier()
            before = time.process_time()
            sides[side]()
            seconds[side].append(time.process_time() - before)
    return seconds


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """The median of `ratios`, and the ends of its 95 % bootstrap interval."""
    lot = random.Random(0)
    medians = sorted(statistics.median(lot.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def told(ranks: Sequence[Mapping[str, Sequence[float]]], names: Sequence[str] = SIDES) -> str:
    """One task in words: seconds of both sides, all ranks together, and their ratio."""
    mine, other = (
        [sum(seconds) for seconds in zip(*(r[side] for r in ranks), strict=True)] for side in names
    )
    median, low, high = interval([a / b for a, b in zip(mine, other, strict=True)])
    return (
        f"{names[0]} {statistics.median(mine):.4f} s, {names[1]} {statistics.median(other):.4f} s; "
        f"ratio {median:.4f} [{low:.4f}, {high:.4f}], {len(mine)} rounds"
    )


def beside_hand(sizes: Sizes, shape: Shape, rounds: int, *how: str | bool) -> None:
    """Prints the comparison of two ranks with the hand-written model."""
    found: list[Ran] = pool_of(WORLD).run(measured, sizes, shape, rounds, *how, timeout=3000)
    for task in found[0].seconds:
        print(f"{task}: {told([ran.seconds[task] for ran in found])}")
        for side, traffic in found[0].traffic[task].items():
            kinds = (f"{n} {kind}, {size / 1e6:.3f} MB" for kind, (n, size) in traffic.items())
            print(f"    {side}: {'; '.join(kinds)}", flush=True)


@torch.no_grad()
def alone(sizes: Sizes, shape: Shape, rounds: int, only: str) -> None:
    """Prints the comparison of a graph, nothing cut, with the modules that it was made of."""
    batch, length, new = shape
    ids = words(sizes, batch, length)
    models = (autotp.parallelize(whole(sizes), 1, training=False), whole(sizes))
    for task, run in tasks(ids, new, only).items():
        names = ("graph", "modules")
        sides = {n: partial(run, m) for n, m in zip(names, models, strict=True)}
        interleaved(sides, 1)  # and graphs are captured
        print(f"{task}: {told([interleaved(sides, rounds)], names)}", flush=True)


def main() -> None:
    """The benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: overhead is all there is")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--only", default="", choices=["", "forward", "generate"])
    parser.add_argument("--embedding-whole", action="store_true", help="on both sides")
    parser.add_argument("--alone", action="store_true", help="one process, nothing cut")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = dict(TINY if options.tiny else LARGE)
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    shape = (options.batch, options.prompt, options.new)
    if options.alone:
        alone(sizes, shape, options.rounds, options.only)
    else:
        beside_hand(sizes, shape, options.rounds, options.only, options.embedding_whole)


if __name__ == "__main__":
    main()
