"""How a noun shows itself, without the nouns knowing who draws them.

`core` may not import `show`, yet `print(plan)` shows the report. These two generic functions are
the seam: `core` calls them, `show` registers what it can draw.
"""

from functools import singledispatch

__all__ = ["renderable", "text"]


@singledispatch
def text(noun: object) -> str:
    """The plain text that shows `noun`: its repr, unless something better is registered."""
    return repr(noun)


@singledispatch
def renderable(noun: object) -> object:
    """What rich is to print for `noun`: its repr, unless something better is registered."""
    return repr(noun)
