"""Whether a sharded model equals the whole one, and if not, which node is the first wrong one."""

from autotp.verification.verify import prove

__all__ = ["prove"]
