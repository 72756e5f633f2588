"""Converts the program of torch.export to one flat graph of our own, without running it again.

The graph is copied node by node: lifted parameters and buffers become `get_attr` nodes at their
first use, non-tensor inputs disappear, regions that only disable gradients are inlined.
"""

import hashlib
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind

from autotp.capture.clean import is_disabled_dropout
from autotp.capture.graph_facts import TORCH, find_source_line
from autotp.errors import CaptureError

KEPT_META = ("val", "nn_module_stack", "stack_trace")
WITH_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
WITH_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
NATIVE_DROPOUT = torch.ops.aten.native_dropout.default  # dropout in torch's functional form
STATE = (InputKind.PARAMETER, InputKind.BUFFER)
PLAIN_OUTPUTS = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)


def flatten_program(
    exported: ExportedProgram, inputs: tuple[str, ...], tied: Mapping[str, str]
) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
    """The graph of `exported`, and the constants in it by their `get_attr` name.

    - `inputs`: names of the tensor inputs in the program's order; a dot becomes an underscore.
    - `tied`: for each alias, the name that the graph is to use.
    """
    copy = _GraphCopy(tied)
    for spec, node in zip(
        exported.graph_signature.input_specs, _list_placeholders(exported), strict=True
    ):
        if spec.kind in STATE:
            copy.add_state(node, str(spec.target))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = exported.constants[str(spec.target)]
            assert isinstance(constant, torch.Tensor)
            copy.add_constant(node, constant)
        elif spec.kind is not InputKind.USER_INPUT:
            raise CaptureError(_explain_unsupported(spec))
        elif isinstance(spec.arg, ConstantArgument):
            copy.values[node] = spec.arg.value
    tensors = [n for n in _list_placeholders(exported) if n not in copy.values]
    for name, node in zip(inputs, tensors, strict=True):
        copy.add_placeholder(node, name.replace(".", "_"))
    copy.graph.output(tuple(copy.copy_region(exported.graph_module)))
    return copy.graph, copy.lifted


