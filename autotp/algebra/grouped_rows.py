"""Grouped rows: the operand of a grouped matrix product, which has one weight per group of rows.

The rows are sorted by group, and *bounds* give the end of each group: rows `bounds[g-1]` to
`bounds[g]` are of group g. The counts are known only at run time. Each rank owns some of the groups
and all of their rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Groups:
    """How the elements of an atom are grouped.

    - `axis`: the name of the axis of the groups (the experts). `bounds`: the name of the node whose
      value says where each group ends; the same node, the same grouping.
    """

    axis: str
    bounds: str
