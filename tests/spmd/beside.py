"""A model run by all ranks of a group beside the whole model: what both give, and how they differ.

What runs on a rank (`sharded_runs`) knows only the public interface; the comparison knows only the
plan's `parameters` and `collectives`, as a stranger would.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autotp
from autotp.records.plan import Plan
from tests.models import build
from tests.spmd.tally import Tally

__all__ = [
    "DIVISIBLE_BY_3",
    "TOLERANCE",
    "Call",
    "Ran",
    "Traffic",
    "differences",
    "inputs_of",
    "loss_of",
    "predicted",
    "run",
    "sharded_runs",
    "wrong_gradients",
]

# float32 sums over a group are made in another order than in one matrix product: each rounds to
# 1.2e-7 of its terms, and 1e-5 of the largest value leaves room for those of a few layers
TOLERANCE = 1e-5
# a key's bias shifts all scores of a query alike, so its gradient is zero but for rounding: it is
# measured against a hundredth of the largest gradient of its module
FLOOR = 0.01
PADDING = 3
IGNORED = -100  # the label that takes part in no loss

DIVISIBLE_BY_3 = {
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    | {"intermediate_size": 144, "vocab_size": 513},
    "gpt_neox": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 144}
    | {"vocab_size": 513},
    "bloom": {"hidden_size": 96, "n_head": 6, "vocab_size": 513},
    "bert": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 144}
    | {"vocab_size": 513},
    "t5": {"d_model": 96, "d_kv": 16, "d_ff": 144, "num_heads": 6, "vocab_size": 513},
    "mixtral": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    | {"intermediate_size": 144, "vocab_size": 513},
}
"""Sizes of the tiny models that 3 divides; the tiny models' own are divisible by 2 and 4."""


@dataclass(frozen=True)
class Call:
    """One call: sizes, and which inputs are present beside the main one."""

    batch: int
    sequence: int
    padded: bool = False
    labels: bool = True
    mask: bool = True
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Ran:
    """What one call gave: output tensors, gradients by parameter, collectives by phase."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    traffic: dict[str, list[tuple[str, int]]] = field(
        default_factory=dict[str, list[tuple[str, int]]]
    )

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each kind ran in each phase."""
        return Counter((kind, phase) for phase, ran in self.traffic.items() for kind, _ in ran)

    def payloads(self) -> Counter[tuple[str, str, int]]:
        """The same, with the bytes of each."""
        return Counter((kind, phase, n) for phase, ran in self.traffic.items() for kind, n in ran)


class Traffic(Tally):
    """A tally that also keeps each collective's largest tensor in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = self.kinds.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.ran += [(kind, max(_bytes(args[0]), _bytes(result))) for kind in self.kinds - before]
        return result


def inputs_of(name: str, call: Call) -> dict[str, Any]:
    """The keyword inputs of one call of the tiny model `name`."""
    generator = torch.Generator().manual_seed(call.seed)
    main = torch.randint(3, 500, (call.batch, call.sequence), generator=generator)
    if name == "hand":
        return {"ids": main}
    inputs: dict[str, Any] = {"input_ids": main}
    mask = torch.ones_like(main)
    if call.padded:
        mask[0, :PADDING] = 0
    if call.mask:
        inputs["attention_mask"] = mask
    answers = main.masked_fill(mask == 0, IGNORED)
    if name == "t5":
        answers = main[:, PADDING:].contiguous()
        inputs["decoder_input_ids"] = answers.flip(1)
    if call.labels:
        inputs["labels"] = answers
    return inputs | dict(call.more)


def run(model: nn.Module, inputs: Mapping[str, Any], *, backward: bool) -> Ran:
    """One call of `model`, whole or sharded, with the collectives it ran."""
    model.zero_grad()
    with Traffic() as forward:
        outputs = model(**inputs)
    ran = Ran([t.detach() for t in _tensors(outputs)], traffic={"forward": forward.ran})
    if backward:
        with Traffic() as behind:
            loss_of(outputs).backward()
        ran.traffic["backward"] = behind.ran
        named = model.named_parameters()
        ran.gradients = {n: p.grad for n, p in named if p.grad is not None}
    model.zero_grad()
    return ran


def sharded_runs(
    rank: int,
    world: int,
    name: str,
    sizes: Mapping[str, Any],
    training: bool,
    calls: Sequence[Call],
) -> tuple[str, list[Ran]]:
    """The plan as JSON and what each call gave on this rank; the first call prices the plan."""
    model, _ = build(name, **sizes)
    asked = inputs_of(name, calls[0])
    sharded = autotp.parallelize(model, world, example_inputs=asked, training=training)
    del model
    runs = [run(sharded, inputs_of(name, call), backward=training) for call in calls]
    return sharded.plan.to_json(), runs


def predicted(plan: Plan) -> Counter[tuple[str, str]]:
    """How often the plan says each kind runs in each phase."""
    return Counter((c.kind, c.phase) for c in plan.collectives)


def loss_of(outputs: Any) -> Tensor:
    """The model's own loss, or else a fixed random projection of its first output."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first = _tensors(outputs)[0]
    generator = torch.Generator().manual_seed(1)
    return (first * torch.randn(first.shape, generator=generator, dtype=first.dtype)).mean()


def differences(whole: Sequence[Tensor], parts: Sequence[Tensor]) -> list[float]:
    """For each output the largest difference, relative to the largest value of the whole's."""
    assert [t.shape for t in whole] == [t.shape for t in parts]
    return [_relative(w, p, 0.0) for w, p in zip(whole, parts, strict=True)]


def wrong_gradients(
    plan: Plan, whole: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]], tolerance: float
) -> dict[str, float]:
    """The parameters whose gradient, joined over the ranks, is further off than `tolerance`.

    Constraints: a parameter that all ranks hold whole must have bit-equal gradients on all.
    """
    largest: dict[str, float] = defaultdict(float)
    for name, gradient in whole.items():
        module = _module(name)
        largest[module] = max(largest[module], gradient.abs().max().item())
    wrong: dict[str, float] = {}
    for name, gradient in whole.items():
        joined = joined_over(plan, name, [rank[name] for rank in ranks])
        figure = _relative(gradient, joined, FLOOR * largest[_module(name)])
        if not figure <= tolerance:
            wrong[name] = figure
    return wrong


def joined_over(plan: Plan, name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor that the ranks' `parts` of parameter `name` make, by the plan's ranges."""
    record = plan.parameters[name]
    assert [shard.shape for shard in record.shards] == [tuple(part.shape) for part in parts]
    if record.dim is None:
        assert all(torch.equal(parts[0], part) for part in parts), name
        return parts[0]
    joined = torch.full(record.shape, float("nan"), dtype=parts[0].dtype)
    for shard, part in zip(record.shards, parts, strict=True):
        for (start, stop), piece in zip(
            shard.ranges, _pieces(part, record.dim, shard.ranges), strict=True
        ):
            joined.narrow(record.dim, start, stop - start).copy_(piece)
    return joined


def _pieces(part: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    yield from part.split([stop - start for start, stop in ranges], dim)


def _module(name: str) -> str:
    """The module around the one that has a parameter: `0.attention` of `0.attention.key.bias`."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _relative(whole: Tensor, found: Tensor, floor: float) -> float:
    scale = max(whole.abs().max().item(), floor)
    difference = (whole - found).abs().max().item()
    return difference / scale if scale else difference


def _tensors(outputs: Any) -> list[Tensor]:
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
