"""Outputs and gradients of one run, unsharded or sharded, as plain names and tensors."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autotp.capture.program import Program
from autotp.errors import VerifyError

Output: TypeAlias = Any
"""What a model returns: a tensor, a tuple, a mapping, a class of its own."""


@dataclass(frozen=True, slots=True)
class Results:
    """The outputs and gradients of one rank, or of the unsharded model, by name.

    A parameter without a gradient has None.
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]


def measure_run(
    outputs: Sequence[Output],
    parameters: Sequence[Mapping[str, Tensor]],
    seed: int | None,
    aside: Set[str],
) -> list[Results]:
    """The results of all ranks: their outputs and, with a `seed`, their parameters' gradients.

    Constraints: no `.grad` is changed.
    """
    named = [name_tensors(output) for output in outputs]
    if seed is None:
        return [Results(_detach(tensors), {}) for tensors in named]
    trained = [{n: p for n, p in own.items() if p.requires_grad} for own in parameters]
    losses = [compute_loss(output, seed, aside) for output in outputs]
    found = compute_gradients(losses, [p for own in trained for p in own.values()])
    rest = iter(found)
    return [
        Results(_detach(tensors), {name: next(rest) for name in own})
        for tensors, own in zip(named, trained, strict=True)
    ]


def name_tensors(output: Output, name: str = "") -> dict[str, Tensor]:
    """The tensors of a model's output by name: `logits`, `hidden_states.0`; else `output`."""
    if isinstance(output, Tensor):
        return {name or "output": output}
    if isinstance(output, Mapping):
        items: list[tuple[object, Output]] = list(output.items())
    else:
        leaves = output if isinstance(output, tuple | list) else pytree.tree_leaves(output)
        items = list(enumerate(leaves))
        items = [] if len(items) == 1 and items[0][1] is output else items
    prefix = f"{name}." if name else ""
    found: dict[str, Tensor] = {}
    for key, item in items:
        found |= name_tensors(item, f"{prefix}{key}")
    return found


def list_outputs_besides_loss(program: Program) -> frozenset[str]:
    """The names of the outputs that the model's own loss does not depend on; empty without one."""
    nodes = cast(tuple[Any, ...], program.graph.output_node().args[0])
    leaves = [torch.empty(0) if isinstance(n, fx.Node) else n for n in nodes]
    output = pytree.tree_unflatten(leaves, program.out_spec)
    made = {id(leaf): node for leaf, node in zip(leaves, nodes, strict=True)}
    own = made.get(id(getattr(output, "loss", None)))
    if own is None:
        return frozenset()
    reached, todo = {own}, [own]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in reached]
        reached |= set(new)
        todo += new
    return frozenset(n for n, x in name_tensors(output).items() if made[id(x)] not in reached)


def compute_loss(output: Output, seed: int, aside: Set[str] = frozenset()) -> Tensor:
    """The model's own loss if its output has one, else a fixed random projection of the outputs.

    - `aside`: outputs that the model's own loss does not depend on; they are projected too.
    """
    own = getattr(output, "loss", None)
    has_loss = isinstance(own, Tensor) and own.requires_grad
    generator = torch.Generator().manual_seed(seed)
    terms = [
        (tensor * _draw_direction(tensor, generator)).sum()
        for name, tensor in name_tensors(output).items()
        if tensor.requires_grad and (name in aside or not has_loss)
    ]
    if isinstance(own, Tensor) and has_loss:
        terms.insert(0, own.sum())
    if not terms:
        raise VerifyError(
            f"{type(output).__name__}: none of its {len(name_tensors(output))} tensors depends on "
            "a parameter that requires grad, so there are no gradients to compare. Pass "
            "gradients=False"
        )
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def compute_gradients(losses: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the sum of all ranks' losses for `tensors`, in one backward pass.

    As in real processes, a rank's tensors affect other ranks' losses only through collectives.
    """
    if not tensors:
        return []
    return list(torch.autograd.grad(list(losses), list(tensors), allow_unused=True))


def _draw_direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (drawn / max(tensor.numel(), 1) ** 0.5).to(tensor.device, tensor.dtype)


def _detach(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}
