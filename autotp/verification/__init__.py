"""Whether a sharded model equals the whole one, and if not, which node is the first wrong one."""

from autotp.verification.verify import compare_ranks

__all__ = ["compare_ranks"]
