"""The sharded model: an instance of the model's own class whose forward runs generated code.

One tree of modules holds all parameters, at the model's own paths. Each variant (inputs present,
mode, constants) adds one function to the root and one to each layer. The root's code names the
layer's variant as a constant, so nothing is set for the duration of a call: recomputation in a
backward pass, threads and exceptions find the right function with no further care.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState, flatten_caches, restore_caches
from autotp.capture.program import Program
from autotp.capture.source_model import read_source_model
from autotp.errors import CaptureError, PlanError
from autotp.records.plan import CacheRecord, Plan
from autotp.runtime.call_guard import guard_call
from autotp.runtime.codegen.source import write_source
from autotp.runtime.codegen.view import build_view
from autotp.runtime.compiled import Compiled
from autotp.runtime.generation import override_generation
from autotp.runtime.group.debug_compare import Comparison
from autotp.runtime.group.process_group import Group
from autotp.runtime.layer import FixedModule, Layer, copy_identity, prepare_root
from autotp.runtime.layered_graph import LayeredGraph
from autotp.runtime.shards import restrict_plan
from autotp.runtime.unsupported import (
    override_unsupported,
    refuse_gradients,
    refuse_to_run,
    refuse_whole,
)
from autotp.runtime.variant import Signature, Variant, describe_mode, find_key
from autotp.runtime.yielding import yield_to_child

__all__ = ["CaptureVariant", "Layer", "ShardedModel", "State", "Store", "add_variant"]

T = TypeVar("T", bound=nn.Module)
_CAPTURING = threading.RLock()
CaptureVariant: TypeAlias = Callable[["ShardedModel", Mapping[str, Any]], None]
"""Captures a model for inputs in its present mode, and calls `add_variant`."""


class Store(Protocol):
    """What brings a model's parts together: to one rank, or to disk."""

    def save(self, model: "ShardedModel", directory: Path, max_shard_size: int | str) -> None:
        """Writes the whole model as Transformers would."""
        ...

    def state_dict(self, model: "ShardedModel", *, rank0_only: bool) -> dict[str, torch.Tensor]:
        """The whole tensors on the CPU."""
        ...


@dataclass(slots=True, eq=False)
class State:
    """What a sharded model knows beside its parameters.

    - `write_source`: the model that it was made of, without memory, of which `capture_variant` captures
      further calls. `caches`: how calls so far have laid out the tensors of a cache, by path.
    - `mode`: of the whole model and its submodules, as of the last call that was not compiled.
    - `imagined`: no group of processes stands behind the rank, so that it cannot be called.
    - `granted`: what `Variant.granted` said of the call that is being compiled.
    - `modules`, `flags`: all modules, and which of them trained when `mode` was noted.
    - `fresh`: graphs were added since the last call.
    - `group`: in which the model runs, with the rank in it; `watched`: its processes may be lost,
      so that errors say where a rank waited. `compare`: in debug mode, what compares its calls.
    """

    plan: Plan
    group: Group
    device: torch.device
    source: nn.Module
    capture_variant: CaptureVariant
    mode: str
    store: Store | None = None
    caches: dict[str, CacheRecord] = field(default_factory=dict[str, CacheRecord])
    variants: dict[str, list[Variant]] = field(default_factory=dict[str, list[Variant]])
    imagined: bool = False
    fresh: bool = False
    modules: tuple[nn.Module, ...] = ()
    flags: tuple[bool, ...] = ()
    granted: int = 0
    watched: bool = False
    compare: Comparison | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        """A state that shares plans, variants and the maker, and can grow on its own."""
        variants = {key: list(found) for key, found in self.variants.items()}
        return replace(self, variants=variants, modules=(), flags=())

    def note_mode(self, model: nn.Module) -> None:
        """Learns in which mode the model and its modules are now."""
        self.modules = self.modules or tuple(model.modules())
        flags = tuple([module.training for module in self.modules])
        if flags != self.flags:
            self.flags, self.mode = flags, describe_mode(model)

    def __str__(self) -> str:
        """Whose part it is: `rank 1 of 4`."""
        return f"rank {self.group.rank} of {self.plan.tp}"

    def all(self) -> dict[str, Variant]:
        """Each variant by its key; further ones of the same key are numbered."""
        return {
            key if i == 1 else f"{key} ({i})": variant
            for key, found in self.variants.items()
            for i, variant in enumerate(found, 1)
        }


