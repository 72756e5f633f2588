"""Turns an unmodified model into one flat graph, by torch.export and a few repairs.

The model is traced once, with symbolic batch and sequence sizes, or with the given sizes where its
forward fixes the sequence. The graph has the model's own names and neither in-place ops nor no-ops.
What the code assumes of sizes becomes guards; what it asserts of values stays in the graph.
"""

import inspect
import logging
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from autotp.capture.cache import CacheState, flatten_caches, list_caches, rebuild_caches
from autotp.capture.clean import clean_graph
from autotp.capture.exported_graph import decompose_program, find_mutated, flatten_program
from autotp.capture.failure import explain_failure, shorten_error, silence_torch
from autotp.capture.functionalize import functionalise_graph, has_vmap
from autotp.capture.inputs import (
    Axes,
    find_data_axes,
    find_longest_input,
    order_inputs,
    resize_for_trace,
)
from autotp.capture.program import Carried, Guard, Program, find_first_broken, name_leaves
from autotp.capture.repairs.attributes import refuse_kept_state, restore_attributes
from autotp.capture.repairs.branches import Branch, build_semantic_guards, record_branches
from autotp.capture.repairs.cached_forward import (
    copy_fixed_states,
    learn_cache_dims,
    list_cache_outputs,
    remove_length_branches,
    tie_lengths,
)
from autotp.capture.repairs.functions import (
    ExportAgain,
    keep_own_backwards,
    refuse_sparse_gradients,
)
from autotp.capture.repairs.hooks import record_baked_hooks, refuse_backward_hooks
from autotp.capture.repairs.opaque import AppliedFunction
from autotp.capture.repairs.values import (
    KnownValues,
    build_value_guards,
    needs_values,
    propose_known,
)
from autotp.errors import CaptureError

FREEDOMS = (
    frozenset({"batch", "sequence", "decoder", "past", "kept"}),
    frozenset({"batch", "sequence", "past", "kept"}),  # a decoder's first token
    frozenset({"batch", "past", "kept"}),
    frozenset({"sequence", "decoder", "past", "kept"}),
    frozenset[str](),
)
OURS = logging.getLogger("autotp")
SHORT = 200  # characters of torch's reason


def capture(model: nn.Module, inputs: Mapping[str, Any], *, gradients: bool = False) -> Program:
    """The forward of `model` as one graph, for calls like the one with `inputs`.

    Example: `capture(model, {"input_ids": ids, "use_cache": False}).graph` has the placeholder
    `input_ids`, `get_attr` nodes like `model.layers.0.mlp.up_proj.weight`, and a flat tuple as
    output.

    Constraints:
    - Which inputs are present, their dtypes, the values of non-tensors and train() or eval() are
      fixed; batch and sequence sizes are free (see `Program.dynamic`), within `Program.guards`.
    - `gradients`: refuse a forward whose gradients would be wrong.
    - Works on any device, meta included; constants and factory calls stay on that device until
      `retarget_graph`.
    - The model is not changed.

    Raises CaptureError, which says where in the model the capture failed, why, and what to do.
    """
    if gradients:
        refuse_backward_hooks(model)
    given = order_inputs(model, inputs)
    axes = find_data_axes(model, given)
    call = _Call(model, given, gradients)
    export = _export_freest(call, axes)
    graph, lifted = _build_graph(model, export.program, tuple(axes))
    if gradients:
        refuse_sparse_gradients(type(model).__name__, graph)
    fixed = {n: {} if n in export.known else of for n, of in axes.items()}
    out_spec = export.program.call_spec.out_spec
    assert out_spec is not None
    return Program(
        graph=graph,
        inputs=tuple(axes),
        constants={n: v for n, v in name_leaves(given).items() if n not in axes},
        out_spec=out_spec,
        lifted=lifted,
        tied=_find_aliases(model.named_parameters(remove_duplicate=False)),
        data_dims={n: tuple(a) for n, a in axes.items()},
        guards=(*_list_fixed_guards(given, fixed, export.free), *export.guards),
        dynamic=not export.reason or "sequence" in export.free,
        reason=export.reason,
        training=model.training,
        baked=export.baked,
        carried=_find_carried(given, out_spec),
    )


