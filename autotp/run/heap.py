"""Memory that Python and the allocator keep after work that needed much of it for a while."""

import ctypes
import gc
import sys

__all__ = ["give_back"]


def give_back() -> None:
    """Gives back to the system what was freed: it would count beside a rank's shards for good."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
        if trim is not None:
            trim(0)
