"""Makes generated code readable: short lines, no redundant arguments, one name for the device."""

import re
from textwrap import wrap

_WIDTH = 100
_INDENT = " " * 4
_END = str(2**63 - 1)  # the end of a slice without an end
_DEVICE = re.compile(r"device\(type='(\w+)'(?:, index=(\d+))?\)")
_TEXT = re.compile(r"""'[^', ]* |"[^", ]* """)  # a string with a space, where no line may break
_ALWAYS_THERE = ("cpu", "meta")


def tidy_code(value: str) -> str:
    """Tidy the expression `value`: `f(x, dim=1)`, and slices without an explicit end."""
    value = re.sub(r"\b(\w+) = (?=\S)", r"\1=", value)
    return re.sub(rf", (?:end=)?{_END}(?=\))", "", value).replace(_END, "None")


def wrap_lines(name: str, value: str, comment: str) -> str:
    """Write the line `name = value  # comment`, with the arguments on their own lines if long."""
    start, remark = f"{_INDENT}{name} = ", f"  # {comment}" if comment else ""
    line = f"{start}{value}{remark}"
    opening, bracket, rest = value.partition("(")
    length = len(_DEVICE.sub("DEVICE", line))  # as `name_device` will write it
    if length <= _WIDTH or not bracket or not rest.endswith(")") or _TEXT.search(rest):
        return line
    inner = wrap(rest[:-1], _WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    parts = [f"{_INDENT * 2}{part}" for part in inner]
    return "\n".join([f"{start}{opening}(", *parts, f"{_INDENT}){remark}"])


def name_device(text: str) -> tuple[str, str]:
    """Name the one device in `text` `DEVICE`, and give the line that defines it; else unchanged.

    A device that is not available where the code is imported becomes the CPU.
    """
    found = {match.groups() for match in _DEVICE.finditer(text)}
    if len(found) != 1:
        return text, ""
    kind, index = found.pop()
    return _DEVICE.sub("DEVICE", text), _define_device(kind, index)


def _define_device(kind: str, index: str | None) -> str:
    """Write the definition of `DEVICE`, e.g. `DEVICE = torch.device("cpu")`."""
    name = f'"{kind}:{index}"' if index and kind not in _ALWAYS_THERE else f'"{kind}"'
    if kind not in _ALWAYS_THERE:
        name = f'{name} if torch.{kind}.is_available() else "cpu"'
    return f"DEVICE = torch.device({name})"