def _find_carried(given: Mapping[str, Any], out_spec: pytree.TreeSpec) -> dict[int, Carried]:
    """The outputs that are tensors of a cache, each with the input that it replaces."""
    leaves = list(name_leaves(given))
    numbered = pytree.tree_unflatten(leaves, pytree.tree_structure(dict(given)))
    before = [dict(zip(s.spec.list_paths(), s.leaves, strict=True)) for s in list_caches(numbered)]
    after = list_cache_outputs(out_spec)
    before += [{}] * (len(after) - len(before))
    return {
        number: Carried(f"{k}.{path}" if k else path, names.get(path, ""))
        for k, (state, names) in enumerate(zip(after, before, strict=False))
        for path, number in zip(state.spec.list_paths(), state.leaves, strict=True)
    }


@dataclass(frozen=True, slots=True)
class _Export:
    """A program of torch.export.

    - `guards`: its assumptions; `baked`: the hooks that are in it.
    - `free`: the kinds of free axes; `known`: the inputs with fixed values; `reason`: why not all
      is free.
    """

    program: ExportedProgram
    guards: tuple[Guard, ...]
    baked: frozenset[int]
    free: frozenset[str]
    known: frozenset[str]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Call:
    """One kind of call of a model: all its inputs, of which those without tensors are fixed.

    - `functions`: those with their own backward, to be exported as ops; filled while exporting.
    - `known`: the inputs whose values are fixed too.
    """

    model: nn.Module
    given: Mapping[str, Any]
    gradients: bool
    functions: dict[AppliedFunction, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()

    def list_traced(self) -> list[str]:
        """The names of the inputs that contain a tensor."""
        leaves = {n: pytree.tree_leaves(v) for n, v in self.given.items()}
        return [n for n, of in leaves.items() if any(isinstance(v, torch.Tensor) for v in of)]

    @contextmanager
    def prepare_export(self) -> Generator[tuple[list[Branch], set[int]]]:
        """Apply all repairs during an export; records branches on sizes, and baked hooks."""
        name = type(self.model).__name__
        kept = keep_own_backwards(name, self.functions, gradients=self.gradients)
        with (
            restore_attributes(self.model),
            self.replace_forward(),
            silence_torch(),
            # with symbolic sizes, the keys of this cache cost more than it saves
            config.patch(fake_tensor_cache_enabled=False),
            torch.set_grad_enabled(self.gradients),  # torch never releases tensors otherwise
            kept,
            remove_length_branches() if self.has_cache() else nullcontext(),
            record_branches() as branches,
            record_baked_hooks(self.model) as baked,
        ):
            yield branches, baked

    def has_cache(self) -> bool:
        """Whether the inputs contain or request a cache."""
        return bool(self.given.get("use_cache")) or bool(list_caches(dict(self.given)))

    @contextmanager
    def replace_forward(self) -> Generator[None]:
        """Let the model take exactly the traced inputs, by keyword, whatever its signature is."""
        forward, own = self.model.forward, vars(self.model).get("forward")
        parameters = inspect.signature(forward).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        names = self.list_traced()

        known = {n: self.given[n].clone() for n in self.known}

        def call(**tensors: Any) -> Any:
            for state in list_caches(tensors):
                tie_lengths(state)
            given = {n: tensors.get(n, v) for n, v in self.given.items()}
            inputs = {
                n: rebuild_caches(copy_fixed_states(v) if isinstance(v, CacheState) else v)
                for n, v in given.items()
            } | known
            with KnownValues(list(known.values())) if known else nullcontext():
                first = [inputs.pop(n) for n in positional if n in inputs]
                with refuse_kept_state(self.model) if self.has_cache() else nullcontext():
                    return flatten_caches(forward(*first, **inputs))

        kind = inspect.Parameter.KEYWORD_ONLY
        call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        self.model.forward = call
        try:
            yield
        finally:
            del self.model.forward
            if own is not None:
                self.model.forward = own


def _export_freest(call: _Call, axes: Mapping[str, Axes]) -> _Export:
    """The export with the most free sizes; inputs are fixed where the forward reads values."""
    failures: list[Exception] = []
    for known in (
        frozenset[str](),
        *propose_known({n: call.given[n] for n in _list_secondary(call)}),
    ):
        free_axes = {n: {} if n in known else of for n, of in axes.items()}
        tried: list[Exception] = []
        export = _try_freedoms(replace(call, known=known), free_axes, tried)
        failures = failures or tried
        if export is not None:
            return replace(export, reason=shorten_error(failures[0])) if failures else export
        if not needs_values(tried[-1]):
            break
    raise CaptureError(explain_failure(call.model, failures[-1])) from failures[-1]


def _list_secondary(call: _Call) -> list[str]:
    """The inputs that describe the main one, whose own values are data."""
    names = call.list_traced()
    main = getattr(call.model, "main_input_name", names[0] if names else "")
    return [n for n in names if n not in (main, "labels", "decoder_input_ids")]


def _try_freedoms(
    call: _Call, axes: Mapping[str, Axes], failures: list[Exception]
) -> _Export | None:
    kinds = frozenset(kind for of in axes.values() for kind, _ in of.values())
    barred = _find_single_token_kinds(call, axes)
    for free in dict.fromkeys(freedom & kinds for freedom in FREEDOMS):
        if free & barred:
            continue
        try:
            export = _export_once(call, axes, free)
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 torch.export raises any type; the last one is raised
            failures.append(error)
            continue
        guard = find_first_broken(export.guards, call.given)
        if guard is None:
            return export
        failures.append(CaptureError(f"its free graph requires {guard.expression}"))
        barred |= _find_kind_at_fault(guard, call.given, axes)
    return None


def _find_single_token_kinds(call: _Call, axes: Mapping[str, Axes]) -> frozenset[str]:
    """The kinds of axes of size 1 in a decode step: such calls need a graph of their own.

    A free graph often excludes a size of 1, so that an export with these axes free would fail.
    """
    if not any(state.is_known for state in list_caches(dict(call.given))):
        return frozenset()
    every = [a for of in axes.values() for a in of.values()]
    return frozenset(kind for kind, size in every if size == 1 and kind in ("sequence", "decoder"))


def _find_kind_at_fault(
    guard: Guard, given: Mapping[str, Any], axes: Mapping[str, Axes]
) -> frozenset[str]:
    """The kind of axis that a violated guard refers to; empty if it refers to several."""
    spelled = {_spell_leaf(given, name): of for name, of in axes.items()}
    named = re.findall(r"(L(?:\[[^]]+\])+)\.size\(\)\[(\d+)\]", guard.expression)
    kinds = {spelled[where][int(dim)][0] for where, dim in named if int(dim) in spelled[where]}
    return frozenset(kinds) if len(kinds) == 1 else frozenset()


def _export_once(call: _Call, axes: Mapping[str, Axes], free: frozenset[str]) -> _Export:
    sized = resize_for_trace(call.given, axes, free, find_longest_input(call.model))
    traced = {n: sized[n] for n in call.list_traced()}
    shapes = (
        {n: _build_dynamic_shapes(n, v, axes, free) for n, v in traced.items()} if free else None
    )
    try:
        program, branches, baked = _run_export(call, traced, shapes)
    except ExportAgain:  # at most once: now all functions of the model are known
        program, branches, baked = _run_export(call, traced, shapes)
    learn_cache_dims(program, axes)  # also if the given sizes violate its guards
    own = build_semantic_guards(branches, program, {n: _spell_leaf(call.given, n) for n in axes})
    guards = (*build_value_guards(call.given, call.known), *_read_guards(program), *own)
    return _Export(program, guards, frozenset(baked), free, call.known)


def _run_export(
    call: _Call, traced: dict[str, Any], shapes: dict[str, Any] | None
) -> tuple[ExportedProgram, list[Branch], set[int]]:
    with call.prepare_export() as (branches, baked):
        program = torch.export.export(call.model, (), traced, dynamic_shapes=shapes, strict=False)
    return program, branches, baked


def _spell_leaf(given: Mapping[str, Any], leaf: str) -> str:
    """How guards write a leaf of the inputs: `L['x']`, `L['pair'][0]`."""
    paths = [
        f"L[{name!r}]{pytree.keystr(path)}"
        for name, value in given.items()
        for path, _ in pytree.tree_flatten_with_path(value)[0]
    ]
    return dict(zip(name_leaves(given), paths, strict=True))[leaf]


def _build_dynamic_shapes(
    name: str, value: Any, axes: Mapping[str, Axes], free: frozenset[str]
) -> Any:
    """The `dynamic_shapes` of one input: nested like `value`."""
    leaves = [
        {d: Dim.DYNAMIC for d, a in axes.get(leaf, {}).items() if a[0] in free} or None
        for leaf in name_leaves({name: value})
    ]
    # torch expects the children of registered classes as a list
    return _list_children(pytree.tree_unflatten(leaves, pytree.tree_structure(value)))


def _list_children(shapes: Any) -> Any:
    if isinstance(shapes, dict) and type(shapes) is dict and all(type(k) is int for k in shapes):
        return shapes
    if shapes is None:
        return None
    if type(shapes) in (list, tuple):
        return type(shapes)(map(_list_children, shapes))
    if type(shapes) is dict:
        return {k: _list_children(v) for k, v in shapes.items()}
    children, _ = pytree.SUPPORTED_NODES[type(shapes)].flatten_fn(shapes)
    return list(map(_list_children, children))


def _build_graph(
    model: nn.Module, exported: ExportedProgram, inputs: tuple[str, ...]
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """The clean, functional graph with its constants."""
    parameters = _find_aliases(model.named_parameters(remove_duplicate=False))
    tied = parameters | _find_aliases(model.named_buffers(remove_duplicate=False))
    if has_vmap(exported.graph):
        exported = _make_functional(model, exported)
    graph, lifted = flatten_program(exported, inputs, tied)
    if functionalise_graph(graph):
        graph, lifted = flatten_program(_make_functional(model, exported), inputs, tied)
        if reason := functionalise_graph(graph):
            raise CaptureError(f"{type(model).__name__}: {reason}. Use an out-of-place op.")
    clean_graph(graph, lifted)
    return graph, lifted


def _make_functional(model: nn.Module, exported: ExportedProgram) -> ExportedProgram:
    functional = decompose_program(exported)
    if target := find_mutated(functional):
        raise CaptureError(
            f"{type(model).__name__}: its forward writes to {target!r}, which outlives the call, "
            f"so ranks could diverge. {_advise(model, target)}."
        )
    return functional


def _advise(model: nn.Module, target: str) -> str:
    """What to do about a write to `target`."""
    if target in dict(model.named_parameters()):
        return "Move the update out of the forward; an embedding makes one if max_norm is set"
    if target in dict(model.named_buffers()):
        return "Call eval(), or move the update out of the forward"
    return "Write to a copy of the input"


def _find_aliases(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Each further name of a tensor, with its first name in the model's own order."""
    first: dict[int, str] = {}
    every = [(name, first.setdefault(id(tensor), name)) for name, tensor in named]
    return {name: known for name, known in every if name != known}


def _read_guards(exported: ExportedProgram) -> tuple[Guard, ...]:
    """What the model's code assumes of sizes, without the ranges that come from tracing at ≥ 2."""
    return tuple(Guard(code) for code in exported._guards_code)  # pyright: ignore[reportPrivateUsage]


def _list_fixed_guards(
    given: Mapping[str, Any], axes: Mapping[str, Axes], free: frozenset[str]
) -> Iterator[Guard]:
    """What tracing fixed of each tensor input: dtype, rank, and the sizes that are not free."""
    for name, value in given.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                where = f"L[{name!r}]{pytree.keystr(path)}"
                leaf_name = next(n for n in axes if _spell_leaf(given, n) == where)
                dims = {d for d, a in axes[leaf_name].items() if a[0] in free}
                if isinstance(value, CacheState) and value.is_known:  # ranks may have shards of it
                    dims |= set(range(leaf.dim())) - {*axes[leaf_name]}
                yield from map(Guard, _describe_form(where, leaf, dims))


def _describe_form(where: str, tensor: torch.Tensor, free: set[int]) -> list[str]:
    sizes = [f"{where}.size()[{d}] == {n}" for d, n in enumerate(tensor.shape) if d not in free]
    return [f"{where}.dtype == {tensor.dtype}", f"{where}.dim() == {tensor.dim()}", *sizes]
