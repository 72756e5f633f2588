"""What was found of one row of rules/ by running its op on shards."""

from dataclasses import dataclass

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row's verdict: right, wrong, or untested (nothing could be run).

    - `calls`, `strategies`: how many calls, and ways to cut them, were compared with the whole.
    - `reason`: the first way in which a wrong row breaks its law, or why nothing could be run.
    """

    op: str
    rule: str
    verdict: str
    calls: int = 0
    strategies: int = 0
    reason: str = ""
