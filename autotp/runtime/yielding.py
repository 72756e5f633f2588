"""Members of a sharded model that stand aside for the model's own.

A sharded model has the children of the model it was made of, whatever they are called. What autotp
adds to its class must not hide a child called `plan` or `key` from the code that reads it.
"""

from typing import Any, Final, TypeVar, cast

__all__ = ["yield_to_child"]

M = TypeVar("M")
_CHILDREN: Final = ("_modules", "_parameters", "_buffers")


class _YieldingMember:
    """A method or property; not of the kind that wins over what an object holds itself."""

    def __init__(self, member: Any) -> None:
        self.member, self.__doc__ = member, member.__doc__
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Learns what it is called."""
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        """The model's own child of that name, else the member."""
        if model is None:
            return self.member
        held = vars(model)
        for children in _CHILDREN:
            if self.name in held.get(children, ()):
                return held[children][self.name]
        return self.member.__get__(model, owner)


def yield_to_child(member: M) -> M:
    """The member, which a child of the model with its name hides."""
    return cast("M", _YieldingMember(member))
