"""One variant of a sharded model as an ordinary `fx.GraphModule`: to read, export and transform.

Views are built on demand and share the parameters of the tree.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to share a module's tensors, nor to name a GraphModule's inputs

from collections.abc import Iterable

from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from autotp.capture.program import Program
from autotp.errors import PlanError
from autotp.runtime.codegen.function import copy_graph
from autotp.runtime.variant import Variant


def build_view(tree: nn.Module, variant: Variant) -> fx.GraphModule:
    """Build the variant as a GraphModule of GraphModules, one at each layer's path.

    It takes the tensor inputs by name and returns what the model returns.
    """
    root = _build_graph_module(tree, copy_graph(variant.outlined.root))
    root.training = variant.program.training
    for path, graph in variant.outlined.layers.items():
        parent, _, name = path.rpartition(".")
        root.get_submodule(parent)._modules[name] = _build_graph_module(
            tree.get_submodule(path), copy_graph(graph)
        )
    root.graph.set_codegen(_PyTreeCodeGen(_build_call_info(root.graph, variant.program)))
    root.recompile()
    return root


def _build_graph_module(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    result = fx.GraphModule(nn.Module(), fx.Graph(), type(module).__name__)
    _refuse_hidden(module)
    _share_tensors(module, result)
    result.graph = graph
    return result


def _refuse_hidden(module: nn.Module) -> None:
    """Raise PlanError if a property of GraphModule would hide what the code reads."""
    names = (*module._modules, *module._parameters, *module._buffers)
    for name in (n for n in names if isinstance(getattr(fx.GraphModule, n, None), property)):
        raise PlanError(
            f"{type(module).__name__}: its {name!r} would be hidden in a view, because GraphModule "
            "has a property of that name. The sharded model itself runs; rename it to use views."
        )


def _copy_container(module: nn.Module) -> nn.Module:
    result = nn.Module()
    _share_tensors(module, result)
    return result


def _share_tensors(module: nn.Module, result: nn.Module) -> None:
    """Give `result` the parameters, buffers and bare children of `module`."""
    result.training = module.training
    result._parameters.update(module._parameters)
    result._buffers.update(module._buffers)
    result._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    result._modules.update({n: _copy_container(child) for n, child in _list_children(module)})


def _list_children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _build_call_info(graph: fx.Graph, program: Program) -> _PyTreeInfo:
    """Describe the call of the view: placeholders by name, outputs as the model returns them."""
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    spec = pytree.tree_structure(((), dict.fromkeys(names, 0)))
    return _PyTreeInfo(names, spec, program.out_spec)
