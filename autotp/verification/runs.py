"""The runs that a comparison needs: the unsharded model, its captured program, all its ranks."""

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


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one case, each from the same random state; `gradients`: with a backward pass.

    A dtype of None means the model's own.
    """

    case: ComparisonCase
    plan: Plan
    gradients: bool

    def compare(self, dtype: torch.dtype | None, negligible: float) -> Figures:
        """The differences between the unsharded model and its ranks.

        Constraints: in its own dtype the model itself runs; in another dtype its program does,
        because the code of a model may fix dtypes.
        """
        unsharded = self.run_model() if dtype is None else self.run_program(dtype)
        try:
            run = replace(self.case, dtype=dtype).run_ranks()
            ranks = measure_run(run.outputs, run.parameters, *self._loss)
        except VerifyError as error:
            return Figures(failure=str(error))
        return Figures(measure_gaps(unsharded, ranks, self.plan, negligible), run.collectives)

    def find_capture_fault(self, negligible: float, tolerance: float) -> str:
        """How the captured program differs from the model in its own dtype; "" if it does not."""
        gaps = measure_gaps(self.run_model(), [self.run_program(None)], None, negligible)
        worst = max(gaps, key=lambda about: gaps[about].relative)
        if gaps[worst].relative <= tolerance:
            return ""
        return (
            f"the captured program differs from the model: {worst}: {gaps[worst]}. Capture it again"
        )

    def run_model(self) -> Results:
        """The results of the model's forward, without its hooks, which generated code has too."""
        torch.manual_seed(self.case.seed)
        unsharded = self.case.unsharded
        # a forward updates its cache in place: each run has its own copy
        inputs = pytree.tree_map(_copy_cache, dict(self.case.inputs), is_leaf=_is_cache_state)
        output = flatten_caches(unsharded.forward(**inputs))
        leaves = list_input_leaves(name_leaves(self.case.inputs).items())
        return measure_run([output], [dict(unsharded.named_parameters()) | leaves], *self._loss)[0]

    def run_program(self, dtype: torch.dtype | None) -> Results:
        """The results of the captured program on the unsharded model.

        Raises VerifyError if a value cannot be computed in `dtype`.
        """
        narrow: list[str] = []

        def observe(name: str, found: list[Tensor]) -> None:
            if dtype is not None and found[0].is_floating_point() and found[0].dtype != dtype:
                narrow.append(f"{name} is {found[0].dtype}")

        run = replace(self.case, dtype=dtype).run_program(observe=observe)
        if narrow:
            raise VerifyError(
                f"{narrow[0]} although {dtype} was requested ({len(narrow)} such values in all): "
                "an op fixes its dtype. Compare in the model's own dtype"
            )
        return measure_run(run.outputs, run.parameters, *self._loss)[0]

    @property
    def _loss(self) -> tuple[int | None, frozenset[str]]:
        """The seed of the random projection, and the outputs that the model's loss ignores."""
        aside = list_outputs_besides_loss(self.case.program)
        return self.case.seed if self.gradients else None, aside


def _is_cache_state(value: object) -> bool:
    return isinstance(value, CacheState)


def _copy_cache(value: object) -> object:
    """A flat cache as a real one with copies of the tensors; anything else unchanged."""
    if not isinstance(value, CacheState):
        return value
    return rebuild_cache(CacheState(value.spec, [leaf.clone() for leaf in value.leaves]))
