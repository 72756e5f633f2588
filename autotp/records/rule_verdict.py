"""The verdict on one row of rules/, found by running its op on shards."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row's verdict: right, wrong, or untested (nothing could be run).

    - `calls`, `strategies`: how many calls, and ways to shard them, were compared with the full
      call.
    - `reason`: the first way in which a wrong row breaks its law, or why nothing could be run.
    """

    op: str
    rule: str
    verdict: str
    calls: int = 0
    strategies: int = 0
    reason: str = ""
