"""The layers of a sharded model, and what neither they nor the model can do."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import fx, nn

from autotp.errors import PlanError
from autotp.runtime.codegen.function import Function, compile_graph, copy_graph
from autotp.runtime.layered_graph import LayeredGraph

T = TypeVar("T", bound=nn.Module)


class FixedModule(nn.Module):
    """A module whose code fixes dtypes and device; it can be copied, but not pickled."""

    def _apply(self: T, fn: Callable[..., torch.Tensor], recurse: bool = True) -> T:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.is_floating_point():
                _check_change(type(self).__name__, name, tensor, fn)
                break
        return super()._apply(fn, recurse)

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Copy the module: with its own parameters and the same generated code."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle: the class and its code are generated at run time."""
        raise PlanError(
            f"{type(self).__name__}: a sharded model cannot be pickled, because its class and "
            "code are generated at run time. Save its state_dict() instead, or copy it with "
            "copy.deepcopy."
        )


class Layer(FixedModule):
    """A layer of a sharded model: one function per variant, selected by the caller."""

    sharded_functions: dict[str, Function]

    def forward(  # a layer takes and gives what its graph does
        self,
        *args: Any,
        variant: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the layer's graph of the variant."""
        if variant is None or kwargs:
            raise PlanError(
                f"{type(self).__name__}: a layer of a sharded model runs only inside the model, "
                f"which selects its variant ({', '.join(self.sharded_functions)}). Call the model."
            )
        return self.sharded_functions[variant](self, *args)

    def train(self: T, mode: bool = True) -> T:
        """Return the layer; refuse another mode than the model's."""
        if mode != self.training:
            method = "train" if mode else "eval"
            raise PlanError(
                f"{type(self).__name__}: {method}() on one layer of a sharded model has no effect, "
                f"because the model selects its code. Call {method}() on the model."
            )
        return self


def prepare_root(model: nn.Module, graphs: LayeredGraph) -> fx.Graph:
    """Copy the root's graph with calls of each layer's variant, which is added to the layer."""
    names = {
        path: add_function(_make_layer(model, path), compile_graph(g))
        for path, g in graphs.layers.items()
    }
    graph = copy_graph(graphs.root)
    for node in graph.nodes:
        if node.op == "call_module":
            node.kwargs = {"variant": names[node.target]}
    return graph


def _make_layer(model: nn.Module, path: str) -> Layer:
    module = model.get_submodule(path)
    if not isinstance(module, Layer):
        module.__class__ = make_layer_class(type(module))
        cast(Layer, module).sharded_functions = {}
    return cast(Layer, module)


def add_function(layer: Layer, new: Function) -> str:
    """Add `new` to `layer` and give its name, the same for the same function."""
    for name, known in layer.sharded_functions.items():
        if known is new:
            return name
    name = f"v{len(layer.sharded_functions)}"
    layer.sharded_functions[name] = new
    return name


@functools.cache
def make_layer_class(original: type[nn.Module]) -> type[Layer]:
    """Make the class of sharded layers of class `original`, once: compilers guard on it."""
    return type(original.__name__, (Layer, original), copy_identity(original))


def copy_identity(original: type[nn.Module]) -> dict[str, Any]:
    """Copy the module, qualified name and documentation of a class."""
    names = ("__module__", "__qualname__", "__doc__")
    return {name: getattr(original, name) for name in names}


def _check_change(
    model: str, name: str, tensor: torch.Tensor, change: Callable[..., torch.Tensor]
) -> None:
    """Raise PlanError if `change` alters dtype or device, tried on an empty tensor."""
    old = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    new = change(old)
    if (new.dtype, new.device) != (old.dtype, old.device):
        raise PlanError(
            f"{model}: {name} is {old.dtype} on {old.device}, like the generated code; it "
            f"cannot become {new.dtype} on {new.device}. Convert the unsharded model first, then "
            "parallelize it."
        )
