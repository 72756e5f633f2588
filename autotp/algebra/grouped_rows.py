"""Rows that are grouped: what a grouped matrix product (one weight a group of rows) knows of them.

The rows of all groups lie one group after the other, and *bounds* say where each group ends: rows
`bounds[g-1]` to `bounds[g]` are of group g. How many that is, only the run knows. A group of ranks
shares the groups, whole ones, so each rank has the rows of its own.
"""

from dataclasses import dataclass

__all__ = ["Groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """How the elements of an atom are grouped.

    - `axis`: the name of the axis of the groups (the experts). `bounds`: the name of the node whose
      value says where each group ends; the same node, the same grouping.
    """

    axis: str
    bounds: str
