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
from autotp.checkpoint.quantized import refuse_packed_names
from autotp.checkpoint.recipe import Recipes
from autotp.checkpoint.stored_tensor import (
    Box,
    StoredTensor,
    fill_tensor,
    make_full_box,
    measure_box,
)
from autotp.errors import WeightsError
from autotp.model_source import import_transformers

__all__ = ["ConvertedTensor", "LoadMap", "RebuiltTensor", "map_checkpoint", "mark_used_conversions"]


@dataclass(frozen=True, slots=True)
class LoadMap:
    """What is read for a model: `tensors` by its own keys, each with what reads it.

    - `absent`: keys that no file has, and that the model's class says it can do without.
    """

    tensors: Mapping[str, StoredTensor]
    absent: frozenset[str]


class ConvertedTensor:
    """A tensor that is made of others on disk, read box by box."""

    def __init__(
        self, name: str, tensor: Tensor, recipes: Recipes, stored: Mapping[str, StoredTensor]
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
        out = torch.empty(measure_box(box), dtype=stored.dtype)
        fill_tensor(out, stored, box)
        return out


class RebuiltTensor:
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


def map_checkpoint(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,
) -> LoadMap:
    """What is read for `model`, a transformers model on meta, from a checkpoint.

    - `quantiser`: the checkpoint is quantised, and its converters give the weights before that.

    Raises WeightsError for tensors missing, unknown (unless `allow_extra`), of another shape or
    kind of dtype.
    """
    matched = _CheckpointMatcher(cast("Any", model), checkpoint, quantiser)
    for name in sorted(checkpoint.tensors, key=matched.loading.dot_natural_key):
        matched.add(name)
    tensors, extra = matched.converted()
    missing = {key for key in matched.state if key not in tensors}
    for names in _find_aliases(model):
        if names & tensors.keys():
            missing -= names
    wanted, unknown = _excuse_keys(cast("Any", model), missing, extra)
    refuse_packed_names(unknown, checkpoint.tensors)
    _check_complete(model, checkpoint, wanted, [] if allow_extra else unknown, tensors)
    for key, stored in tensors.items():
        _check_fit(key, matched.state[key], stored)
    return LoadMap(tensors, frozenset(missing - wanted))


def mark_used_conversions(model: nn.Module, names: Iterable[str]) -> None:
    """Lets the model know which conversions a checkpoint with these names needs, for saving."""
    matched = _CheckpointMatcher(cast("Any", model), None)
    for name in names:
        matched.target(name)
    matched.note()


# the tensors that one converter makes one of: key, name on disk, and the pattern it was found by
_Group: TypeAlias = list[tuple[str, str, str]]


class _CheckpointMatcher:
    """The mapping of one model and one checkpoint while it is being made."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint | None,
        quantiser: Any = None,
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.loading = import_transformers("core_model_loading")
        of = import_transformers("conversion_mapping").get_model_conversion_mapping
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

    def converted(self) -> tuple[dict[str, StoredTensor], list[str]]:
        """What is read for each key, and the names on disk that nothing is made of."""
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        tensors: dict[str, StoredTensor] = {key: stored[name] for key, name in self.direct.items()}
        for first, group in self.groups.items():
            for key, tensor in self._traced(first, group).items():
                if key not in self.state:
                    self.extra.extend(self.recipes.leaves(tensor))
                elif self.recipes.untraced:
                    tensors[key] = self._remade(key, tensor, first, group)
                else:
                    tensors[key] = ConvertedTensor(key, tensor, self.recipes, stored)
        if self.quantised:  # saved are the weights before that, as the model's own
            mark_used_conversions(self.model, stored)
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

    def _remade(self, key: str, tensor: Tensor, first: str, group: _Group) -> RebuiltTensor:
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        label = f"{key}, made of {stored[group[0][1]].label}{more}"

        def whole(name: str) -> Tensor:
            out = torch.empty(stored[name].shape, dtype=stored[name].dtype)
            fill_tensor(out, stored[name], make_full_box(stored[name].shape))
            return out

        return RebuiltTensor(label, tensor, lambda: self._run(first, group, whole)[key])

    def _run(self, first: str, group: _Group, tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What a converter makes of the tensors of its group, by key."""
        info = _make_loading_info()
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


def _make_loading_info() -> Any:
    kind = import_transformers("utils.loading_report").LoadStateDictInfo
    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    return kind(**{field.name: empty.get(field.name, set()) for field in dataclasses.fields(kind)})


def _find_aliases(model: nn.Module) -> list[set[str]]:
    """The keys of each tensor that has several."""
    found: dict[int, set[str]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), set()).add(key)
    return [names for names in found.values() if len(names) > 1]


def _excuse_keys(model: Any, missing: set[str], extra: list[str]) -> tuple[set[str], list[str]]:
    """What is missing and what is unknown, without what the model's class says is no fault."""
    info = _make_loading_info()
    info.missing_keys, info.unexpected_keys = set(missing), set(extra)
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, sorted(info.unexpected_keys)


def _check_complete(
    model: nn.Module,
    checkpoint: Checkpoint,
    missing: set[str],
    unknown: list[str],
    found: Mapping[str, StoredTensor],
) -> None:
    files = checkpoint.files[0].name if len(checkpoint.files) == 1 else "its files"
    named = f"{checkpoint.directory}/{files}" if files != "its files" else checkpoint.directory
    name = type(model).__name__
    if missing:
        first = min(missing)
        at = f"{len(missing)} of the {len(missing) + len(found)} tensors of {name}"
        raise WeightsError(
            f"{named}: tensor {first} is missing, {at} in all{_list_more(missing)}. Download the "
            f"checkpoint again, or set config.architectures to the class that was saved."
        )
    if unknown:
        raise WeightsError(
            f"{checkpoint.tensors[unknown[0]].label}: {name} has no such parameter, and "
            f"{len(unknown)} of {len(checkpoint.tensors)} tensors are unknown{_list_more(unknown)}. "
            "Set config.architectures to the class that was saved, or pass allow_extra=True to "
            "leave them unread."
        )


def _list_more(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(listed[:4])
    return f": {shown}{', …' if len(listed) > 4 else ''}" if len(listed) > 1 else ""


def _check_fit(key: str, wanted: Tensor, stored: StoredTensor) -> None:
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
    if _classify_dtype(stored.dtype) != _classify_dtype(wanted.dtype):
        raise WeightsError(
            f"{stored.label}: is of {stored.dtype}, and {key} is of {wanted.dtype}: one cannot "
            "become the other. Save the checkpoint again with the model's own kind of dtype."
        )


def _classify_dtype(dtype: torch.dtype) -> str:
    if dtype == torch.bool or dtype.is_complex:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "whole"
