"""Which tensors on disk make up each parameter of a model: by Transformers' own mapping.

Names are changed and tensors merged by the converters that Transformers registers for a model's
class; they are run on tensors without values, and what they do is kept as a recipe.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.directory import Checkpoint
from autotp.checkpoint.quantized import refuse_named
from autotp.checkpoint.recipe import Recipes
from autotp.checkpoint.stored_tensor import Box, Stored, fill, lengths, whole_box
from autotp.errors import WeightsError
from autotp.model_source import transformers_module

__all__ = ["Converted", "Incoming", "Remade", "incoming", "mark_used"]


@dataclass(frozen=True, slots=True)
class Incoming:
    """What is read for a model: `tensors` by its own keys, each with what reads it.

    - `absent`: keys that no file has, and that the model's class says it can do without.
    """

    tensors: Mapping[str, Stored]
    absent: frozenset[str]


class Converted:
    """A tensor that is made of others on disk, read box by box."""

    def __init__(
        self, name: str, tensor: Tensor, recipes: Recipes, stored: Mapping[str, Stored]
    ) -> None:
        self._tensor, self._recipes, self._stored = tensor, recipes, stored
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        leaves = recipes.leaves(tensor)
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        self.label = f"{name}, made of {stored[leaves[0]].label}{more}" if leaves else name

    def read(self, box: Box) -> Tensor:
        """The elements in a box."""
        return self._recipes.read(self._tensor, box, self._leaf)

    def forget(self) -> None:
        """Lets go of whole tensors that reading needed."""
        self._recipes.forget()

    def _leaf(self, name: str, box: Box) -> Tensor:
        stored = self._stored[name]
        out = torch.empty(lengths(box), dtype=stored.dtype)
        fill(out, stored, box)
        return out


class Remade:
    """A tensor whose maker cannot be traced: made whole when it is read, until `forget`."""

    def __init__(self, label: str, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self.label, self._make = label, make
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._whole: Tensor | None = None

    def read(self, box: Box) -> Tensor:
        """The elements in a box."""
        if self._whole is None:
            self._whole = self._make()
        return self._whole[tuple(slice(*span) for span in box)]

    def forget(self) -> None:
        """Lets go of the whole tensor."""
        self._whole = None


def incoming(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,
) -> Incoming:
    """What is read for `model`, a transformers model on meta, from a checkpoint.

    - `quantiser`: the checkpoint is quantised, and its converters give the weights before that.

    Raises WeightsError for tensors missing, unknown (unless `allow_extra`), of another shape or
    kind of dtype.
    """
    matched = _Matching(cast("Any", model), checkpoint, quantiser)
    for name in sorted(checkpoint.tensors, key=matched.loading.dot_natural_key):
        matched.add(name)
    tensors, extra = matched.converted()
    missing = {key for key in matched.state if key not in tensors}
    for names in _aliases(model):
        if names & tensors.keys():
            missing -= names
    wanted, unknown = _excused(cast("Any", model), missing, extra)
    refuse_named(unknown, checkpoint.tensors)
    _check(model, checkpoint, wanted, [] if allow_extra else unknown, tensors)
    for key, stored in tensors.items():
        _check_fit(key, matched.state[key], stored)
    return Incoming(tensors, frozenset(missing - wanted))


def mark_used(model: nn.Module, names: Iterable[str]) -> None:
    """Lets the model know which conversions a checkpoint with these names needs, for saving."""
    matched = _Matching(cast("Any", model), None)
    for name in names:
        matched.target(name)
    matched.note()


# the tensors that one converter makes one of: key, name on disk, and the pattern it was found by
_Group: TypeAlias = list[tuple[str, str, str]]


class _Matching:
    """The mapping of one model and one checkpoint while it is being made."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint | None,
        quantiser: Any = None,
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.loading = transformers_module("core_model_loading")
        of = transformers_module("conversion_mapping").get_model_conversion_mapping
        mapping: list[Any] = of(model, None, quantiser)
        self.mapping, self.quantised = mapping, quantiser is not None
        self.renamings = [t for t in mapping if isinstance(t, self.loading.WeightRenaming)]
        self.converters = [t for t in mapping if isinstance(t, self.loading.WeightConverter)]
        self.by_pattern = {p: t for t in self.converters for p in t.source_patterns}
        self.state: dict[str, Tensor] = model.state_dict()
        self.direct: dict[str, str] = {}
        self.groups: dict[str, _Group] = {}
        self.extra: list[str] = []
        self.recipes = Recipes()

    def target(self, name: str) -> tuple[str, str | None]:
        """The model's key for a name on disk, and the pattern of the converter that makes it."""
        rename: Callable[..., tuple[str, str | None]] = self.loading.rename_source_key
        prefix = self.model.base_model_prefix
        key, pattern = rename(name, self.renamings, self.converters, prefix, self.state)
        if key not in self.state and name in self.state:
            key, pattern = rename(name, [], [], prefix, self.state)
        return key, pattern

    def add(self, name: str) -> None:
        """Files a tensor on disk under the key that it is of, or is a part of."""
        assert self.checkpoint is not None
        key, pattern = self.target(name)
        stored = self.checkpoint.tensors[name]
        if key not in self.state:
            self.extra.append(name)
        elif pattern is None:
            if key in self.direct:
                other = self.checkpoint.tensors[self.direct[key]].label
                raise WeightsError(f"{stored.label}: is {key}, as is {other}. Remove one of them.")
            self.direct[key] = name
        else:
            self.groups.setdefault(key, []).append((key, name, pattern))

    def converted(self) -> tuple[dict[str, Stored], list[str]]:
        """What is read for each key, and the names on disk that nothing is made of."""
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        tensors: dict[str, Stored] = {key: stored[name] for key, name in self.direct.items()}
        for first, group in self.groups.items():
            for key, tensor in self._traced(first, group).items():
                if key not in self.state:
                    self.extra.extend(self.recipes.leaves(tensor))
                elif self.recipes.untraced:
                    tensors[key] = self._remade(key, tensor, first, group)
                else:
                    tensors[key] = Converted(key, tensor, self.recipes, stored)
        if self.quantised:  # saved are the weights before that, as the model's own
            mark_used(self.model, stored)
        else:
            self.note()
        return tensors, self.extra

    def note(self) -> None:
        """Leaves on the model which conversions were used: saving reverses those."""
        self.model._weight_conversions = [t for t in self.mapping if t.was_used()]

    def _traced(self, first: str, group: _Group) -> Mapping[str, Tensor]:
        """What a converter makes, by key, without values; every op is noted down."""
        assert self.checkpoint is not None
        stored, recipes = self.checkpoint.tensors, self.recipes
        leaves = {n: recipes.leaf(n, stored[n].shape, stored[n].dtype) for _, n, _ in group}
        recipes.untraced = ""
        with recipes:
            return self._run(first, group, leaves.__getitem__)

    def _remade(self, key: str, tensor: Tensor, first: str, group: _Group) -> Remade:
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        label = f"{key}, made of {stored[group[0][1]].label}{more}"

        def whole(name: str) -> Tensor:
            out = torch.empty(stored[name].shape, dtype=stored[name].dtype)
            fill(out, stored[name], whole_box(stored[name].shape))
            return out

        return Remade(label, tensor, lambda: self._run(first, group, whole)[key])

    def _run(self, first: str, group: _Group, tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What a converter makes of the tensors of its group, by key."""
        info = _loading_info()
        converter = copy.deepcopy(self.by_pattern[group[0][2]])
        for key, name, pattern in group:
            converter.add_tensor(key, name, pattern, tensor(name))
        try:
            with torch.no_grad():
                made: Mapping[str, Any] = converter.convert(
                    first, model=self.model, config=self.model.config, loading_info=info
                )
        except self.loading.SkipParameters:
            reason = info.conversion_errors.get(first, "").strip().splitlines()[-2:]
            assert self.checkpoint is not None
            raise WeightsError(
                f"{self.checkpoint.directory}: {first} is made of {len(group)} tensors "
                f"({group[0][1]}, …), which do not go together: {' '.join(reason)}. Download the "
                "checkpoint again."
            ) from None
        return {key: m[0] if isinstance(m, list) else m for key, m in made.items()}


def _loading_info() -> Any:
    kind = transformers_module("utils.loading_report").LoadStateDictInfo
    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    return kind(**{field.name: empty.get(field.name, set()) for field in dataclasses.fields(kind)})


def _aliases(model: nn.Module) -> list[set[str]]:
    """The keys of each tensor that has several."""
    found: dict[int, set[str]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), set()).add(key)
    return [names for names in found.values() if len(names) > 1]


def _excused(model: Any, missing: set[str], extra: list[str]) -> tuple[set[str], list[str]]:
    """What is missing and what is unknown, without what the model's class says is no fault."""
    info = _loading_info()
    info.missing_keys, info.unexpected_keys = set(missing), set(extra)
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, sorted(info.unexpected_keys)


def _check(
    model: nn.Module,
    checkpoint: Checkpoint,
    missing: set[str],
    unknown: list[str],
    found: Mapping[str, Stored],
) -> None:
    files = checkpoint.files[0].name if len(checkpoint.files) == 1 else "its files"
    named = f"{checkpoint.directory}/{files}" if files != "its files" else checkpoint.directory
    name = type(model).__name__
    if missing:
        first = min(missing)
        at = f"{len(missing)} of the {len(missing) + len(found)} tensors of {name}"
        raise WeightsError(
            f"{named}: tensor {first} is missing, {at} in all{_more(missing)}. Download the "
            f"checkpoint again, or set config.architectures to the class that was saved."
        )
    if unknown:
        raise WeightsError(
            f"{checkpoint.tensors[unknown[0]].label}: {name} has no such parameter, and "
            f"{len(unknown)} of {len(checkpoint.tensors)} tensors are unknown{_more(unknown)}. "
            "Set config.architectures to the class that was saved, or pass allow_extra=True to "
            "leave them unread."
        )


def _more(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(listed[:4])
    return f": {shown}{', …' if len(listed) > 4 else ''}" if len(listed) > 1 else ""


def _check_fit(key: str, wanted: Tensor, stored: Stored) -> None:
    if tuple(wanted.shape) != stored.shape:
        raise WeightsError(
            f"{stored.label}: has shape {list(stored.shape)}, and {key} has {list(wanted.shape)} "
            "by the configuration. Use the config.json that was saved with the checkpoint."
        )
    if stored.dtype.itemsize == 1 and stored.dtype.is_floating_point and wanted.dtype.itemsize > 1:
        raise WeightsError(
            f"{stored.label}: is of {stored.dtype}, 8 bits that mean nothing without a scale, and "
            f"{key} is of {wanted.dtype}. Take the checkpoint before quantisation."
        )
    if _kind(stored.dtype) != _kind(wanted.dtype):
        raise WeightsError(
            f"{stored.label}: is of {stored.dtype}, and {key} is of {wanted.dtype}: one cannot "
            "become the other. Save the checkpoint again with the model's own kind of dtype."
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool or dtype.is_complex:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "whole"
