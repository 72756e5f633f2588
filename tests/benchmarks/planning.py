"""What planning costs: CPU seconds and peak memory per stage, compared with one torch.export.

    python tests/benchmarks/planning.py llama-3.1-8b             # target: at most 2 exports, 1 GiB
    python tests/benchmarks/planning.py llama-3.1-405b --tp 8    # target: solve at most 4 s,
                                                                 # all but the capture 25 s

The baseline runs first, in the same process: a plain `torch.export.export` of the same model on
meta with the same inputs and dynamic sizes. Figures are CPU seconds (the machine may be busy); peak
memory is the process's high-water mark after each stage, so it only ever grows.
"""

import argparse
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from autotp import compiler as pipeline
from autotp import parallelize
from autotp.capture.inputs import make_example_inputs
from autotp.model_source import load_model

STAGES = (  # as autotp.compiler names them
    "capture", "propagate", "match", "formulate", "solve", "rewrite", "check_types", "summarise",
    "retarget_graph", "outline", "build_tree",
)  # fmt: skip


def peak() -> float:
    """The process's peak resident memory in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def baseline(model: torch.nn.Module, training: bool) -> float:
    """CPU seconds of one plain export, with batch and sequence dynamic."""
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    given, shapes = dict[str, Any](), dict[str, Any]()
    for name, value in make_example_inputs(model, training).items():
        tensor = isinstance(value, torch.Tensor)
        given[name] = value[:1, :12].repeat(2, 1) if tensor else value
        shapes[name] = dims if tensor else None
    start = time.process_time()
    torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    return time.process_time() - start


def timed(figures: dict[str, tuple[float, float]], name: str) -> Callable[..., Any]:
    """The stage `name`, noting its CPU seconds and the peak memory after it."""
    stage = getattr(pipeline, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = stage(*args, **kwargs)
        spent = figures.get(name, (0.0, 0.0))[0] + time.process_time() - start
        figures[name] = (spent, peak())
        return result

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--training", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = load_model(chosen.model)
    export = baseline(model, chosen.training)
    after = peak()
    figures: dict[str, tuple[float, float]] = {}
    for name in STAGES:
        setattr(pipeline, name, timed(figures, name))
    start = time.process_time()
    parallelize(model, chosen.tp, rank=0, training=chosen.training)
    total = time.process_time() - start
    print(f"{chosen.model}, tp {chosen.tp}, {'training' if chosen.training else 'inference'}")
    print(f"{'stage':<24}{'CPU s':>8}{'peak GiB':>10}")
    print(f"{'plain torch.export':<24}{export:>8.2f}{after:>10.2f}")
    for name in STAGES:
        if name in figures:
            print(f"{name:<24}{figures[name][0]:>8.2f}{figures[name][1]:>10.2f}")
    rest = total - figures["capture"][0]
    print(f"{'all of parallelize':<24}{total:>8.2f}{peak():>10.2f}")
    print(f"{'all but the capture':<24}{rest:>8.2f}")
    print(f"whole / plain export: {total / export:.2f}")


if __name__ == "__main__":
    main()
