"""Members of a sharded model that give way to the model's own children of the same name.

A sharded model has the children of the original model, whatever their names. A member that autotp
adds to its class must not hide a child called `plan` or `key`.
"""

from typing import Any, Final, TypeVar, cast

M = TypeVar("M")
_CHILDREN: Final = ("_modules", "_parameters", "_buffers")


class _YieldingMember:
    """A method or property as a non-data descriptor."""

    def __init__(self, member: Any) -> None:
        self.member, self.__doc__ = member, member.__doc__
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Note the member's name."""
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        """Give the model's own child of that name, or else the member."""
        if model is None:
            return self.member
        own = vars(model)
        for children in _CHILDREN:
            if self.name in own.get(children, ()):
                return own[children][self.name]
        return self.member.__get__(model, owner)


def yield_to_child(member: M) -> M:
    """Make `member` one that a child of the same name hides."""
    return cast("M", _YieldingMember(member))
