"""Selects the graph of a call: arguments become named inputs, and these, with the mode, a key.

A model has one graph for each combination of inputs present, mode and constants; sizes are free,
except where a guard of the graph fixes them.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheSpec, CacheState, make_mark
from autotp.capture.conditions import Condition
from autotp.capture.program import Program, find_broken_guard, name_leaves
from autotp.errors import CaptureError
from autotp.records.plan import Plan
from autotp.runtime.cache_shards import slice_caches
from autotp.runtime.codegen.function import Function, compile_graph
from autotp.runtime.layered_graph import LayeredGraph
from autotp.runtime.logits_to_keep import select_positions, takes_positions

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of a model's forward: names in order, defaults, whether it takes any name.

    - `implied`: constants with which every graph is captured unless the call gives others.
    - `takes_positions`: the tokens of which it returns logits may be given by position.
    """

    model: str
    names: tuple[str, ...]
    defaults: Mapping[str, object]
    takes_any: bool
    implied: Mapping[str, object]
    takes_positions: bool

    @staticmethod
    def of(model: nn.Module) -> "Signature":
        """Read the signature of the forward of `model`'s class, under the model's configuration."""
        every = inspect.signature(type(model).forward).parameters
        parameters = list(every.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = tuple(p.name for p in named)
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        implied, positions = _find_implied(model, names), takes_positions(every)
        return Signature(type(model).__name__, names, defaults, takes_any, implied, positions)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the arguments to names, without those that change nothing.

        Example: `bind((ids,), {"labels": None, "use_cache": False})` is `{"input_ids": ids}`.
        """
        if len(args) > len(self.names):
            raise CaptureError(
                f"{self.model}: it was called with {len(args)} positional arguments, but its "
                f"forward takes {len(self.names)}. Pass them by name."
            )
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            self._check_name(name, given)
            given[name] = value
        given = {name: value for name, value in given.items() if not self._is_idle(name, value)}
        return self._select_positions(given)

    def add_implied(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the implied constants for a capture, e.g. `use_cache=False`, which avoids a cache."""
        idle = {name: value for name, value in self.implied.items() if name in self.names}
        return self._select_positions(idle | dict(inputs))

    def _select_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return dict(select_positions(inputs)) if self.takes_positions else inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "Signature":
        """Return the signature itself, which has no state."""
        return self

    def _check_name(self, name: str, given: Mapping[str, Any]) -> None:
        if name in given:
            raise CaptureError(
                f"{self.model}: {name!r} is given twice, by position and by name. Leave one out."
            )
        if name not in self.names and not self.takes_any:
            raise CaptureError(
                f"{self.model}: its forward does not take {name!r}, only {', '.join(self.names)}. "
                "Leave it out."
            )

    def _is_idle(self, name: str, value: object) -> bool:
        """Whether the forward would use `value` for `name` without the argument."""
        if not isinstance(value, CONSTANTS):
            return False
        if name in self.implied and value is not None:
            return _is_same(value, self.implied[name])
        return name in self.defaults and _is_same(value, self.defaults[name])


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One graph of a sharded model: `function(model, *inputs)` returns its flat outputs.

    - `key`: the calls that it is for; variants with different guards may share a key.
    - `graph`: the root's graph as it runs, in which each layer is called with its variant as a
      constant.
    - `conditions`: the program's guards as functions, which a compiler can trace.
    - `shorter`: functions with equal results under their conditions, the shortest first.
    """

    key: str
    program: Program
    outlined: LayeredGraph
    plan: Plan
    graph: fx.Graph
    function: Function
    conditions: tuple[Callable[..., bool], ...]
    shorter: tuple[tuple[tuple[Condition, ...], Function], ...]

    @staticmethod
    def of(
        key: str,
        program: Program,
        outlined: LayeredGraph,
        plan: Plan,
        graph: fx.Graph,
        shorter: Sequence[tuple[frozenset[Condition], fx.Graph]],
    ) -> "Variant":
        """Make the variant that runs `graph`, the root's, with its function and conditions."""
        guards = (f"lambda L, torch, math: {guard.expression}" for guard in program.guards)
        conditions = tuple(map(eval, guards))
        functions = tuple((tuple(c), compile_graph(g)) for c, g in shorter)
        return Variant(
            key, program, outlined, plan, graph, compile_graph(graph), conditions, functions
        )

    def accepts(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the guards of the graph hold for `inputs`."""
        if torch.compiler.is_compiling():  # a compiler turns plain code into guards of its own
            return all(condition(inputs, torch, math) for condition in self.conditions)
        return find_broken_guard(self.program, inputs) is None

    def run(self, model: nn.Module, inputs: Mapping[str, Any], rank: int, granted: int) -> Any:
        """Run the forward on `inputs`, with this `rank`'s shards of caches.

        - `granted`: the number of the shorter function that a compiled call runs.
        """
        if self.plan.caches and not torch.compiler.is_compiling():
            inputs = slice_caches(inputs, self.plan.caches, rank, self.plan.tp)
        leaves = name_leaves(inputs)
        known = granted if torch.compiler.is_compiling() else 0
        number = known or self.find_shorter(leaves)
        run = self.shorter[number - 1][1] if number else self.function
        # without a backward pass in the plan, torch must raise if someone asks for gradients
        with torch.set_grad_enabled(self.plan.training and torch.is_grad_enabled()):
            flat = run(model, *[leaves[name] for name in self.program.inputs])
        return pytree.tree_unflatten(flat, self.program.out_spec)

    def find_shorter(self, leaves: Mapping[str, Any]) -> int:
        """Find the number, from 1, of the shortest function for these inputs; 0 for none."""
        for number, (conditions, _) in enumerate(self.shorter, 1):
            if all(condition.holds(leaves) for condition in conditions):
                return number
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variant":
        """Return the variant itself, which has no state."""
        return self


def find_key(model: str, inputs: Mapping[str, Any], mode: str) -> str:
    """Find the key of a call: tensors by name, constants with values, then the mode.

    A tensor that requires a gradient is marked: ranks must sum that gradient too.

    Example: `"attention_mask, input_ids, logits_to_keep=1 · eval"`.
    """
    items: list[str] = []
    for name, value in inputs.items():
        if not isinstance(value, (torch.Tensor, *CONSTANTS)):
            items.append(f"{name}: {_describe_structure(pytree.tree_structure(value))}")
    others = {name: v for name, v in inputs.items() if not isinstance(v, CacheState)}
    for name, leaf in name_leaves(others).items():
        if isinstance(leaf, torch.Tensor):
            items.append(f"{name} with gradient" if leaf.requires_grad else name)
        elif isinstance(leaf, CONSTANTS):
            items.append(f"{name}={leaf!r}")
        else:
            raise CaptureError(
                f"{model}: the input {name!r} is of type {type(leaf).__name__}. A graph takes "
                "tensors (also in tuples, lists, dicts and caches), numbers, strings and "
                "dtypes. Pass one of these."
            )
    return f"{', '.join(sorted(items))} · {mode}"


def _describe_structure(spec: pytree.TreeSpec) -> str:
    """Describe nested values in a form that a compiler can trace: `tuple(*, *)`."""
    if spec.is_leaf():
        return "*"
    if isinstance(spec.context, CacheSpec):
        return make_mark(spec.context)
    items = [_describe_structure(spec.child(i)) for i in range(spec.num_children)]
    return f"{spec.type.__name__}({', '.join(items)})"


def describe_mode(model: nn.Module) -> str:
    """Describe the mode: `train` or `eval`, then the submodules whose mode differs.

    Example: `"train, encoder eval"` after `model.encoder.eval()`.
    """
    return ", ".join(
        [_name_mode(model), *(f"{path} {_name_mode(m)}" for path, m in _list_switched(model, ""))]
    )


def _list_switched(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """List the submodules whose mode differs from that of their parent."""
    for name, child in module.named_children():
        if child.training != module.training:
            yield f"{path}{name}", child
        yield from _list_switched(child, f"{path}{name}.")


def _name_mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _find_implied(model: nn.Module, names: tuple[str, ...]) -> dict[str, object]:
    """Find the constants that a configuration implies: no cache, named outputs."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    implied: dict[str, object] = {}
    if "use_cache" in names and (hasattr(config, "use_cache") or hasattr(text, "use_cache")):
        implied["use_cache"] = False
    if getattr(config, "return_dict", False) is True:
        implied["return_dict"] = True
    return implied


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other
