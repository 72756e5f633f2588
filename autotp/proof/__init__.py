"""Whether a sharded model equals the whole one, and if not, which node is the first wrong one."""

from autotp.proof.verdict import prove

__all__ = ["prove"]
