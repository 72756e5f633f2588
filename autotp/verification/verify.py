"""Compares a sharded model with the unsharded one, all ranks in one process.

Every output on every rank is compared, and the gradient of every parameter, concatenated as the
plan says. A figure is the largest difference, relative to the largest value of the unsharded
tensor. Sharding changes the order of additions, so figures are small but not zero. The tolerance
comes with its reason; a figure close to it is decided by a second run in float64, where rounding is
a billion times smaller and a fault is as large as before.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autotp.capture.program import Program
from autotp.dtypes import dtype_name
from autotp.errors import VerifyError
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.records.trace import Trace
from autotp.runtime.model import ShardedModel
from autotp.verification.bisection import ComparisonCase, find_first_divergence
from autotp.verification.figures import Figures, Quantity
from autotp.verification.runs import Runs

_LISTED = 3


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The tolerance for figures of one dtype.

    - `dtype`: of the computation; None: the model's own.
    - `tolerance`: the largest right figure, with its `reason`; above `near`, float64 decides.
    - `negligible`: gradients below this fraction of the largest one are compared with it.
    """

    dtype: torch.dtype | None
    tolerance: float
    near: float
    negligible: float
    reason: str


_EXACT = _Tolerance(
    torch.float64,
    1e-9,
    math.inf,
    1e-5,
    "rounding of float64 stays below 1e-11, a fault does not",
)
_ROUNDING_SPREAD = 64
"""How far rounding errors may differ by chance from the ratio of the dtypes' precisions."""
_NEGLIGIBLE = 1e-2
"""What is negligible among gradients where float64 is not available."""


