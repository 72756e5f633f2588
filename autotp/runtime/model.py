"""The sharded model: an instance of the model's own class whose forward runs generated code.

One tree of modules stores all parameters, at the model's own paths. Each variant (inputs present,
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
    refuse_full_weights,
    refuse_gradients,
    refuse_to_run,
)
from autotp.runtime.variant import Signature, Variant, describe_mode, find_key
from autotp.runtime.yielding import yield_to_child

T = TypeVar("T", bound=nn.Module)
_CAPTURING = threading.RLock()
CaptureVariant: TypeAlias = Callable[["ShardedModel", Mapping[str, Any]], None]
"""A function that captures a model for inputs in its present mode, and calls `add_variant`."""


class Store(Protocol):
    """What gathers the shards of a model, to one rank or to disk."""

    def save(self, model: "ShardedModel", directory: Path, max_shard_size: int | str) -> None:
        """Save the full model as Transformers would."""
        ...

    def state_dict(self, model: "ShardedModel", *, rank0_only: bool) -> dict[str, torch.Tensor]:
        """Gather the full tensors on the CPU."""
        ...


@dataclass(slots=True, eq=False)
class State:
    """The state of a sharded model besides its parameters.

    - `source`: the original model without memory, from which `capture_variant` captures further
      calls. `caches`: how calls so far have laid out the tensors of a cache, by path.
    - `mode`: of the model and its submodules, as of the last call that was not compiled.
    - `imagined`: the model was built with `rank=`, without a process group, and cannot be called.
    - `granted`: the graph number (`Variant.find_shorter`) of the call that is being compiled.
    - `modules`, `flags`: all modules, and their `training` flags when `mode` was noted.
    - `fresh`: graphs were added since the last call.
    - `group`: the group, with this rank in it; `watched`: its processes may be lost, so errors say
      where a rank waited. `compare`: in debug mode, what compares the calls of all ranks.
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
        """Copy the state: plans and variants are shared, and each copy can add its own variants."""
        variants = {key: list(found) for key, found in self.variants.items()}
        return replace(self, variants=variants, modules=(), flags=())

    def note_mode(self, model: nn.Module) -> None:
        """Note the present mode of the model and its modules."""
        self.modules = self.modules or tuple(model.modules())
        flags = tuple([module.training for module in self.modules])
        if flags != self.flags:
            self.flags, self.mode = flags, describe_mode(model)

    def __str__(self) -> str:
        """Name the rank: `rank 1 of 4`."""
        return f"rank {self.group.rank} of {self.plan.tp}"

    def list_variants(self) -> dict[str, Variant]:
        """List each variant by its key; further ones of the same key are numbered."""
        return {
            key if i == 1 else f"{key} ({i})": variant
            for key, found in self.variants.items()
            for i, variant in enumerate(found, 1)
        }


