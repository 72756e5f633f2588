"""An unmodified model whose submodules, parameters and buffers bear random names.

The model's own code runs as it is: each module gets a class of its own whose `__getattr__` leads
the names in that code to the new ones.
"""

import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from autotp.records.plan import Plan

LETTERS = "bcdfghjklmnpqrstvwxz"  # no word that a rule could know is spelled without vowels


def rename(model: nn.Module, seed: int) -> dict[str, str]:
    """New name to old one, of every attribute renamed, in place. No two have the same new name."""
    draw = random.Random(seed)
    old: dict[str, str] = {}
    for module in list(model.modules()):
        known = (module._modules, module._parameters, module._buffers)
        new = {name: _word(draw, old, name) for held in known for name in held}
        for held in known:
            _rekey(held, new)
        hidden = module._non_persistent_buffers_set
        module._non_persistent_buffers_set = {new[name] for name in hidden}
        module.__class__ = _led(type(module), new)
    return old


def plain(plan: Plan, old: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """All that a plan says, in the old names and without `prefix`, but for whose plan it is."""
    said = {**_said(plan), "model": "", "fingerprint": ""}
    return _mapped(said, lambda text: _spelled(text, old, prefix))


def _said(plan: Plan) -> dict[str, Any]:
    """All fields, but for how much is told of norms: repeats over layers are known by numbers."""
    said = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    said["parameters"] = {
        name: dataclasses.replace(record, reason="") if record.layout == "norm" else record
        for name, record in plan.parameters.items()
    }
    return said


def _mapped(value: Any, spell: Any) -> Any:
    """`value` as plain data, every text in it, keys too, spelled anew."""
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, Mapping):
        return {_mapped(k, spell): _mapped(v, spell) for k, v in value.items()}
    if dataclasses.is_dataclass(value):
        return _mapped({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, spell)
    if isinstance(value, tuple | list):
        return [_mapped(v, spell) for v in value]
    return value


def _spelled(text: str, old: Mapping[str, str], prefix: str) -> str:
    text = re.sub(r"[a-z]{9}", lambda found: old.get(found[0], found[0]), text)
    for joined in (prefix, prefix.replace(".", "_")) if prefix else ():
        text = re.sub(rf"(?<![\w.]){re.escape(joined)}", "", text)
    return text


def _word(draw: random.Random, known: dict[str, str], old: str) -> str:
    word = "".join(draw.choices(LETTERS, k=9))
    known[word] = old
    return word


def _rekey(held: dict[str, Any], new: Mapping[str, str]) -> None:
    items = [(new[name], value) for name, value in held.items()]
    held.clear()
    held.update(items)


def _led(kind: type[nn.Module], new: Mapping[str, str]) -> type[nn.Module]:
    """A class like `kind`, in whose code the old names find what bears the new ones."""

    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        return kind.__getattr__(self, new.get(name, name))

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:  # noqa: N807
        kind.__setattr__(self, new.get(name, name), value)

    def __getitem__(self: nn.Module, index: Any) -> Any:  # noqa: N807
        if isinstance(index, int | slice):
            found = list(self._modules.values())[index]
            return nn.ModuleList(found) if isinstance(index, slice) else found
        return kind.__getitem__(self, new.get(index, index))

    body: dict[str, Any] = {"__getattr__": __getattr__, "__setattr__": __setattr__}
    if hasattr(kind, "__getitem__"):
        body["__getitem__"] = __getitem__
    return type(kind.__name__, (kind,), body | {"__module__": kind.__module__})
