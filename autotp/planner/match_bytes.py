"""How many bytes of a parameter carry a pair's axes: the pair with the most is the parameter's."""

from fractions import Fraction

from autotp.algebra.axis import Atom, Dim, Forest
from autotp.planner.analysis import Analysis

__all__ = ["carried"]


def carried(analysis: Analysis, name: str, axes: tuple[Atom, ...]) -> Fraction:
    """The bytes of parameter `name` that carry `axes`: those of its segments with them."""
    value = (analysis.parameters[name], 0)
    meta = analysis.metas[value]
    shares = (_share(analysis.forest, dim, axes) for dim in analysis.dims[value])
    return Fraction(meta.numel() * meta.element_size()) * max(shares, default=Fraction(0))


def _share(forest: Forest, dim: Dim, axes: tuple[Atom, ...]) -> Fraction:
    flat = forest.flat(dim)
    if any(atom in axes for atom in flat):
        return Fraction(1)
    sums = [forest.sections(a) for a in flat if a.segments is not None]
    return max((_mixed(forest, sections, axes) for sections in sums), default=Fraction(0))


def _mixed(forest: Forest, sections: tuple[Dim, ...], axes: tuple[Atom, ...]) -> Fraction:
    sizes = [forest.size(s).coefficient for s in sections]
    shares = [_share(forest, s, axes) for s in sections]
    return Fraction(sum(n * s for n, s in zip(sizes, shares, strict=True))) / max(sum(sizes), 1)