class ShardedModel(FixedModule):
    """One rank of a sharded model: the model's own class, names and outputs, with local shards.

    Built by `autotp.parallelize` and `autotp.from_pretrained`; `isinstance(sharded, type(model))`
    is true as well.

        sharded = autotp.parallelize(model, tp=2, training=True)     # under torchrun, on each rank
        output = sharded(input_ids=ids, labels=ids)                  # ids: (batch, sequence), int64
        output.loss.backward()                                       # loss: (); gradients are local
        sharded.save_pretrained("out")                               # the full model, from all
        ranks

    - Inputs and outputs have the shapes of the original model and are equal on all ranks;
      parameters have the shapes in `plan.parameters[name].shards[rank]`.
    - `train()` and `eval()` switch the mode of the model, those of a submodule (a norm, a dropout)
      that of the submodule.
    - A new kind of call (inputs present, mode, constants) is captured on first use;
      `prepare(**inputs)` captures it beforehand. Sizes are free, except where a guard of the graph
      fixes them.
    - Only the model itself can be called; its submodules store parameters, hooks and configuration.

    A call raises CaptureError if it cannot be captured, PlanError if the plan excludes it
    (gradients without `training=True`, no process group), and GroupError if a rank is lost or late.
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
        """The plan of each variant by its key, e.g. `"input_ids, labels · train"`."""
        return {key: variant.plan for key, variant in self.sharded_state.list_variants().items()}

    @yield_to_child
    @property
    def variants(self) -> dict[str, Variant]:
        """The variants captured so far, by key, starting with the one that was planned."""
        return self.sharded_state.list_variants()

    @yield_to_child
    @property
    def rank(self) -> int:
        """The index of this rank in the tensor-parallel group."""
        return self.sharded_state.group.rank

    @yield_to_child
    @property
    def graph_module(self) -> fx.GraphModule:
        """The first variant as a GraphModule that shares the parameters; built on each access.

        Example: `print(sharded.graph_module.graph)`. See `view` for the others.
        """
        return build_view(self, _get_variant(self, None))

    @yield_to_child
    def view(self, key: str | None = None) -> fx.GraphModule:
        """Build the variant `key` as a GraphModule that shares the parameters.

        It takes the tensor inputs by name and returns the model's output type; it can be run,
        printed, copied and exported. Raises PlanError for an unknown key.
        """
        return build_view(self, _get_variant(self, key))

    @yield_to_child
    def code(self, key: str | None = None) -> str:
        """Write the variant `key` as a readable Python module: the root, then each distinct layer.

        Raises PlanError for an unknown key.
        """
        return write_source(_get_variant(self, key))

    @guard_call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: the original forward's result, computed by this rank and its group."""
        given = self.sharded_signature.bind(args, kwargs)
        if self.sharded_state.imagined:
            refuse_to_run(type(self).__name__, str(self.sharded_state))
        inputs = {name: flatten_caches(value) for name, value in given.items()}
        variant, state = _find_or_capture(self, inputs), self.sharded_state
        return restore_caches(variant.run(self, inputs, state.group.rank, state.granted), given)

    @yield_to_child
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture the graph of a call with these arguments in the present mode; run nothing."""
        _find_or_capture(self, flatten_caches(self.sharded_signature.bind(args, kwargs)))

    @yield_to_child
    def key(self, *args: Any, **kwargs: Any) -> str:
        """Find the variant key of a call with these arguments in the present mode."""
        return _find_key(self, flatten_caches(self.sharded_signature.bind(args, kwargs)))

    def train(self: T, mode: bool = True) -> T:
        """Set the mode, which selects among the graphs; PlanError for a plan without training."""
        model = cast("ShardedModel", self)
        if mode and not model.sharded_state.plan.training:
            refuse_gradients(type(model).__name__, "train() was called")
        for module in self.modules():
            module.training = mode
        model.sharded_state.mode, model.sharded_state.flags = describe_mode(model), ()
        return self

    def requires_grad_(self: T, requires_grad: bool = True) -> T:
        """Set `requires_grad` of all parameters; PlanError for a plan without training."""
        model = cast("ShardedModel", self)
        if requires_grad and not model.sharded_state.plan.training:
            refuse_gradients(type(model).__name__, "requires_grad_() was called")
        return super().requires_grad_(requires_grad)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict()` returned on this rank; PlanError for unsharded weights."""
        refuse_full_weights(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the calls with torch.compile and these options; sizes stay free.

        Each kind of call is captured and compiled on first use.
        """
        self._compiled_call_impl = Compiled(self, _find_or_capture, kwargs)

    @yield_to_child
    def part(self, path: str) -> "ShardedModel":
        """Make the module at `path`, such as an encoder, a model that can be called by itself.

        It keeps its place and its parameters, and is captured on first use. Raises PlanError for a
        layer, whose code belongs to the model.
        """
        module = self.get_submodule(path)
        if isinstance(module, ShardedModel):
            return module
        if isinstance(module, Layer):
            raise PlanError(
                f"{type(self).__name__}: {path} is one of its layers, which run only inside the "
                "model. Call the model, or the module that contains the layers."
            )
        full_model, source = (
            self.sharded_state.source,
            self.sharded_state.source.get_submodule(path),
        )
        plan = restrict_plan(
            self.sharded_state.plan, read_source_model(full_model), read_source_model(source)
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
        """Save the full model: the files, keys and shapes of the model's own save_pretrained.

        Example: `sharded.save_pretrained("out")` on every rank.

        Constraints:
        - Every rank must call it; rank 0 gathers and writes one full tensor at a time (or those
          that one converter of the checkpoint merges).
        - Files get their names only when all are complete. Raises WeightsError on every rank if
          writing fails, and PlanError for `others`: further arguments of the model's own method.
        """
        if others:
            raise PlanError(
                f"{type(self).__name__}: save_pretrained() was called with {', '.join(others)}, "
                f"for an unsharded model, but {self.sharded_state} has only its shards. Call "
                "save_pretrained(directory) on every rank, and switch off the saving of a Trainer "
                'with save_strategy="no".'
            )
        _get_store(self, "save_pretrained").save(self, Path(save_directory), max_shard_size)

    @yield_to_child
    def full_state_dict(self, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Gather the full model's `state_dict()`, of full shapes, on the CPU of every rank.

        Example: `weights = sharded.full_state_dict(rank0_only=True)`; with `rank0_only`, it is
        empty on all other ranks. Every rank must call it. Raises PlanError without a process group.
        """
        return _get_store(self, "full_state_dict").state_dict(self, rank0_only=rank0_only)


def _find_or_capture(model: ShardedModel, inputs: Mapping[str, Any]) -> Variant:
    if not model.sharded_state.plan.training:
        for name, value in inputs.items():
            tensors = value.leaves if isinstance(value, CacheState) else pytree.tree_leaves(value)
            if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
                refuse_gradients(type(model).__name__, f"the input {name!r} requires a gradient")
    key = _find_key(model, inputs)
    return _find_variant(model, key, inputs) or _capture(model, key, inputs)


def _find_variant(model: ShardedModel, key: str, inputs: Mapping[str, Any]) -> Variant | None:
    for variant in model.sharded_state.variants.get(key, ()):
        if variant.accepts(inputs):
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
            # a compiler that falls back to eager code here must not trace the capture
            variant = torch.compiler.disable(model.sharded_state.capture_variant)
            make = cast("Callable[[ShardedModel, Mapping[str, Any]], None]", variant)
            # tensors saved during a capture must not reach the hooks of the caller
            with saved_tensors_hooks(_pass_through, _pass_through):
                make(model, model.sharded_signature.add_implied(inputs))
            found = _find_variant(model, key, inputs)
    if found is None:
        raise CaptureError(
            _describe_unseen(model, key)
            + " The graph captured at these sizes has guards that exclude them. Use other sizes."
        )
    return found


def _describe_unseen(model: ShardedModel, key: str) -> str:
    known = "; ".join(model.sharded_state.variants) or "none"
    return (
        f"{type(model).__name__}: there is no graph for these sizes of ({key}). Captured so far: "
        f"{known}."
    )


def _find_key(model: ShardedModel, inputs: Mapping[str, Any]) -> str:
    if not torch.compiler.is_compiling():  # a compiler guards on the mode, not on each module
        model.sharded_state.note_mode(model)
    return find_key(model.sharded_signature.model, inputs, model.sharded_state.mode)


def _get_variant(model: ShardedModel, key: str | None) -> Variant:
    variants = model.sharded_state.list_variants()
    if key is None and variants:
        return next(iter(variants.values()))
    if key not in variants:
        raise PlanError(
            f"{type(model).__name__}: there is no variant {key!r}. Captured so far: "
            f"{'; '.join(variants) or 'none'}. Call prepare(**inputs) to capture one."
        )
    return variants[key]


def _pass_through(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def add_variant(
    model: ShardedModel, key: str, program: Program, outlined: LayeredGraph, plan: Plan
) -> None:
    """Add `program`, outlined, as the variant for calls of `key` that satisfy its guards."""
    for name, tensor in program.lifted.items():
        if name not in model._buffers:  # pyright: ignore[reportPrivateUsage]
            model.register_buffer(name, tensor.to(model.sharded_state.device), persistent=False)
    shorter = [(s.conditions, prepare_root(model, s.graph)) for s in outlined.shorter]
    # the outlined graphs run, so the flat one, megabytes large, is dropped
    ran = replace(program, graph=fx.Graph())
    variant = Variant.of(key, ran, outlined, plan, prepare_root(model, outlined), shorter)
    model.sharded_state.variants.setdefault(key, []).append(variant)
    model.sharded_state.fresh = True


def _get_store(model: ShardedModel, method: str) -> Store:
    state = model.sharded_state
    if state.store is None or state.imagined:
        raise PlanError(
            f"{type(model).__name__}: {method}() was called on {state} without a process group, so "
            "the shards of the other ranks cannot be gathered. Call it in each process started by "
            f"torchrun --nproc-per-node {state.plan.tp} your_script.py."
        )
    return state.store


@functools.cache
def make_model_class(original: type[nn.Module]) -> type[ShardedModel]:
    """Make the class of sharded models of class `original`, with its signature."""

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
