"""Runs an op without a row on unsharded random tensors, for comparison with shards."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from autotp.oprules.discover.call import OpaqueCall, Values, evaluate_size

DRAWS = (1.0, 0.0, 30.0, 3000.0)
"""The largest magnitude of random numbers; 0: they are from 0.5 to 2.

Large numbers reveal clamping; rounding dominates the gradients there, so that gradients are
compared for the small ones only.
"""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
_COARSE = 3e-2  # of narrower types


class Setting(NamedTuple):
    """The device and floating-point dtype of a trial; None: the dtype of each operand."""

    device: str
    dtype: torch.dtype | None
    gradients: bool


@dataclass(slots=True)
class Trial:
    """One run on unsharded tensors.

    - `values`: the sizes; `number`: of the draw.
    - `operands`, `results`, `given` (their gradients), `gradients` (of the operands).
    """

    call: OpaqueCall
    values: Values
    setting: Setting
    number: int
    operands: list[Tensor] = field(default_factory=list[Tensor])
    results: list[Tensor] = field(default_factory=list[Tensor])
    given: list[Tensor] = field(default_factory=list[Tensor])
    gradients: list[Tensor] = field(default_factory=list[Tensor])

    def find_obstacle(self) -> str:
        """Run the op; why the run is unusable, empty if it is usable."""
        generator = self.generator(0)
        self.operands = [self._sample(k, generator) for k in range(len(self.call.shapes))]
        before = [x.clone() for x in self.operands]
        self.results, again = self.run(self.operands, 1), self.run(self.operands, 2)
        if not all(torch.equal(x, y) for x, y in zip(before, self.operands, strict=True)):
            return "it writes to its operands"
        memory = {x.untyped_storage().data_ptr() for x in self.operands}
        if any(x.untyped_storage().data_ptr() in memory for x in self.results):
            return "its result shares memory with an operand"
        if not all(_is_same(x, y) for x, y in zip(self.results, again, strict=True)):
            return "two runs on equal operands differ"
        if reason := self._find_useless_results():
            return reason
        self.given = [self.noise(x, generator) for x in self.results]
        self.gradients = self.backward(self.operands, self.given)
        finite = all(bool(torch.isfinite(g).all()) for g in self.gradients)
        return "" if finite else "its gradients are not finite"

    def _find_useless_results(self) -> str:
        if [x.dim() for x in self.results] != [len(s) for s in self.call.results]:
            return "its results have other dims than in the model"
        floats = [x for x in self.results if x.is_floating_point()]
        if not all(bool(torch.isfinite(x).all()) for x in floats):
            return "its results on random numbers are not finite"
        if any(x.numel() > 1 and bool((x == x.flatten()[0]).all()) for x in floats):
            return "its results on random numbers are all the same"
        return ""

    @property
    def returns(self) -> bool:
        """Whether gradients are compared."""
        return self.setting.gradients and DRAWS[self.number % len(DRAWS)] <= 1

    def generator(self, purpose: int) -> torch.Generator:
        """A generator of the same numbers on every rank."""
        return torch.Generator().manual_seed(100 * purpose + self.number)

    def _sample(self, number: int, generator: torch.Generator) -> Tensor:
        shape = [evaluate_size(s, self.values) for s in self.call.shapes[number]]
        dtype, device = self.call.dtypes[number], self.setting.device
        if dtype == torch.bool:
            return (torch.rand(shape, generator=generator, device="cpu") < 0.7).to(device)
        if not dtype.is_floating_point:
            drawn = torch.randint(0, self._below(), shape, generator=generator, device="cpu")
            return drawn.to(device, dtype)
        unit = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        reach = DRAWS[self.number % len(DRAWS)]
        numbers = (unit * 2 - 1) * reach if reach else 0.5 + unit * 1.5
        return numbers.to(device, self.setting.dtype or dtype)

    def _below(self) -> int:
        """The exclusive bound of integers, which may be indices into any dim."""
        sizes = [evaluate_size(s, self.values) for shape in self.call.shapes for s in shape]
        return min((s for s in sizes if s > 1), default=2)

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Random numbers from -1 to 1, shaped like a tensor."""
        unit = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        dtype = like.dtype if like.is_floating_point() else torch.float64
        return (unit * 2 - 1).to(like.device, dtype)

    def run(self, tensors: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
        """The op's results on tensors."""
        torch.manual_seed(seed)
        with torch.no_grad(), _silence_warnings():
            return self.call.run(tensors, self.values)

    def backward(self, tensors: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of each operand; zeros where there is none."""
        if not self.returns:
            return [torch.zeros_like(x) for x in tensors]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        asking = [x for x in leaves if x.requires_grad]
        with torch.enable_grad(), _silence_warnings():
            made = self.call.run(leaves, self.values)
            pairs = [(y, g) for y, g in zip(made, given, strict=True) if y.requires_grad]
            found = iter(_compute_gradients(pairs, asking))
        return [next(found) if x.requires_grad else torch.zeros_like(x) for x in leaves]

    def agrees(self, found: Sequence[Tensor]) -> bool:
        """Whether these are the results on unsharded tensors."""
        return all(self.close(w, x) for w, x in zip(self.results, found, strict=True))

    def close(self, expected: Tensor, found: Tensor, scale: Tensor | None = None) -> bool:
        """Whether two tensors are equal, apart from rounding of numbers as large as `scale`."""
        if expected.shape != found.shape:
            return False
        if not expected.is_floating_point():
            return torch.equal(expected, found)
        if not expected.numel():
            return True
        reach = max(1e-3, float((expected if scale is None else scale).abs().max()))
        gap = float((expected.double() - found.double()).abs().max())
        return gap <= self._tolerance() * reach

    def _tolerance(self) -> float:
        types = [x.dtype for x in (*self.operands, *self.results) if x.is_floating_point()]
        return max((_TOLERANCE.get(t, _COARSE) for t in types), default=0.0)


def _compute_gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], asking: Sequence[Tensor]
) -> Sequence[Tensor]:
    if not (pairs and asking):
        return [torch.zeros_like(x) for x in asking]
    return torch.autograd.grad(
        [y for y, _ in pairs],
        asking,
        [g for _, g in pairs],
        allow_unused=True,
        materialize_grads=True,
    )


def _silence_warnings() -> AbstractContextManager[object]:
    """Suppress warnings of an op about random numbers."""
    return warnings.catch_warnings(action="ignore")


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
