"""Whether a sharded model equals the unsharded one, and if not, which node first differs."""

from autotp.verification.verify import compare_ranks

__all__ = ["compare_ranks"]
