"""How a noun shows itself, without the nouns knowing who draws them.

`core` may not import `show`, yet `print(plan)` shows the report. These two generic functions are
the seam: `core` calls them, `show` registers what it can draw.
"""

from functools import singledispatch

__all__ = ["render_rich", "render_text"]


@singledispatch
def render_text(noun: object) -> str:
    """The plain text that shows `noun`: its repr, unless something better is registered."""
    return repr(noun)


@singledispatch
def render_rich(noun: object) -> object:
    """What rich is to print for `noun`: its repr, unless something better is registered."""
    return repr(noun)
