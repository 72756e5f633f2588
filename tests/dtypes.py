"""What autotp makes of a model in float32, compared with what it makes of it in bfloat16.

A model in bfloat16 converts: a norm computes in float32, and its result goes back. Such a value is
summed or gathered in the narrower dtype, on that side of the conversion where it has it, while in
float32 both sides cost the same. So the cheapest plans may differ by what bytes cost; nothing else
may make a difference. Two comparisons say so: of the plans as they are, and of those in which every
floating element counts as four bytes, whatever its dtype.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.capture.program import list_tensor_leaves
from autotp.capture.sizes import Pricing
from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.errors import AutotpError
from autotp.options import read_request
from autotp.records.plan import BUCKET, Plan
from tests import zoo

DTYPES = (torch.float32, torch.bfloat16)
CONVERSIONS = {"aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default"}
"""Ops that may be there in one dtype only."""

KERNEL = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""What Transformers calls in bfloat16, and what in its place in other dtypes."""


class Elements(Pricing):
    """Bytes of values as they would be with every floating element of four bytes."""

    def count_bytes(self, meta: torch.Tensor) -> int:
        """The bytes of the unsharded tensor."""
        own = super().count_bytes(meta)
        return own // meta.element_size() * 4 if meta.is_floating_point() else own

    def count_sum_bytes(self, meta: torch.Tensor) -> int:
        """The same."""
        return self.count_bytes(meta)


@dataclass(frozen=True, slots=True)
class Compared:
    """How float32 and bfloat16 differ, a line a difference.

    - `by_bytes`: the plans as they are. `by_elements`: where those differ, the plans in which every
      floating element counts as four bytes; differences here are faults.
    - `error`: the type of an error that both dtypes raise.
    """

    by_bytes: tuple[str, ...] = ()
    by_elements: tuple[str, ...] = ()
    error: str = ""


def compare(model_type: str, task: str, *, training: bool, tp: int = 2) -> Compared:
    """The differences between the dtypes of one model of the zoo."""
    compilers = [_compiler(model_type, task, dtype, training) for dtype in DTYPES]
    wide, narrow = compilers
    if isinstance(wide, str) or isinstance(narrow, str):
        kinds = [c if isinstance(c, str) else "no error" for c in compilers]
        if wide == narrow:
            return Compared(error=kinds[0])
        return Compared(by_elements=(f"{kinds[0]} in float32, {kinds[1]} in bfloat16",))
    by_bytes = _differences(wide, narrow, tp)
    if not by_bytes:
        return Compared()
    for compiler in (wide, narrow):
        compiler.pricing = Elements(compiler.program, list_tensor_leaves(compiler.inputs))
    return Compared(by_bytes, _differences(wide, narrow, tp))


def _compiler(
    model_type: str, task: str, dtype: torch.dtype, training: bool
) -> ModelCompiler | str:
    """The model captured and analysed, or the type of the error that this raises."""
    model, inputs = zoo.build(model_type, task)
    given = {n: _converted(value, dtype) for n, value in inputs.items()}
    model.to(dtype).train(training)
    try:
        return ModelCompiler.of(model, read_request(example_inputs=given, training=training))
    except AutotpError as error:
        return type(error).__name__


def _converted(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def _differences(wide: ModelCompiler, narrow: ModelCompiler, tp: int) -> tuple[str, ...]:
    return tuple(_different(wide.compile(tp, "tp"), narrow.compile(tp, "tp")))


def _different(wide: CompiledVariant, narrow: CompiledVariant) -> Iterator[str]:
    yield from _unequal("layout", _layouts(wide.plan), _layouts(narrow.plan))
    one, two = _payloads(wide.plan), _payloads(narrow.plan)
    counts = [{key: len(sizes) for key, sizes in side.items()} for side in (one, two)]
    yield from _unequal("collectives", *counts)
    for key in sorted(one.keys() & two.keys()):
        pairs = zip(one[key], two[key], strict=False)
        if any(not _is_same_number(a, b, bucket=BUCKET in key) for a, b in pairs):
            yield f"payloads of {key}: {one[key]} bytes in float32, {two[key]} in bfloat16"
    yield from _unequal("op", _ops(wide.rewritten.graph), _ops(narrow.rewritten.graph))


def _layouts(plan: Plan) -> dict[str, object]:
    """How each parameter is laid out, and which ranges each rank stores."""
    return {
        name: (p.layout, p.dim, p.axis, p.gradient_partial, *(s.ranges for s in p.shards))
        for name, p in plan.parameters.items()
    }


def _payloads(plan: Plan) -> dict[str, list[int]]:
    """The bytes of every collective, in ascending order, by kind, phase and place."""
    found: dict[str, list[int]] = defaultdict(list)
    narrow, wide = "(_grouped_mm)", "(transformers)"
    for c in plan.collectives:
        found[f"{c.kind}, {c.phase}, {c.where.replace(narrow, wide)}"].append(c.payload_bytes)
    return {key: sorted(sizes) for key, sizes in found.items()}


def _is_same_number(wide: int, narrow: int, *, bucket: bool) -> bool:
    """Whether payloads are of as many elements: what a model computes in float32 anyway has as many
    bytes, all else half of them, and a bucket may hold both.
    """
    return wide <= 2 * narrow <= 2 * wide if bucket else wide in (narrow, 2 * narrow)


def _ops(graph: fx.Graph) -> Mapping[str, int]:
    """How often each op is called, conversions aside."""
    called = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return Counter(KERNEL[1] if op == KERNEL[0] else op for op in called if op not in CONVERSIONS)


def _unequal(what: str, wide: Mapping[str, object], narrow: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(wide.keys() | narrow.keys()):
        if wide.get(key) != narrow.get(key):
            yield f"{what} {key}: {wide.get(key)} in float32, {narrow.get(key)} in bfloat16"
