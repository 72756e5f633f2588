"""The postcondition of capture: what every later stage assumes of a program.

Constraints: reads only the program and the model's tensors; runs nothing.
"""

import ast
import builtins
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autotp.capture.clean import is_removable
from autotp.capture.graph_facts import describe_node, list_results
from autotp.capture.program import Program

_OPS = ("placeholder", "get_attr", "call_function", "output")
_GUARD_NAMES = {"L", "torch", "math", *dir(builtins)}


def find_program_faults(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Each way in which `program` is not a flat, functional graph of a model with these tensors.

    - `tensors`: the model's parameters and buffers by name.
    """
    try:
        program.graph.lint()
    except RuntimeError as error:
        yield f"the graph is malformed: {str(error).strip()}"
        return
    yield from _find_input_faults(program)
    yield from _find_state_faults(program, tensors)
    for node in program.graph.nodes:
        yield from (f"{describe_node(node)}: {reason}" for reason in _find_node_faults(node))
    yield from _find_size_faults(program)
    yield from _find_output_faults(program)
    yield from _find_guard_faults(program)


def _find_input_faults(program: Program) -> Iterator[str]:
    nodes = program.graph.find_nodes(op="placeholder")
    names = [str(node.target) for node in nodes]
    inputs = [name.replace(".", "_") for name in program.inputs]
    if names != inputs:
        yield f"the graph takes {names}, but the program's inputs are {inputs}"
    for node in nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            yield f'input {node.target}: meta["val"] is {node.meta.get("val")!r}, not a tensor'
    ranks = {str(n.target): len(val.shape) for n in nodes for val in list_results(n).values()}
    for name, dims in program.data_dims.items():
        rank = ranks.get(name.replace(".", "_"))
        if rank is None:
            yield f"data dims {dims} are given for {name}, which is not an input"
        elif any(not 0 <= d < rank for d in dims):
            yield f"input {name} has {rank} dims, but its data dims are {dims}"


def _find_state_faults(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Every `get_attr` reads an existing tensor under its first name, with the right meta."""
    known = {**tensors, **program.lifted}
    seen: set[str] = set()
    for node in program.graph.find_nodes(op="get_attr"):
        name, where = str(node.target), describe_node(node)
        tensor, meta = known.get(name), node.meta.get("val")
        if tensor is None:
            yield f"{where}: {name} is neither a parameter, a buffer nor a lifted constant"
        elif not isinstance(meta, torch.Tensor):
            yield f'{where}: meta["val"] of {name} is {meta!r}, not a tensor'
        elif (tuple(meta.shape), meta.dtype) != (tuple(tensor.shape), tensor.dtype):
            yield (
                f"{where}: {name} is {tuple(tensor.shape)} of {tensor.dtype} in the model, but "
                f"{tuple(meta.shape)} of {meta.dtype} in the graph"
            )
        if name in program.tied:
            yield f"{where}: {name} is tied to {program.tied[name]}, under which it must be read"
        if name in seen:
            yield f"{where}: {name} is read by two get_attr nodes; later stages expect one"
        seen.add(name)


def _find_node_faults(node: fx.Node) -> Iterator[str]:
    if node.op not in _OPS:
        yield f"a node of kind {node.op} in a flat graph, which has only {', '.join(_OPS)}"
    if node.op == "output":
        return
    if node.op != "placeholder" and not node.users and is_removable(node):
        yield "nothing reads it, and it has no effect: a dead node"
    if node.op != "call_function":
        return
    schema = node.target._schema if isinstance(node.target, OpOverload) else None  # pyright: ignore[reportPrivateUsage] torch has no public way
    if "val" not in node.meta and (schema is None or schema.returns):
        yield 'has no meta["val"]'
    if isinstance(node.target, HigherOrderOperator):
        yield f"calls the region {node.target}, which a flat graph does not have"
    if schema is not None and schema.is_mutable:
        yield f"{node.target} writes to its operands, in a graph that must be functional"


def _find_size_faults(program: Program) -> Iterator[str]:
    """Every symbolic size is computed from sizes of inputs, or depends on values."""
    known: set[Any] = set()
    read: set[Any] = set()
    for node in program.graph.nodes:
        sizes = {s.node.expr: s for s in _list_symbolic_sizes(node)}
        if node.op == "placeholder":
            known.update(*(expression.free_symbols for expression in sizes))
        for expression, size in sizes.items():
            if expression in read:
                continue
            read.add(expression)
            unknown = expression.free_symbols - known - free_unbacked_symbols(size)
            if unknown:
                names = ", ".join(sorted(map(str, unknown)))
                yield f"{describe_node(node)}: its size {expression} has {names}, unlike any input"


def _list_symbolic_sizes(node: fx.Node) -> Iterator[torch.SymInt]:
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        yield val
    for tensor in list_results(node).values():
        yield from (size for size in tensor.shape if isinstance(size, torch.SymInt))


def _find_output_faults(program: Program) -> Iterator[str]:
    outputs = cast("object", program.graph.output_node().args[0])
    if not isinstance(outputs, list | tuple):
        yield f"the graph returns {outputs!r}, not a flat tuple"
        return
    leaves = cast("list[object]", outputs)
    if len(leaves) != program.out_spec.num_leaves:
        yield (
            f"the graph returns {len(leaves)} values, but the model's output has "
            f"{program.out_spec.num_leaves} leaves"
        )
    for number, carried in program.carried.items():
        if not 0 <= number < len(leaves):
            yield f"{carried.path} of the cache is output {number} of {len(leaves)}"
        elif carried.taken and carried.taken not in program.inputs:
            yield f"{carried.path} of the cache replaces {carried.taken}, which is not an input"


def _find_guard_faults(program: Program) -> Iterator[str]:
    """Guards are expressions over the inputs only."""
    inputs = {name.partition(".")[0] for name in (*program.inputs, *program.constants)}
    for expression in dict.fromkeys(guard.expression for guard in program.guards):
        try:
            tree = ast.parse(expression, mode="eval")
        except SyntaxError as error:
            yield f"guard {expression}: is not an expression: {error.msg}"
            continue
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        unknown = names - _GUARD_NAMES | set(_list_subjects(tree)) - inputs
        if unknown:
            yield f"guard {expression}: refers to {', '.join(sorted(unknown))}, not to an input"


def _list_subjects(tree: ast.AST) -> Iterator[str]:
    """The inputs that an expression names as `L['name']`."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=name)):
                yield str(name)
            case _:
                pass
