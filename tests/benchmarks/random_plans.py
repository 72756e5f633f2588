"""Random plans over all models and tp, with and without gradients: a table, exit code 1 on a fault.

    python -m tests.benchmarks.random_plans --count 500 --seed 0

Each model is captured and analysed once. A line of the table is one model: how many plans were
proved, the part of the nodes that ran on a split axis, the largest difference, the seconds. A wrong
plan is told with the `Case` that draws it again.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.models import names
from tests.random_plans import Outcome, cases, outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=500, help="plans in all, at least")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--models", default=",".join(names()), help="names in tests.models")
    chosen = parser.parse_args(arguments)
    models = chosen.models.split(",")
    print(f"{'model':<10} {'plans':>5} {'wrong':>5} {'split':>6} {'worst':>8} {'seconds':>8}")
    found: list[Outcome] = []
    for model in models:
        started = time.monotonic()
        count = -(-chosen.count // len(models))
        found += (own := list(_run(model, count, chosen.seed)))
        print(_line(model, own, time.monotonic() - started), flush=True)
    return _verdict(found)


def _run(model: str, count: int, seed: int) -> Iterator[Outcome]:
    for outcome in outcomes(cases(model, count, seed)):
        if not outcome.ok:
            print(f"WRONG {outcome}", flush=True)
        yield outcome


def _line(model: str, found: Sequence[Outcome], seconds: float) -> str:
    wrong = sum(not o.ok for o in found)
    split = sum(o.split for o in found) / len(found)
    worst = max(o.worst for o in found)
    return f"{model:<10} {len(found):>5} {wrong:>5} {split:>6.1%} {worst:>8.1e} {seconds:>8.0f}"


def _verdict(found: Sequence[Outcome]) -> int:
    wrong = sum(not o.ok for o in found)
    kinds: Counter[str] = Counter()
    for outcome in found:
        kinds.update(outcome.kinds or {})
    print(f"{len(found)} random plans, {wrong} wrong")
    print("ops written: " + ", ".join(f"{n} {op}" for op, n in kinds.most_common()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
