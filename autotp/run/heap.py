"""Memory that Python and the allocator keep after work that needed much of it for a while."""

import ctypes
import gc
import sys

from torch.fx.experimental import proxy_tensor

__all__ = ["give_back"]

# torch keeps the last graph it traced here, for a search of leaks in its next export
_TRACED = "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT"


def give_back() -> None:
    """Gives back to the system what was freed: it would count beside a rank's shards for good."""
    getattr(proxy_tensor, _TRACED, dict[int, object]()).clear()
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
        if trim is not None:
            trim(0)
