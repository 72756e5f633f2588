"""Graph facts: the modules and the source line that a node is from, as messages name them."""

import os

import torch
from torch import fx

from autotp.capture.graph_facts import (
    TORCH,
    SourceLine,
    find_module_path,
    find_source_line,
    list_module_paths,
    name_op,
    read_argument,
)
from autotp.dtypes import dtype_name

OWN = '  File "/models/mlp.py", line 9, in forward\n    return self.down(x)\n'
LIBRARY = (
    f'  File "{os.path.join(TORCH, "linear.py")}", line 125, in forward\n    return linear(x)\n'
)
GENERATED = '  File "<eval_with_key>.7", line 3, in forward\n    add = x + 1\n'


def node(**meta: object) -> fx.Node:
    graph = fx.Graph()
    made = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    made.meta.update(meta)
    return made


def test_a_node_is_from_the_innermost_module_of_its_stack_whichever_call_of_it() -> None:
    stack = {
        "L__self__": ("", object),
        "block": ("block", object),
        "norm": ("block.norm@1", object),
    }
    made = node(nn_module_stack=stack)

    assert ["", "block", "block.norm"] == list_module_paths(made)
    assert "block.norm" == find_module_path(made)


def test_nothing_is_known_of_the_modules_of_a_node_without_a_stack() -> None:
    hooked = node(nn_module_stack={"_empty_nn_module_stack_from_metadata_hook": ("", "")})

    assert ([], "") == (list_module_paths(node()), find_module_path(node()))
    assert [] == list_module_paths(hooked)


def test_a_source_line_is_the_models_own_before_a_librarys() -> None:
    line = SourceLine("/models/mlp.py", 9, "return self.down(x)")

    assert line == find_source_line(node(stack_trace=OWN + GENERATED + LIBRARY))
    assert "mlp.py:9: `return self.down(x)`" == str(line)
    assert "mlp.py:9" == line.place


def test_a_source_line_is_a_librarys_where_there_is_no_other_and_may_lack_its_code() -> None:
    bare = '  File "/models/mlp.py", line 9, in forward\n'
    found = find_source_line(node(stack_trace=LIBRARY))

    assert found is not None
    assert "linear.py:125" == found.place
    assert "mlp.py:9" == str(find_source_line(node(stack_trace=bare)))
    assert find_source_line(node()) is None


def test_an_op_has_a_name_without_its_overload_and_a_function_has_none() -> None:
    assert "aten::relu" == name_op(node().target)
    assert "" == name_op(len)


def test_a_dtype_is_named_without_torch() -> None:
    assert ("bfloat16", "float8_e4m3fn") == (
        dtype_name(torch.bfloat16),
        dtype_name("torch.float8_e4m3fn"),
    )


def test_an_argument_is_found_by_its_name_wherever_it_is_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.slice.Tensor, (x, 1), {"end": 4})

    assert [x, 1, None, 4, 1] == [
        read_argument(made, n) for n in ("self", "dim", "start", "end", "step")
    ]
    assert read_argument(made, "axis") is None
