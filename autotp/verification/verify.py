"""The proof: a sharded model beside the whole one, all ranks in one process, figure by figure.

Compared are every output on every rank, and every parameter's gradient, joined as the plan says. A
figure is the largest difference over the largest value of the whole model's tensor. Sharding
changes the order of additions, so figures are small, not zero; what rounding may do is stated with
its reason, and a figure that comes near it is decided by a second run in float64, where rounding is
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
from autotp.verification.figures import Quantity, Figures
from autotp.verification.runs import Runs

__all__ = ["compare_ranks"]

_LISTED = 3


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """What figures of one dtype are held to.

    - `dtype`: of the computation; None: the model's own.
    - `tolerance`: what counts as right, with its `reason`; above `near`, float64 decides.
    - `negligible`: gradients below this part of the largest one are compared with that.
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
"""How much more than the ratio of the roundings one draw of them may differ from another."""
_NEGLIGIBLE = 1e-2
"""What is negligible among gradients where float64 is not to be had."""


def compare_ranks(
    whole: nn.Module,
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
    """The evidence that `models`, one a rank, equal `whole` for `inputs`.

    - `program` is what was captured of `whole`, `trace` what each value of the ranks' graphs is.
    - `gradients`: of the model's own loss, or of a projection of the outputs drawn by `seed`.
    - `dtype`: what is computed in; where it is not the model's own, it is put in its place.

    Constraints:
    - All hold values, `whole` and `models` the same ones, and are in the mode planned for.
    - Nothing is changed: parameters, their `.grad`, modes, the random state.
    """
    own = all(p.dtype == dtype for p in whole.parameters() if p.is_floating_point())
    measure = replace(_choose_tolerance(dtype), dtype=None if own else dtype)
    case = ComparisonCase(whole, models, program, inputs, trace, seed, measure.dtype)
    with torch.random.fork_rng(), torch.set_grad_enabled(gradients):
        return _Comparison(Runs(case, plan, gradients), measure, dtype).evidence()


def _choose_tolerance(dtype: torch.dtype) -> _Tolerance:
    """What figures computed in `dtype` are held to."""
    eps, word = torch.finfo(dtype).eps, dtype_name(dtype)
    if dtype == _EXACT.dtype:
        return _EXACT
    if eps > torch.finfo(torch.float32).eps:
        reason = f"8 roundings of {word}, of results and not of sums; float64 decides every figure"
        return _Tolerance(dtype, 8 * eps, 0.0, 0.0, reason)
    reason = (
        f"84 roundings of {word}: what {84**2} numbers added in another order may differ by; above "
        "a tenth of it float64 decides"
    )
    return _Tolerance(dtype, 84 * eps, 8.4 * eps, 0.0, reason)


class _Comparison:
    """One comparison: the run asked for, the one in float64, the search for the fault."""

    def __init__(self, runs: Runs, measure: _Tolerance, dtype: torch.dtype) -> None:
        self.runs, self.measure, self.dtype = runs, measure, dtype
        self.notes: list[str] = []

    def evidence(self) -> Evidence:
        """The figures, the verdict and, if it is bad, the first wrong node."""
        measure, fault = self.measure, None
        figures = self.runs.compared(measure.dtype, measure.negligible)
        wrong = figures.beyond(measure.tolerance)
        near = figures.beyond(measure.near)
        exact = self._exact(near) if near else None
        if exact is not None:
            limit = self._limit(figures)
            wrong = near & exact.beyond(limit)
            figures = self._decided(figures, exact, near, limit)
            measure = replace(_EXACT, tolerance=limit)
        if wrong or figures.failure:
            fault = self._fault(figures, wrong, measure)
        elif self.measure.dtype is not None:  # so far only its program stood for the model
            fault = self._capture_fault()
        return self._evidence(figures, fault)

    def _capture_fault(self) -> str | None:
        """Why the program is not the model in the model's own dtype; None when it is."""
        whole = self.runs.case.whole
        kinds = {p.dtype for p in whole.parameters() if p.is_floating_point()}
        coarsest = max(kinds or {self.dtype}, key=lambda dtype: torch.finfo(dtype).eps)
        return self.runs.capture_fault(_NEGLIGIBLE, _choose_tolerance(coarsest).tolerance) or None

    def _exact(self, near: Set[Quantity]) -> Figures | None:
        """The figures in float64; None, with a note, where there are none to be had."""
        runs, measure = self.runs, self.measure
        exact = Figures()
        try:
            exact = runs.compared(_EXACT.dtype, _EXACT.negligible)
            reason = exact.failure
            if not reason and measure.dtype is None:
                reason = runs.capture_fault(_NEGLIGIBLE, measure.tolerance)
        except VerifyError as error:
            reason = str(error)
        if not reason:
            return exact
        self.notes.append(f"float64 could not settle {len(near)} figures: {reason}")
        return None

    def _limit(self, figures: Figures) -> float:
        """What rounding may make of a figure in float64.

        A model whose gradients explode makes much of any rounding: what is all of the largest value
        in float32 is then 2⁻²⁹ of it in float64, give or take. A fault does not shrink.
        """
        worst = min(figures.worst(_EXACT.negligible), 1.0)
        shrunk = torch.finfo(torch.float64).eps / torch.finfo(self.dtype).eps
        return max(_EXACT.tolerance, _ROUNDING_SPREAD * shrunk * worst)

    def _decided(
        self, figures: Figures, exact: Figures, near: Set[Quantity], limit: float
    ) -> Figures:
        """The figures, those near the tolerance replaced by those in float64."""
        shown = sorted(near, key=lambda about: -figures.gaps[about].relative)[:_LISTED]
        before_after = [
            f"{about} {figures.gaps[about].relative:.1e} → {exact.gaps[about].relative:.1e}"
            for about in shown
        ]
        self.notes.append(
            f"{len(near)} figures above {self.measure.near:.1e} were decided in "
            f"float64, held to {limit:.0e}: {', '.join(before_after)}"
        )
        gaps = {about: (exact if about in near else figures).gaps[about] for about in figures.gaps}
        return replace(figures, gaps=gaps)

    def _fault(self, figures: Figures, wrong: Set[Quantity], measure: _Tolerance) -> str:
        """The first wrong node; the worst figure where no single node is to blame."""
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

    def _drawing(self) -> str:
        """Why a split value may differ without any fault; empty where nothing is drawn."""
        program = self.runs.case.program
        tagged = (getattr(n.target, "tags", ()) for n in program.graph.nodes)
        count = sum(torch.Tag.nondeterministic_seeded in tags for tags in tagged)
        if not (program.training and count):
            return ""
        return (
            f"the model is in train mode and {count} of its ops may draw random numbers; where a "
            "value is split, ranks draw others than the whole model. Compare in eval mode"
        )

    def _evidence(self, figures: Figures, fault: str | None) -> Evidence:
        plan, seen = self.runs.plan, +figures.collectives
        phases = ("forward", "backward") if self.runs.gradients else ("forward",)
        planned = (c for c in plan.collectives if c.phase in phases)
        predicted = Counter(f"{c.phase} {c.kind}" for c in planned)
        if fault is not None and (drawing := self._drawing()):
            self.notes.append(drawing)
        if predicted != seen and not figures.failure:
            self.notes.append(f"predicted are {dict(predicted)}, executed {dict(seen)}")
        outputs = figures.of("output").values()
        return Evidence(
            ok=fault is None and predicted == seen,
            tp=plan.tp,
            max_abs_error=max((gap.absolute for gap in outputs), default=math.inf),
            max_rel_error=max((gap.relative for gap in outputs), default=math.inf),
            tolerance=self.measure.tolerance,
            tolerance_reason=self.measure.reason,
            gradients={name: gap.relative for name, gap in figures.of("gradient").items()},
            collectives_predicted=dict(sorted(predicted.items())),
            collectives_seen=dict(sorted(seen.items())),
            first_divergence=fault,
            replicated_fraction=plan.replicated_fraction,
            dtype=dtype_name(self.dtype),
            notes=tuple(self.notes),
        )
