"""The smallest example: a two-layer MLP on two processes, and why up is column and down is row.

    python examples/mlp.py

autotp finds column -> row by itself. One article's figure 3 draws row -> column; here that layout
is forced by `overrides`, and both are counted and timed.
"""

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from ranks import Collectives, count_bytes, format_total, run_on_ranks
from torch import Tensor, nn

import autotp
from autotp.records.plan import ParameterRecord

TP = 2
HIDDEN = 512
SHAPE = (8, 64, HIDDEN)  # (batch, sequence, hidden)
TOLERANCE = 1e-5
REPEATS = 20
ARTICLE = {"up.weight": "row", "down.weight": "column"}

WHY = """
An error is the largest difference over the largest value; up to 1e-5 is rounding: two ranks add the
4H products in another order, and fp32 rounds each sum by up to 6e-8.

Column -> row: from the full X each rank computes its half of the 4H hidden values and keeps it;
only the last layer's sum, H wide, is sent: one all-reduce.

Row -> column, as figure 3 draws it, is wrong: a row layer needs a slice of X, and given the full X
its shapes do not fit (H columns of X against H / 2 of its weight). Given a slice it leaves partial
sums, which the activation cannot take (gelu(a + b) is not gelu(a) + gelu(b)): they cost an
all-reduce that is 4H wide, forward and again backward, and the column layer's output costs an
all-gather as well."""


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def make_model_and_input() -> tuple[MLP, Tensor]:
    """The same weights and the same X in every process."""
    torch.manual_seed(0)
    return MLP(HIDDEN), torch.randn(SHAPE)


def run_step(model: nn.Module, x: Tensor) -> Tensor:
    """The output, after one forward and one backward."""
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return out.detach()


def slice_gradient(gradient: Tensor, record: ParameterRecord, rank: int) -> Tensor:
    """The shard of a parameter's full gradient that `rank` has."""
    if record.dim is None:
        return gradient
    ranges = record.shards[rank].ranges
    pieces = [gradient.narrow(record.dim, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, record.dim)


def run_rank(rank: int, overrides: Mapping[str, str]) -> dict[str, Any]:
    """One process: errors against the unsharded model, bytes, collectives, seconds."""
    model, x = make_model_and_input()
    sharded = autotp.parallelize(
        model, tp=TP, example_inputs={"x": x}, training=True, overrides=overrides
    )
    expected = run_step(model, x)
    with Collectives() as collectives:
        out = run_step(sharded, x)
    found = dict(sharded.named_parameters())
    gradients = {
        name: measure_error(
            slice_gradient(p.grad, sharded.plan.parameters[name], rank), found[name].grad
        )
        for name, p in model.named_parameters()
    }
    return {
        "error": measure_error(expected, out),
        "gradient_error": max(gradients.values()),
        "bytes": count_bytes(sharded),
        "executed": collectives.runs,
        "seconds": statistics.median(time_step(sharded, x) for _ in range(REPEATS)),
    }


def measure_error(expected: Tensor, found: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((expected - found).abs().max() / expected.abs().max())


def time_step(model: nn.Module, x: Tensor) -> float:
    """How long one forward and backward takes."""
    start = time.perf_counter()
    run_step(model, x)
    return time.perf_counter() - start


def make_column(overrides: Mapping[str, str]) -> dict[str, str]:
    """One column of the table: the plan's promises and what two processes measured."""
    model, x = make_model_and_input()
    plan = autotp.plan(model, tp=TP, example_inputs={"x": x}, training=True, overrides=overrides)
    if not overrides:
        print(plan)
    ranks = run_on_ranks(TP, run_rank, overrides)
    predicted = {
        phase: [(c.kind, c.payload_bytes) for c in plan.collectives if c.phase == phase]
        for phase in ("forward", "backward")
    }
    executed = [sorted(rank["executed"]) for rank in ranks]
    worst = {
        key: max(rank[key] for rank in ranks)
        for key in ("error", "gradient_error", "bytes", "seconds")
    }
    counted = executed == TP * [sorted(predicted["forward"] + predicted["backward"])]
    equal = max(worst["error"], worst["gradient_error"]) <= TOLERANCE
    return {
        "up, down": ", ".join(plan.parameters[f"{name}.weight"].layout for name in ("up", "down")),
        "predicted forward": format_total(predicted["forward"]),
        "predicted backward": format_total(predicted["backward"]),
        "executed in total": format_total(executed[0]),
        "milliseconds per step": f"{1e3 * worst['seconds']:.1f}",
        "error of the output": f"{worst['error']:.1e}",
        "error of gradients": f"{worst['gradient_error']:.1e}",
        "parameters per rank": f"{worst['bytes'] / 1e6:.2f} of {count_bytes(model) / 1e6:.2f} MB",
        "equals unsharded": "yes" if counted and equal else "NO",
    }


def main() -> int:
    """Prints both layouts side by side; 1 if either is wrong."""
    found, forced = make_column({}), make_column(ARTICLE)
    print(f"\n{'tp ' + str(TP):<20} {'found by autotp':<40} figure 3, forced")
    for key, text in found.items():
        print(f"{key:<20} {text:<40} {forced[key]}")
    print(WHY)
    return 0 if found["equals unsharded"] == forced["equals unsharded"] == "yes" else 1


if __name__ == "__main__":
    sys.exit(main())
