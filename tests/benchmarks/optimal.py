"""Every plan against HiGHS on an independent formulation, level by level; exit 1 if they differ.

python -m tests.benchmarks.optimal --layers 2
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence

from autotp.solver.problem import LEVELS
from autotp.solver.solve import solve
from tests.models import names
from tests.oracle import optimum
from tests.random_plans import analysed


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(names()), help="names in tests.models")
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    print(f"costs are {', '.join(LEVELS)}")
    agreed = [
        _agree(name, tp, training, chosen.layers)
        for name in chosen.models.split(",")
        for tp in (2, 4)
        for training in (False, True)
    ]
    print(f"{len(agreed)} problems, {agreed.count(False)} differ")
    return 0 if all(agreed) else 1


def _agree(name: str, tp: int, training: bool, layers: int) -> bool:
    work = copy.copy(analysed(name, layers=layers))
    work.training = training
    problem = work.posed(tp).problem
    found, started = solve(problem), time.process_time()
    other = optimum(problem)
    seconds = time.process_time() - started
    words = f"{name:<10} tp {tp} {'training' if training else 'inference'}"
    verdict = "equal" if other == found.cost else f"HiGHS {other}"
    print(f"{words:<26} {seconds:6.1f} s  {found.cost} {verdict}", flush=True)
    return other == found.cost


if __name__ == "__main__":
    sys.exit(main())
