"""Which graph answers a call: arguments become named inputs, and those, with the mode, a key.

A model has one graph for each set of inputs present, each mode and each choice of constants; sizes
are free, except where a graph's guards say otherwise.
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

__all__ = ["Signature", "Variant", "find_key", "describe_mode"]

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model's forward takes: names in order, defaults, whether it takes any name at all.

    - `said`: constants that every graph is captured with unless told otherwise.
    - `takes_positions`: words to give logits of may be named by position.
    """

    model: str
    names: tuple[str, ...]
    defaults: Mapping[str, object]
    takes_any: bool
    said: Mapping[str, object]
    takes_positions: bool

    @staticmethod
    def of(model: nn.Module) -> "Signature":
        """The signature of the forward of `model`'s class, under the model's own configuration."""
        every = inspect.signature(type(model).forward).parameters
        parameters = list(every.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = tuple(p.name for p in named)
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        said, positions = _find_implied(model, names), takes_positions(every)
        return Signature(type(model).__name__, names, defaults, takes_any, said, positions)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, without those that change nothing.

        Example: `bind((ids,), {"labels": None, "use_cache": False})` is `{"input_ids": ids}`.
        """
        if len(args) > len(self.names):
            raise CaptureError(
                f"{self.model}: called with {len(args)} positional arguments, its forward names "
                f"{len(self.names)}. Pass them by name."
            )
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            self._check_name(name, given)
            given[name] = value
        given = {name: value for name, value in given.items() if not self._is_idle(name, value)}
        return self._selected(given)

    def spelled(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as a capture needs them: `use_cache=False` is said, else a cache comes out."""
        idle = {name: value for name, value in self.said.items() if name in self.names}
        return self._selected(idle | dict(inputs))

    def _selected(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return dict(select_positions(inputs)) if self.takes_positions else inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "Signature":
        """The signature itself: it holds no state."""
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
        """Whether the forward would take `value` for `name` without being told."""
        if not isinstance(value, CONSTANTS):
            return False
        if name in self.said and value is not None:
            return _is_same(value, self.said[name])
        return name in self.defaults and _is_same(value, self.defaults[name])


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One graph of a sharded model: `compile_graph(model, *inputs)` gives its flat outputs.

    - `key`: what it answers to; several variants share a key when their guards differ.
    - `graph`: the root's graph as it runs, each layer called with its variant as a constant.
    - `conditions`: the program's guards as functions, which a compiler can trace.
    - `shorter`: functions that give the same where their conditions hold, the shortest first.
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
        """The variant that runs `graph`, the root's, with its function and conditions."""
        guards = (f"lambda L, torch, math: {guard.expression}" for guard in program.guards)
        conditions = tuple(map(eval, guards))
        lesser = tuple((tuple(c), compile_graph(g)) for c, g in shorter)
        return Variant(
            key, program, outlined, plan, graph, compile_graph(graph), conditions, lesser
        )

    def holds(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the graph is the model's at the sizes of `inputs`."""
        if (
            torch.compiler.is_compiling()
        ):  # plain code, which a compiler turns into guards of its own
            return all(condition(inputs, torch, math) for condition in self.conditions)
        return find_broken_guard(self.program, inputs) is None

    def run(self, model: nn.Module, inputs: Mapping[str, Any], rank: int, granted: int) -> Any:
        """What the model's forward returns for `inputs`, with this `rank`'s part of caches."""
        if self.plan.caches and not torch.compiler.is_compiling():
            inputs = slice_caches(inputs, self.plan.caches, rank, self.plan.tp)
        leaves = name_leaves(inputs)
        known = granted if torch.compiler.is_compiling() else 0
        number = known or self.granted(leaves)
        run = self.shorter[number - 1][1] if number else self.function
        # gradients that the plan has no backward pass for would be wrong: torch tells who asks
        with torch.set_grad_enabled(self.plan.training and torch.is_grad_enabled()):
            flat = run(model, *[leaves[name] for name in self.program.inputs])
        return pytree.tree_unflatten(flat, self.program.out_spec)

    def granted(self, leaves: Mapping[str, Any]) -> int:
        """The number, from 1, of the shortest function that does for these inputs; 0 for none."""
        for number, (conditions, _) in enumerate(self.shorter, 1):
            if all(condition.holds(leaves) for condition in conditions):
                return number
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variant":
        """The variant itself: it holds no state."""
        return self


def find_key(model: str, inputs: Mapping[str, Any], mode: str) -> str:
    """The key of a call: tensors by name, constants with their value, then the mode (`describe_mode`).

    A tensor whose gradient is wanted says so: ranks must then join that gradient too.

    Example: `"attention_mask, input_ids, logits_to_keep=1 · eval"`.
    """
    words: list[str] = []
    for name, value in inputs.items():
        if not isinstance(value, (torch.Tensor, *CONSTANTS)):
            words.append(f"{name}: {_describe_structure(pytree.tree_structure(value))}")
    others = {name: v for name, v in inputs.items() if not isinstance(v, CacheState)}
    for name, leaf in name_leaves(others).items():
        if isinstance(leaf, torch.Tensor):
            words.append(f"{name} with gradient" if leaf.requires_grad else name)
        elif isinstance(leaf, CONSTANTS):
            words.append(f"{name}={leaf!r}")
        else:
            raise CaptureError(
                f"{model}: the input {name!r} is a {type(leaf).__name__}; a graph takes tensors "
                "(also in tuples, lists, dicts and caches), numbers, strings and dtypes. Pass one "
                "of those."
            )
    return f"{', '.join(sorted(words))} · {mode}"


def _describe_structure(spec: pytree.TreeSpec) -> str:
    """A nest of values in words, which a compiler can follow: `tuple(*, *)`."""
    if spec.is_leaf():
        return "*"
    if isinstance(spec.context, CacheSpec):
        return make_mark(spec.context)
    items = [_describe_structure(spec.child(i)) for i in range(spec.num_children)]
    return f"{spec.type.__name__}({', '.join(items)})"


def describe_mode(model: nn.Module) -> str:
    """The mode of a model: `train` or `eval`, then the submodules that are in the other one.

    Example: `"train, encoder eval"` where a part was frozen by `model.encoder.eval()`.
    """
    return ", ".join(
        [_name_mode(model), *(f"{path} {_name_mode(m)}" for path, m in _list_switched(model, ""))]
    )


def _list_switched(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that are not in the mode of the module around them."""
    for name, child in module.named_children():
        if child.training != module.training:
            yield f"{path}{name}", child
        yield from _list_switched(child, f"{path}{name}.")


def _name_mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _find_implied(model: nn.Module, names: tuple[str, ...]) -> dict[str, object]:
    """What a configuration makes of arguments: no cache is asked for, outputs have names."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    said: dict[str, object] = {}
    if "use_cache" in names and (hasattr(config, "use_cache") or hasattr(text, "use_cache")):
        said["use_cache"] = False
    if getattr(config, "return_dict", False) is True:
        said["return_dict"] = True
    return said


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other
