"""How a record is displayed, without importing the code that renders it.

`records` may not import `report`, yet `print(plan)` shows the report. `records` calls these two
generic functions, and `report` registers its renderers with them.
"""

from functools import singledispatch


@singledispatch
def render_text(record: object) -> str:
    """Render `record` as plain text: its repr, unless a renderer is registered."""
    return repr(record)


@singledispatch
def render_rich(record: object) -> object:
    """Render `record` for rich: its repr, unless a renderer is registered."""
    return repr(record)