def decompose_program(exported: ExportedProgram) -> ExportedProgram:
    """The program made functional by torch, with no other op decomposed.

    Torch drops regions without gradients meanwhile, so their results are detached first. Nor does
    it know that a disabled dropout returns its input itself.
    Constraints: `exported` is changed.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _detach_regions(module.graph)
            _drop_dropouts(module.graph)
            module.recompile()
    with warnings.catch_warnings():
        # torch deep-copies an object of a class of its own that it deprecates
        warnings.simplefilter("ignore", FutureWarning)
        return exported.run_decompositions({})


def find_mutated(exported: ExportedProgram) -> str:
    """The name of the first buffer or input that the functional program writes to; "" if none."""
    written = (s for s in exported.graph_signature.output_specs if s.kind not in PLAIN_OUTPUTS)
    return next((str(s.target) for s in written), "")


def name_constant(tensor: torch.Tensor) -> str:
    """The `get_attr` name of a constant, by content: `_const_` and 12 hexadecimal digits."""
    stored = b"" if tensor.is_meta else _read_bytes(tensor)
    digest = hashlib.sha1(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + stored)
    return f"_const_{digest.hexdigest()[:12]}"


def _read_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _list_placeholders(exported: ExportedProgram) -> list[fx.Node]:
    return [n for n in exported.graph.nodes if n.op == "placeholder"]


def _explain_unsupported(spec: InputSpec) -> str:
    return (
        f"{spec.arg.name}: the forward uses an object of kind {spec.kind.name}, which is not a "
        "tensor. Use plain tensors, parameters and buffers."
    )


def _detach_regions(graph: fx.Graph) -> None:
    """Detach each result of a region without gradients, under its own name."""
    regions = [n for n in graph.nodes if n.target is WITH_GRAD and not n.args[0]]
    for node in [user for region in regions for user in region.users]:
        if _is_real(node):
            with graph.inserting_before(node):
                inner = graph.create_node("call_function", node.target, node.args)
            inner.meta = dict(node.meta)
            node.target, node.args = torch.ops.aten.detach.default, (inner,)


def _drop_dropouts(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and is_disabled_dropout(node):
            node.replace_all_uses_with(node.args[0], _is_call)


def _is_call(user: fx.Node) -> bool:
    return user.op == "call_function"


def _is_real(value: object) -> bool:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.is_floating_point()


class _GraphCopy:
    """A graph being built: `values` maps nodes of the program to their values in it."""

    def __init__(self, tied: Mapping[str, str]) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.lifted: dict[str, torch.Tensor] = {}
        self._tied = tied
        self._made: dict[str, fx.Node] = {}

    def add_placeholder(self, node: fx.Node, name: str) -> None:
        self.values[node] = self._create("placeholder", name, (), {}, name, node)

    def add_state(self, node: fx.Node, target: str) -> None:
        self.values[node] = _PendingAttribute(self._tied.get(target, target), node)

    def add_constant(self, node: fx.Node, value: torch.Tensor) -> None:
        name = name_constant(value)
        self.lifted[name] = value.detach()
        self.values[node] = _PendingAttribute(name, node)

    def copy_region(self, module: fx.GraphModule) -> list[Any]:
        """Copy the nodes of a (sub)graph whose placeholders have values; the results."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = getattr(module, node.target)
            elif node.op == "call_function":
                self.values[node] = self._copy_call(node)
        return list(self._map(module.graph.output_node().args[0]))

    def _copy_call(self, node: fx.Node) -> Any:
        if isinstance(node.target, HigherOrderOperator):
            return self._inline_region(node)
        if is_disabled_dropout(node):
            return self._map(node.args[0])
        if node.target is NATIVE_DROPOUT:
            args = self._map(node.args)
            dropout = torch.ops.aten.dropout.default
            return [self._create("call_function", dropout, args, {}, "dropout", node), None]
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        return self._create("call_function", node.target, args, kwargs, node.name, node)

    def _inline_region(self, node: fx.Node) -> list[Any]:
        if node.target is WITH_GRAD:
            enabled, submodule, *operands = node.args
            outputs = self._enter_region(submodule, operands)
            return outputs if enabled else [self._detach(o) for o in outputs]
        if node.target is WITH_AUTOCAST and not node.args[2]:
            return self._enter_region(node.args[4], list(node.args[5:]))
        operands = map(self.values.get, node.all_input_nodes)
        modules = [x for x in operands if isinstance(x, fx.GraphModule)]
        raise CaptureError(_explain_region(node, modules))

    def _enter_region(self, submodule: Any, operands: list[Any]) -> list[Any]:
        module = self.values[submodule]
        names = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.values |= {n: self._map(o) for n, o in zip(names, operands, strict=True)}
        return self.copy_region(module)

    def _detach(self, value: Any) -> Any:
        if not _is_real(value):
            return value
        detach = torch.ops.aten.detach.default
        return self._create("call_function", detach, (value,), {}, "detach", value)

    def _map(self, argument: Any) -> Any:
        return fx.map_arg(argument, self._find_value)

    def _find_value(self, node: fx.Node) -> Any:
        value = self.values[node]
        if not isinstance(value, _PendingAttribute):
            return value
        if value.target not in self._made:
            args = ("get_attr", value.target, (), {}, None, value.node)
            self._made[value.target] = self._create(*args)
        return self._made[value.target]

    def _create(
        self,
        op: str,
        target: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
        source: fx.Node,
    ) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs, name)
        node.meta = {k: source.meta[k] for k in KEPT_META if k in source.meta}
        return node


class _PendingAttribute:
    """A parameter, buffer or constant without a node yet: it gets one at its first use."""

    __slots__ = ("node", "target")

    def __init__(self, target: str, node: fx.Node) -> None:
        self.target = target
        self.node = node


def _explain_region(node: fx.Node, modules: list[fx.GraphModule]) -> str:
    lines = [find_source_line(n) for module in modules for n in module.graph.nodes]
    own = [line for line in lines if line and not line.file.startswith(TORCH)]
    where = own[-1] if own else "source line unknown"
    return (
        f"{node.name} ({where}): the forward contains {node.target}, a region that a flat graph "
        "cannot represent. Move autocast and control flow on tensor values out of the forward."
    )
