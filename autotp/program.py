"""A captured forward pass: one flat FX graph with what is needed to run it on the model's own tree.

FX is not wrapped: `graph` is a plain `torch.fx.Graph` whose parameters and buffers are `get_attr`
nodes with the model's own dotted names, whose placeholders are the tensor inputs that were given,
and whose output is a flat tuple. Every tensor-valued node has `meta["val"]` (a FakeTensor or meta
tensor with symbolic sizes) and, where torch.export gave them, `nn_module_stack` and `stack_trace`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["Guard", "Program"]


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on input sizes under which the graph is the model's; a Python expression over `L`."""

    expression: str
    input_name: str


@dataclass(frozen=True, slots=True)
class Program:
    """One variant of a model's forward.

    - `inputs`: names of the tensor inputs, flattened, in the order of the graph's placeholders; a
      nested input (a tuple of tensors) appears once a leaf, as `name.0`, `name.1`.
    - `constants`: the non-tensor inputs that were given (`use_cache=False`), baked into the graph.
    - `out_spec`: rebuilds the model's own output from the graph's flat tuple.
    - `lifted`: tensors that the forward made as constants, by their `get_attr` name (`_const_<hash>`).
    - `tied`: alias parameter name to the one name that the graph uses.
    - `data_dims`: for each tensor input, the dims whose size belongs to the data (batch, sequence):
      never split over the group, even where the capture had to fix them.
    - `dynamic`: False when the sequence had to be fixed; `reason` says why.
    - `training`: the model's mode (dropout) when captured.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    lifted: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    data_dims: Mapping[str, tuple[int, ...]]
    guards: tuple[Guard, ...]
    dynamic: bool
    reason: str
    training: bool
