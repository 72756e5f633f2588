"""Memory that Python, torch and the allocator retain after work that needed much of it."""

import ctypes
import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import fx
from torch.fx import graph_module
from torch.fx.experimental import proxy_tensor

# torch keeps the last traced graph here, to search for leaks in its next export
_TRACED = "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT"


def release_memory() -> None:
    """Return freed memory to the system, where it would otherwise stay with the rank for good."""
    _untraced()


def _release() -> None:
    getattr(proxy_tensor, _TRACED, dict[int, object]()).clear()
    gc.collect()
    _forget_sources()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
        if trim is not None:
            trim(0)


_untraced = cast("Callable[[], None]", torch.compiler.disable(_release))
"""A compiler that meets a capture must not trace this: it would take half a minute."""


def _forget_sources() -> None:
    """Drop the sources of GraphModules that no longer exist; torch keeps all, for tracebacks.

    One capture compiles the graph about ten times.
    """
    loader = getattr(graph_module, "_loader", None)
    sources: dict[str, str] = getattr(loader, "eval_cache", {})
    needed = set(_list_code_names(fx.GraphModule))
    for name in [name for name in sources if name not in needed]:
        del sources[name]
        linecache.cache.pop(name, None)


def _list_code_names(kind: type) -> Iterator[str]:
    """The file name of each existing GraphModule's code: each GraphModule has its own class."""
    for each in kind.__subclasses__():
        code = getattr(each.__dict__.get("forward"), "__code__", None)
        if code is not None:
            yield code.co_filename
        yield from _list_code_names(each)
