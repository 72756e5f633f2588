"""Graphs as Python functions: equal code is one function, in every layer and variant.

So a compiler compiles thirty-two equal layers once.
"""

import hashlib
import linecache
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from torch import fx

from autotp.runtime.codegen.bindings import bind_ops
from autotp.runtime.codegen.in_place import reduce_in_place

# Any: a generated function takes whatever tensors its graph takes.
Function: TypeAlias = Callable[..., Any]


def compile_graph(graph: fx.Graph) -> Function:
    """Compile the graph to a function of a module and the graph's inputs.

    Example: `compile_graph(layer_graph)(layer, hidden, cos, sin, mask)`.
    """
    run = copy_graph(graph)
    reduce_in_place(run)
    bind_ops(run)
    code = run.python_code("self")
    return _compile_code(code.src.strip() + "\n", tuple(code.globals.items()))


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy the graph, with flat inputs and outputs."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


@cache
def _compile_code(source: str, names: tuple[tuple[str, Any], ...]) -> Function:
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = f"<autotp graph {digest}>"
    # tracebacks and debuggers show the lines of generated code only from here
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = dict(names)
    exec(compile(source, file, "exec"), scope)
    return scope["forward"]
