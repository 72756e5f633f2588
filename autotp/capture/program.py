"""A captured forward: one flat FX graph, and what is needed to run it on the model's own modules.

FX is not wrapped: `graph` is a plain `torch.fx.Graph` whose parameters and buffers are `get_attr`
nodes with the model's own dotted names, whose placeholders are the tensor inputs, and whose output
is a flat tuple. Every tensor-valued node has `meta["val"]` (a FakeTensor or meta tensor with
symbolic sizes) and, where torch.export provides them, `nn_module_stack` and `stack_trace`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

LOGITS_TO_KEEP: Final = "logits_to_keep"
"""The argument that says for which tokens to return logits: how many of the last, or positions."""
TOKEN_INPUTS: Final = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""The arguments for new tokens; of several, those of the decoder come first."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on the inputs under which the graph is valid: a Python expression over `L`.

    Example: `Guard("L['attention_mask'].size()[1] == L['input_ids'].size()[1]")`.
    """

    expression: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor of a cache among the outputs.

    - `path`: in the cache, e.g. `layers.0.keys`; `taken`: the input that it replaces in the next
      call, empty if the cache is new in this one.
    """

    path: str
    taken: str


@dataclass(frozen=True, slots=True)
class Program:
    """One variant of a model's forward.

    - `inputs`: the names of the tensor inputs, flattened, in the order of the graph's placeholders;
      each leaf of a nested input (a tuple of tensors) has its own name: `name.0`, `name.1`.
    - `constants`: the non-tensor inputs (`use_cache=False`), by leaf name; they are baked into the
      graph.
    - `out_spec`: rebuilds the model's own output from the graph's flat tuple.
    - `lifted`: tensors that the forward made as constants, by their `get_attr` name
      (`_const_<hash>`); those of a model on the meta device have no values.
    - `tied`: for each alias of a parameter, the name that the graph uses.
    - `data_dims`: for each tensor input, the dims whose size belongs to the data (batch, sequence):
      they are never sharded, even where the capture had to fix their size.
    - `dynamic`: False if the sequence length had to be fixed; `reason` says why.
    - `training`: whether the model was in train mode.
    - `baked`: the numbers of the forward hooks that the graph contains.
    - `carried`: the outputs, by number, that are tensors of a cache.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    out_spec: pytree.TreeSpec
    lifted: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    data_dims: Mapping[str, tuple[int, ...]]
    guards: tuple[Guard, ...]
    dynamic: bool
    reason: str
    training: bool
    baked: frozenset[int] = frozenset()
    carried: Mapping[int, Carried] = field(default_factory=dict[int, Carried])


def name_leaves(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of the inputs by name: `name`, or `name.0`, `name.1` … for a nested input.

    Example: `name_leaves({"x": a, "pair": (b, c)})` is `{"x": a, "pair.0": b, "pair.1": c}`.
    """
    leaves: dict[str, Any] = {}
    for name, value in inputs.items():
        flat, spec = pytree.tree_flatten(value)
        leaves |= (
            {name: value} if spec.is_leaf() else {f"{name}.{i}": v for i, v in enumerate(flat)}
        )
    return leaves


def list_tensor_leaves(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The leaves of `name_leaves` that are tensors."""
    leaves = name_leaves(inputs)
    return {k: v for k, v in leaves.items() if isinstance(v, torch.Tensor)}


def find_broken_guard(program: Program, inputs: Mapping[str, Any]) -> Guard | None:
    """The first guard of `program` that `inputs` violate; None if its graph is valid for them.

    Constraints:
    - `inputs` has every tensor input of the program, nested as the model takes it.
    """
    return find_first_broken(program.guards, inputs)


def find_first_broken(guards: Iterable[Guard], inputs: Mapping[str, Any]) -> Guard | None:
    """The first of `guards` that `inputs` violate."""
    scope = {"L": inputs, "torch": torch, "math": math}
    every = tuple(guards)
    if eval(
        _compile_guard(_combine_guards(every)), scope
    ):  # all in one expression: there may be hundreds
        return None
    return next((g for g in every if not eval(_compile_guard(g.expression), scope)), None)


@lru_cache(maxsize=256)
def _combine_guards(guards: tuple[Guard, ...]) -> str:
    return " and ".join(f"({guard.expression})" for guard in guards) or "True"


@lru_cache(maxsize=1024)
def _compile_guard(expression: str) -> CodeType:
    return compile(expression, "<guard>", "eval")