class ShardedModel(FixedModule):
    """One rank's part of a model: the model's class, names and outputs, the rank's parameters.

    Made by `autotp.parallelize`. `isinstance(sharded, type(model))` holds too.

    - `train()` and `eval()` switch the whole model, those of a part (a norm, a dropout) the part.
      A plan without training holds no gradients.
    - Inputs not seen before are captured on first use; `prepare(**inputs)` does so beforehand.
    - Only the whole model can be called; its submodules hold parameters, hooks and configuration.
    """

    sharded_state: State
    sharded_signature: Signature

    @yield_to_child
    @property
    def plan(self) -> Plan:
        """The plan that the parameters follow."""
        return self.sharded_state.plan

    @yield_to_child
    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each variant, by its key, e.g. `"input_ids, labels · train"`."""
        return {key: variant.plan for key, variant in self.sharded_state.all().items()}

    @yield_to_child
    @property
    def variants(self) -> dict[str, Variant]:
        """The variants captured so far, by key, the first of them the one planned for."""
        return self.sharded_state.all()

    @yield_to_child
    @property
    def rank(self) -> int:
        """The place of this part in the tensor-parallel group."""
        return self.sharded_state.group.rank

    @yield_to_child
    @property
    def graph_module(self) -> fx.GraphModule:
        """The first variant as a GraphModule that shares the parameters; made anew each time."""
        return build_view(self, _get_variant(self, None))

    @yield_to_child
    def view(self, key: str | None = None) -> fx.GraphModule:
        """A variant as a GraphModule that shares the parameters: it runs, prints, copies, exports.

        It takes the tensor inputs by name and returns the model's output type.
        """
        return build_view(self, _get_variant(self, key))

    @yield_to_child
    def code(self, key: str | None = None) -> str:
        """A variant as a Python module to read: the root, then each distinct layer once."""
        return write_source(_get_variant(self, key))

    @guard_call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own forward returns, computed by this rank and its group."""
        given = self.sharded_signature.bind(args, kwargs)
        if self.sharded_state.imagined:
            refuse_to_run(type(self).__name__, str(self.sharded_state))
        inputs = {name: flatten_caches(value) for name, value in given.items()}
        variant, state = _find_or_capture(self, inputs), self.sharded_state
        return restore_caches(variant.run(self, inputs, state.group.rank, state.granted), given)

    @yield_to_child
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Captures what a call with these arguments needs in the present mode; runs nothing."""
        _find_or_capture(self, flatten_caches(self.sharded_signature.bind(args, kwargs)))

    @yield_to_child
    def key(self, *args: Any, **kwargs: Any) -> str:
        """The key of a call with these arguments in the present mode."""
        return _find_key(self, flatten_caches(self.sharded_signature.bind(args, kwargs)))

    def train(self: T, mode: bool = True) -> T:
        """The model itself, in the mode asked for, which chooses among its graphs."""
        model = cast("ShardedModel", self)
        if mode and not model.sharded_state.plan.training:
            refuse_gradients(type(model).__name__, "train() was called")
        for module in self.modules():
            module.training = mode
        model.sharded_state.mode, model.sharded_state.flags = describe_mode(model), ()
        return self

    def requires_grad_(self: T, requires_grad: bool = True) -> T:
        """The model itself, with all its parameters trained, or none."""
        model = cast("ShardedModel", self)
        if requires_grad and not model.sharded_state.plan.training:
            refuse_gradients(type(model).__name__, "requires_grad_() was called")
        return super().requires_grad_(requires_grad)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what `state_dict()` gave on this rank; PlanError for whole weights."""
        refuse_whole(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Makes calls run compiled, by torch.compile with these options; sizes are free.

        Each kind of call is captured and compiled when it first comes.
        """
        self._compiled_call_impl = Compiled(self, _find_or_capture, kwargs)

    @yield_to_child
    def part(self, path: str) -> "ShardedModel":
        """The module at `path`, such as an encoder, as a model that can be called by itself.

        It keeps its place and its parameters, and is captured on first use.
        """
        module = self.get_submodule(path)
        if isinstance(module, ShardedModel):
            return module
        if isinstance(module, Layer):
            raise PlanError(
                f"{type(self).__name__}: {path} is one of its layers, whose code is the whole "
                "model's. Call the model, or the module that holds the layers."
            )
        whole, source = self.sharded_state.source, self.sharded_state.source.get_submodule(path)
        plan = restrict_plan(
            self.sharded_state.plan, read_source_model(whole), read_source_model(source)
        )
        signature = Signature.of(module)
        module.__class__ = make_model_class(type(module))
        part = cast("ShardedModel", module)
        state = replace(
            self.sharded_state,
            plan=plan,
            source=source,
            caches=dict[str, CacheRecord](),
            mode=describe_mode(part),
            variants={},
            modules=(),
            flags=(),
        )
        part.sharded_state, part.sharded_signature = state, signature
        return part

    @yield_to_child
    def save_pretrained(
        self, save_directory: str | Path, *, max_shard_size: int | str = "50GB", **others: object
    ) -> None:
        """Writes the whole model: the files, keys and shapes of the model's own save_pretrained.

        Constraints:
        - Every rank must call it; rank 0 writes, tensor by tensor, and holds no more than one of
          them whole (or those that one converter of the checkpoint makes one).
        - Files appear under their names when all are complete. Raises WeightsError on every rank.
        - `others`: what the model's own method takes besides is refused, by PlanError.
        """
        if others:
            raise PlanError(
                f"{type(self).__name__}: save_pretrained() was called with {', '.join(others)}, as "
                f"one rank alone does for a whole model, and {self.sharded_state} has no more than "
                "its part. Call save_pretrained(directory) on every rank; of a Trainer, turn its "
                'own saving off: save_strategy="no".'
            )
        _get_store(self, "save_pretrained").save(self, Path(save_directory), max_shard_size)

    @yield_to_child
    def full_state_dict(self, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The whole model's `state_dict()`, on the CPU; `rank0_only`: empty on all other ranks.

        Constraints: every rank must call it.
        """
        return _get_store(self, "full_state_dict").state_dict(self, rank0_only=rank0_only)


def _find_or_capture(model: ShardedModel, inputs: Mapping[str, Any]) -> Variant:
    if not model.sharded_state.plan.training:
        for name, value in inputs.items():
            tensors = value.leaves if isinstance(value, CacheState) else pytree.tree_leaves(value)
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
                refuse_gradients(type(model).__name__, f"the input {name!r} requires grad")
    key = _find_key(model, inputs)
    return _find_variant(model, key, inputs) or _capture(model, key, inputs)


def _find_variant(model: ShardedModel, key: str, inputs: Mapping[str, Any]) -> Variant | None:
    for variant in model.sharded_state.variants.get(key, ()):
        if variant.holds(inputs):
            return variant
    return None


def _capture(model: ShardedModel, key: str, inputs: Mapping[str, Any]) -> Variant:
    if torch.compiler.is_compiling():
        raise CaptureError(
            _describe_unseen(model, key) + " Call prepare(**inputs) before compiling."
        )
    with _CAPTURING:
        found = _find_variant(model, key, inputs)
        if found is None:
            # a compiler that falls back to eager code here must not trace what captures
            variant = torch.compiler.disable(model.sharded_state.capture_variant)
            make = cast("Callable[[ShardedModel, Mapping[str, Any]], None]", variant)
            # what a capture saves for a backward pass is nobody's to recompute or to store
            with saved_tensors_hooks(_pass_through, _pass_through):
                make(model, model.sharded_signature.spelled(inputs))
            found = _find_variant(model, key, inputs)
    if found is None:
        raise CaptureError(
            _describe_unseen(model, key) + " Capturing at these sizes gave no graph for them."
        )
    return found


def _describe_unseen(model: ShardedModel, key: str) -> str:
    known = "; ".join(model.sharded_state.variants) or "none"
    return f"{type(model).__name__}: no graph for these sizes of ({key}); captured so far: {known}."


def _find_key(model: ShardedModel, inputs: Mapping[str, Any]) -> str:
    if not torch.compiler.is_compiling():  # a compiler guards on the words, not on each module
        model.sharded_state.note_mode(model)
    return find_key(model.sharded_signature.model, inputs, model.sharded_state.mode)


def _get_variant(model: ShardedModel, key: str | None) -> Variant:
    variants = model.sharded_state.all()
    if key is None and variants:
        return next(iter(variants.values()))
    if key not in variants:
        raise PlanError(
            f"{type(model).__name__}: no variant {key!r}; captured so far: "
            f"{'; '.join(variants) or 'none'}. Call prepare(**inputs) to add one."
        )
    return variants[key]


def _pass_through(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def add_variant(
    model: ShardedModel, key: str, program: Program, outlined: LayeredGraph, plan: Plan
) -> None:
    """Makes `program`, outlined, what calls of `key` run where its guards hold."""
    for name, tensor in program.lifted.items():
        if name not in model._buffers:  # pyright: ignore[reportPrivateUsage]
            model.register_buffer(name, tensor.to(model.sharded_state.device), persistent=False)
    shorter = [(s.conditions, prepare_root(model, s.graph)) for s in outlined.shorter]
    # the flat graph is what was planned; what runs is outlined, and a graph weighs megabytes
    ran = replace(program, graph=fx.Graph())
    variant = Variant.of(key, ran, outlined, plan, prepare_root(model, outlined), shorter)
    model.sharded_state.variants.setdefault(key, []).append(variant)
    model.sharded_state.fresh = True


def _get_store(model: ShardedModel, method: str) -> Store:
    state = model.sharded_state
    if state.store is None or state.imagined:
        raise PlanError(
            f"{type(model).__name__}: {method}() was called as {state}, and the parts of the "
            "others are not here. Call it in each of the processes that torchrun "
            f"--nproc-per-node {state.plan.tp} your_script.py starts."
        )
    return state.store


@functools.cache
def make_model_class(original: type[nn.Module]) -> type[ShardedModel]:
    """The class of sharded models of class `original`, with its signature."""

    def call(self: ShardedModel, *args: Any, **kwargs: Any) -> Any:
        return ShardedModel.forward(self, *args, **kwargs)

    # a code object of its own: a compiler counts recompilations, up to its limit, by code object
    forward = FunctionType(call.__code__.replace(), call.__globals__, "forward")
    forward.__doc__ = original.forward.__doc__
    setattr(forward, "__signature__", inspect.signature(original.forward))  # noqa: B010
    own = (
        copy_identity(original)
        | override_generation(original)
        | override_unsupported(original)
        | {"forward": forward}
    )
    return type(original.__name__, (ShardedModel, original), own)
