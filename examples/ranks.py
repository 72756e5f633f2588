"""What the examples share: processes in place of GPUs, their memory and their collectives."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives", "count_bytes", "format_total", "run_on_ranks"]

T = TypeVar("T")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def run_on_ranks(
    tp: int, function: Callable[..., T], *args: object, timeout: float = 600.0
) -> list[T]:
    """What `function(rank, *args)` returns in each of `tp` new processes that form one gloo group.

    Constraints:
    - `function` is importable by name; arguments and results can be pickled.
    - An error in a rank is raised here with its traceback, and too long a run is a TimeoutError;
      either way no process is left behind.
    """
    with TemporaryDirectory() as folder:
        group = mp.start_processes(
            _run_member, (tp, folder, function, args), nprocs=tp, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + timeout
        try:
            while not group.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{tp} processes did not finish in {timeout:.0f} s")
        finally:
            for process in group.processes:
                process.kill()
                process.join()
        results = [Path(folder, f"{rank}.pt") for rank in range(tp)]
        return [torch.load(path, weights_only=False) for path in results]


class Collectives(TorchDispatchMode):
    """A list, in `runs`, of every functional collective that this rank executes: (kind, bytes).

    The bytes are the payload as `Plan.collectives` counts it: the larger of what goes in and what
    comes out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split("::")
        kind = next((kind for kind in KINDS if name.startswith(kind)), None)
        if namespace == "_c10d_functional" and kind is not None:
            tensors = [t for t in (args[0], result) if isinstance(t, torch.Tensor)]
            self.runs.append((kind, max(t.nbytes for t in tensors)))
        return result


def format_total(runs: list[tuple[str, int]]) -> str:
    """A count of each kind of collective and the bytes in all, e.g. `13 all_reduce, 0.66 MB`."""
    counts = Counter(kind for kind, _ in runs)
    kinds = " + ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    return f"{kinds or 'none'}, {sum(size for _, size in runs) / 1e6:.2f} MB"


def count_bytes(model: nn.Module) -> int:
    """The bytes of the parameters, tied ones once."""
    return sum(p.nbytes for p in model.parameters())


def _run_member(
    rank: int, tp: int, folder: str, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // tp))
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=tp)
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