def compare_ranks(
    unsharded: nn.Module,
    models: Sequence[ShardedModel],
    inputs: Mapping[str, Any],
    plan: Plan,
    trace: Trace,
    *,
    program: Program,
    gradients: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Evidence:
    """The evidence whether `models`, one per rank, equal `unsharded` for `inputs`.

    - `program`: captured from `unsharded`; `trace`: how each value of the ranks' graphs is placed.
    - `gradients`: of the model's own loss, or of a random projection of the outputs by `seed`.
    - `dtype`: of the computation; replaces the model's own if it differs.

    Constraints:
    - `unsharded` and `models` have the same values, and are in the mode planned for.
    - Nothing is changed: parameters, their `.grad`, modes, the random state.
    """
    own = all(p.dtype == dtype for p in unsharded.parameters() if p.is_floating_point())
    measure = replace(_choose_tolerance(dtype), dtype=None if own else dtype)
    case = ComparisonCase(unsharded, models, program, inputs, trace, seed, measure.dtype)
    with torch.random.fork_rng(), torch.set_grad_enabled(gradients):
        return _Comparison(Runs(case, plan, gradients), measure, dtype).run()


def _choose_tolerance(dtype: torch.dtype) -> _Tolerance:
    """The tolerance for figures computed in `dtype`."""
    eps, name = torch.finfo(dtype).eps, dtype_name(dtype)
    if dtype == _EXACT.dtype:
        return _EXACT
    if eps > torch.finfo(torch.float32).eps:
        reason = f"8 roundings of {name}, of results and not of sums; float64 decides every figure"
        return _Tolerance(dtype, 8 * eps, 0.0, 0.0, reason)
    reason = (
        f"84 roundings of {name}, by which a sum of {84**2} numbers may differ when they are added "
        "in another order; above a tenth of it, float64 decides"
    )
    return _Tolerance(dtype, 84 * eps, 8.4 * eps, 0.0, reason)


class _Comparison:
    """One comparison: the requested run, the one in float64, the search for the fault."""

    def __init__(self, runs: Runs, measure: _Tolerance, dtype: torch.dtype) -> None:
        self.runs, self.measure, self.dtype = runs, measure, dtype
        self.notes: list[str] = []

    def run(self) -> Evidence:
        """The figures, the verdict and, if it is not ok, the first wrong node."""
        measure, fault = self.measure, None
        figures = self.runs.compare(measure.dtype, measure.negligible)
        wrong = figures.find_above(measure.tolerance)
        near = figures.find_above(measure.near)
        exact = self._compute_exact(near) if near else None
        if exact is not None:
            limit = self._find_limit(figures)
            wrong = near & exact.find_above(limit)
            figures = self._merge_figures(figures, exact, near, limit)
            measure = replace(_EXACT, tolerance=limit)
        if wrong or figures.failure:
            fault = self._find_fault(figures, wrong, measure)
        elif self.measure.dtype is not None:  # so far only the program of the model has run
            fault = self._find_capture_fault()
        return self._build_evidence(figures, fault)

    def _find_capture_fault(self) -> str | None:
        """How the program differs from the model in the model's own dtype; None if it does not."""
        unsharded = self.runs.case.unsharded
        kinds = {p.dtype for p in unsharded.parameters() if p.is_floating_point()}
        coarsest = max(kinds or {self.dtype}, key=lambda dtype: torch.finfo(dtype).eps)
        return (
            self.runs.find_capture_fault(_NEGLIGIBLE, _choose_tolerance(coarsest).tolerance) or None
        )

    def _compute_exact(self, near: Set[Quantity]) -> Figures | None:
        """The figures in float64; None, with a note, if they cannot be computed."""
        runs, measure = self.runs, self.measure
        exact = Figures()
        try:
            exact = runs.compare(_EXACT.dtype, _EXACT.negligible)
            reason = exact.failure
            if not reason and measure.dtype is None:
                reason = runs.find_capture_fault(_NEGLIGIBLE, measure.tolerance)
        except VerifyError as error:
            reason = str(error)
        if not reason:
            return exact
        self.notes.append(f"float64 could not decide {len(near)} figures: {reason}")
        return None

    def _find_limit(self, figures: Figures) -> float:
        """The tolerance in float64.

        A model with exploding gradients amplifies any rounding: a figure of 1 in float32 is then
        about 2⁻²⁹ in float64. A fault does not shrink.
        """
        worst = min(figures.find_worst(_EXACT.negligible), 1.0)
        shrunk = torch.finfo(torch.float64).eps / torch.finfo(self.dtype).eps
        return max(_EXACT.tolerance, _ROUNDING_SPREAD * shrunk * worst)

    def _merge_figures(
        self, figures: Figures, exact: Figures, near: Set[Quantity], limit: float
    ) -> Figures:
        """The figures, with those near the tolerance replaced by those in float64."""
        shown = sorted(near, key=lambda about: -figures.gaps[about].relative)[:_LISTED]
        before_after = [
            f"{about} {figures.gaps[about].relative:.1e} → {exact.gaps[about].relative:.1e}"
            for about in shown
        ]
        self.notes.append(
            f"{len(near)} figures above {self.measure.near:.1e} were decided in float64, with a "
            f"tolerance of {limit:.0e}: {', '.join(before_after)}"
        )
        gaps = {about: (exact if about in near else figures).gaps[about] for about in figures.gaps}
        return replace(figures, gaps=gaps)

    def _find_fault(self, figures: Figures, wrong: Set[Quantity], measure: _Tolerance) -> str:
        """The first wrong node; the worst figure if no single node is wrong."""
        case = replace(
            self.runs.case,
            dtype=measure.dtype,
            tolerance=measure.tolerance,
            negligible=measure.negligible or _NEGLIGIBLE,
        )
        found = find_first_divergence(case, gradients=self.runs.gradients and not figures.failure)
        if found or figures.failure:
            return found or figures.failure
        worst = max(wrong, key=lambda about: figures.gaps[about].relative)
        return f"no single node: {worst}: {figures.gaps[worst]}"

    def _explain_randomness(self) -> str:
        """Why a sharded value may differ without any fault; empty if nothing is random."""
        program = self.runs.case.program
        tagged = (getattr(n.target, "tags", ()) for n in program.graph.nodes)
        count = sum(torch.Tag.nondeterministic_seeded in tags for tags in tagged)
        if not (program.training and count):
            return ""
        return (
            f"the model is in train mode and {count} of its ops may draw random numbers; for a "
            "sharded value, ranks draw other numbers than the unsharded model. Compare in eval mode"
        )

    def _build_evidence(self, figures: Figures, fault: str | None) -> Evidence:
        plan, seen = self.runs.plan, +figures.collectives
        phases = ("forward", "backward") if self.runs.gradients else ("forward",)
        planned = (c for c in plan.collectives if c.phase in phases)
        predicted = Counter(f"{c.phase} {c.kind}" for c in planned)
        if fault is not None and (reason := self._explain_randomness()):
            self.notes.append(reason)
        if predicted != seen and not figures.failure:
            self.notes.append(f"predicted: {dict(predicted)}; executed: {dict(seen)}")
        outputs = figures.select("output").values()
        return Evidence(
            ok=fault is None and predicted == seen,
            tp=plan.tp,
            max_abs_error=max((gap.absolute for gap in outputs), default=math.inf),
            max_rel_error=max((gap.relative for gap in outputs), default=math.inf),
            tolerance=self.measure.tolerance,
            tolerance_reason=self.measure.reason,
            gradients={name: gap.relative for name, gap in figures.select("gradient").items()},
            collectives_predicted=dict(sorted(predicted.items())),
            collectives_seen=dict(sorted(seen.items())),
            first_divergence=fault,
            replicated_fraction=plan.replicated_fraction,
            dtype=dtype_name(self.dtype),
            notes=tuple(self.notes),
        )
