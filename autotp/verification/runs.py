"""The runs that a comparison needs: the whole model, its captured program, all its ranks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState, flatten_caches, rebuild_cache
from autotp.capture.program import name_leaves
from autotp.errors import VerifyError
from autotp.records.plan import Plan
from autotp.verification.bisection import ComparisonCase
from autotp.verification.figures import Figures, measure_gaps
from autotp.verification.measure import Results, list_outputs_besides_loss, measure_run
from autotp.verification.simulate.ranks import list_input_leaves

__all__ = ["Runs"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one case, each from the same random state; `gradients`: with a backward pass.

    A dtype of None means the model's own.
    """

    case: ComparisonCase
    plan: Plan
    gradients: bool

    def compared(self, dtype: torch.dtype | None, negligible: float) -> Figures:
        """The differences between the whole model and its ranks.

        Constraints: in its own dtype the model itself runs; in another one its program does, since
        a model's code may fix dtypes.
        """
        whole = self.model() if dtype is None else self.program(dtype)
        try:
            run = replace(self.case, dtype=dtype).run_ranks()
            ranks = measure_run(run.outputs, run.parameters, *self._loss)
        except VerifyError as error:
            return Figures(failure=str(error))
        return Figures(measure_gaps(whole, ranks, self.plan, negligible), run.collectives)

    def capture_fault(self, negligible: float, tolerance: float) -> str:
        """Why the captured program is not the model, in its own dtype; empty when it is."""
        gaps = measure_gaps(self.model(), [self.program(None)], None, negligible)
        worst = max(gaps, key=lambda about: gaps[about].relative)
        if gaps[worst].relative <= tolerance:
            return ""
        return f"the captured program is not the model: {worst}: {gaps[worst]}. Capture it again"

    def model(self) -> Results:
        """What the whole model's forward gives; hooks around it are around generated code too."""
        torch.manual_seed(self.case.seed)
        whole = self.case.whole
        # a forward fills the cache that it is given: each run has one of its own
        inputs = pytree.tree_map(_copy_cache, dict(self.case.inputs), is_leaf=_is_cache_state)
        output = flatten_caches(whole.forward(**inputs))
        leaves = list_input_leaves(name_leaves(self.case.inputs).items())
        return measure_run([output], [dict(whole.named_parameters()) | leaves], *self._loss)[0]

    def program(self, dtype: torch.dtype | None) -> Results:
        """What the captured program gives on the whole model.

        Constraints: raises VerifyError where a value cannot be had in `dtype`.
        """
        narrow: list[str] = []

        def observe(name: str, found: list[Tensor]) -> None:
            if dtype is not None and found[0].is_floating_point() and found[0].dtype != dtype:
                narrow.append(f"{name} is {found[0].dtype}")

        run = replace(self.case, dtype=dtype).run_program(observe=observe)
        if narrow:
            raise VerifyError(
                f"{narrow[0]} ({len(narrow)} values in all), computed in {dtype}: an op fixes its "
                "dtype. Compare in the model's own dtype"
            )
        return measure_run(run.outputs, run.parameters, *self._loss)[0]

    @property
    def _loss(self) -> tuple[int | None, frozenset[str]]:
        """The seed of what stands for a loss, and the outputs that are no part of the model's."""
        return self.case.seed if self.gradients else None, list_outputs_besides_loss(
            self.case.program
        )


def _is_cache_state(value: object) -> bool:
    return isinstance(value, CacheState)


def _copy_cache(value: object) -> object:
    """A flat cache as a real one with tensors of its own; anything else as it is."""
    if not isinstance(value, CacheState):
        return value
    return rebuild_cache(CacheState(value.spec, [leaf.clone() for leaf in value.leaves]))
