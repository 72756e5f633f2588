"""What may be sharded besides the axes that `tp` divides, found from the pairs.

- An axis of a pair or of its experts, or the rows of an embedding, with at least one unit per rank
  is sharded into complete units; the first ranks get one more.
- With fewer key-value heads than ranks the group is factored, tp = n1 * n2: the key-value heads are
  sharded over n1, the query heads of each over n2, and each key-value head has n2 copies.
- A fused dim with axes of several pairs next to each other is sharded along one axis of each.
"""

from collections.abc import Iterator

from autotp.algebra.axis import Atom, Dim
from autotp.algebra.partition import Offers, Part, Partition
from autotp.planner.analysis import Analysis, AxisPair, Matching


def find_offers(analysis: Analysis, matching: Matching, tp: int) -> Offers:
    """The offers of all pairs at group size `tp`."""
    if tp == 1:
        return Offers()
    axes = {a for pair in matching.pairs for a in pair.axes} | set(_list_embedding_rows(analysis))
    axes |= {*matching.experts.values()}
    uneven = frozenset(a.name for a in axes if a.units >= tp and a.units % tp)
    factors = [factor_pair(pair, tp) for pair in matching.pairs]
    joint = [*(p for p in factors if p), *_find_joint_partitions(analysis, matching, tp)]
    return Offers(uneven, tuple(dict.fromkeys(joint)))


def _list_embedding_rows(analysis: Analysis) -> Iterator[Atom]:
    """The rows of embeddings, whatever their ids are."""
    for use in analysis.uses.values():
        for factor in use.rule.factors if use.rule.emit == "lookup" else ():
            if factor.kind == "reduce":
                yield from analysis.forest.list_leaves(factor.dim)


def factor_pair(pair: AxisPair, tp: int) -> Partition | None:
    """The partition of a factored group, where a pair's first axis has fewer units than ranks.

    Of all n1 * n2 the one with the fewest heads on the fullest rank, then the fewest copies.
    """
    if len(pair.axes) != 2 or not 1 < pair.axes[0].units < tp:
        return None
    first, second = pair.axes
    ways = [
        (-(-first.units // n) * -(-second.units // (tp // n)), -n)
        for n in range(2, first.units + 1)
        if tp % n == 0 and tp // n <= second.units
    ]
    if not ways:
        return None
    n = -min(ways)[1]
    return Partition((Part(first.name, n, tp // n), Part(second.name, tp // n, 1)))


def _find_joint_partitions(analysis: Analysis, matching: Matching, tp: int) -> Iterator[Partition]:
    """A partition for each sum whose segments belong to several pairs, or some to none."""
    forest = analysis.forest
    of_axis = {a: pair for pair in matching.pairs for a in pair.axes}
    for name, node in analysis.parameters.items():
        for dim in analysis.dims[(node, 0)]:
            sections = list(_list_sections(analysis, dim))
            pairs = [p for s in sections for p in _list_pairs(analysis, s, of_axis)]
            distinct = list(dict.fromkeys(pairs))
            cuts = [_partition_pair(pair, tp) for pair in distinct]
            if any(
                name in pair.closers for pair in distinct
            ):  # a contracted dim must be sharded in every segment
                rest = [s for s in sections if not any(_list_pairs(analysis, s, of_axis))]
                cuts += dict.fromkeys(_partition_section(analysis, s, tp) for s in rest)
            if len(cuts) > 1 and all(cuts):
                parts = tuple(part for cut in cuts if cut for part in cut.parts)
                if len({p.axis for p in parts}) == len(parts):
                    yield forest.restrict((dim,), Partition(parts))


def _partition_section(analysis: Analysis, section: Dim, tp: int) -> Partition | None:
    """How a segment in no pair is sharded next to those of pairs: along an axis `tp` divides."""
    leaves = (a for a in analysis.forest.list_leaves(section) if not a.data)
    return next((Partition((Part(a.name),)) for a in leaves if _divides(a, tp)), None)


def _divides(axis: Atom, tp: int) -> bool:
    return axis.units > 0 and axis.units % tp == 0


def _list_sections(analysis: Analysis, dim: Dim) -> Iterator[Dim]:
    for atom in analysis.forest.flatten(dim):
        if atom.segments is not None:
            yield from analysis.forest.list_segments(atom)


def _list_pairs(
    analysis: Analysis, section: Dim, of_axis: dict[Atom, AxisPair]
) -> Iterator[AxisPair]:
    for leaf in analysis.forest.list_leaves(section):
        if leaf in of_axis:
            yield of_axis[leaf]


def _partition_pair(pair: AxisPair, tp: int) -> Partition | None:
    """How a pair is sharded on its own: along its first axis with a unit for every rank."""
    fitting = [a for a in pair.axes if a.units >= tp]
    if fitting:
        return Partition((Part(fitting[0].name),))
    return factor_pair(pair, tp)
