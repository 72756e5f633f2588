"""Which tensors on disk make up each parameter of a model, by Transformers' own mapping.

The converters that Transformers registers for a model's class rename and merge tensors. They are
run on tensors without values, and their ops are recorded.
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


@dataclass(frozen=True, slots=True)
class LoadMap:
    """What is read for a model: `tensors`, by the model's own keys.

    - `absent`: keys that are in no file, and that the model's class does not require.
    """

    tensors: Mapping[str, StoredTensor]
    absent: frozenset[str]


class ConvertedTensor:
    """A tensor that is computed from others on disk, and read box by box."""

    def __init__(
        self, name: str, tensor: Tensor, recipes: Recipes, stored: Mapping[str, StoredTensor]
    ) -> None:
        self._tensor, self._recipes, self._stored = tensor, recipes, stored
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        leaves = recipes.list_leaves(tensor)
        more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        self.label = f"{name}, made of {stored[leaves[0]].label}{more}" if leaves else name

    def read(self, box: Box) -> Tensor:
        """Read the elements in a box."""
        return self._recipes.read(self._tensor, box, self._read_leaf)

    def forget(self) -> None:
        """Free the full tensors that reading needed."""
        self._recipes.forget()

    def _read_leaf(self, name: str, box: Box) -> Tensor:
        stored = self._stored[name]
        out = torch.empty(measure_box(box), dtype=stored.dtype)
        fill_tensor(out, stored, box)
        return out


class RebuiltTensor:
    """A tensor whose converter cannot be traced: computed in full, and kept until `forget`."""

    def __init__(self, label: str, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self.label, self._make = label, make
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._full: Tensor | None = None

    def read(self, box: Box) -> Tensor:
        """Read the elements in a box."""
        if self._full is None:
            self._full = self._make()
        return self._full[tuple(slice(*span) for span in box)]

    def forget(self) -> None:
        """Free the full tensor."""
        self._full = None


def map_checkpoint(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    allow_extra: bool = False,
    quantiser: Any = None,
) -> LoadMap:
    """Map the tensors of a checkpoint to the keys of `model`, a Transformers model on meta.

    - `quantiser`: whose converters dequantise the weights of a quantised checkpoint.

    Raises WeightsError for tensors that are missing, unknown (unless `allow_extra`), or of another
    shape or kind of dtype.
    """
    matcher = _CheckpointMatcher(cast("Any", model), checkpoint, quantiser)
    for name in sorted(checkpoint.tensors, key=matcher.loading.dot_natural_key):
        matcher.add_tensor(name)
    tensors, extra = matcher.convert_tensors()
    missing = {key for key in matcher.state if key not in tensors}
    for names in _find_aliases(model):
        if names & tensors.keys():
            missing -= names
    wanted, unknown = _excuse_keys(cast("Any", model), missing, extra)
    refuse_packed_names(unknown, checkpoint.tensors)
    _check_complete(model, checkpoint, wanted, [] if allow_extra else unknown, tensors)
    for key, stored in tensors.items():
        _check_fit(key, matcher.state[key], stored)
    return LoadMap(tensors, frozenset(missing - wanted))


def mark_used_conversions(model: nn.Module, names: Iterable[str]) -> None:
    """Record on the model which conversions a checkpoint with these names needs, for saving."""
    matcher = _CheckpointMatcher(cast("Any", model), None)
    for name in names:
        matcher.find_key(name)
    matcher.record_conversions()


# the tensors that one converter merges: key, name on disk, and the pattern that matched it
_Group: TypeAlias = list[tuple[str, str, str]]


class _CheckpointMatcher:
    """Matches the tensors of one checkpoint with the keys of one model."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint | None,
        quantiser: Any = None,
    ) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.loading = import_transformers("core_model_loading")
        conversions = import_transformers("conversion_mapping")
        mapping: list[Any] = conversions.get_model_conversion_mapping(model, None, quantiser)
        self.mapping, self.quantised = mapping, quantiser is not None
        self.renamings = [t for t in mapping if isinstance(t, self.loading.WeightRenaming)]
        self.converters = [t for t in mapping if isinstance(t, self.loading.WeightConverter)]
        self.by_pattern = {p: t for t in self.converters for p in t.source_patterns}
        self.state: dict[str, Tensor] = model.state_dict()
        self.direct: dict[str, str] = {}
        self.groups: dict[str, _Group] = {}
        self.extra: list[str] = []
        self.recipes = Recipes()

    def find_key(self, name: str) -> tuple[str, str | None]:
        """Find the model's key for a name on disk, and the pattern of its converter, if any."""
        rename: Callable[..., tuple[str, str | None]] = self.loading.rename_source_key
        prefix = self.model.base_model_prefix
        key, pattern = rename(name, self.renamings, self.converters, prefix, self.state)
        if key not in self.state and name in self.state:
            key, pattern = rename(name, [], [], prefix, self.state)
        return key, pattern

    def add_tensor(self, name: str) -> None:
        """Assign a tensor on disk to the key that it belongs to."""
        assert self.checkpoint is not None
        key, pattern = self.find_key(name)
        stored = self.checkpoint.tensors[name]
        if key not in self.state:
            self.extra.append(name)
        elif pattern is None:
            if key in self.direct:
                other = self.checkpoint.tensors[self.direct[key]].label
                raise WeightsError(
                    f"{stored.label}: gives the values of {key}, as does {other}. Remove one of "
                    "them."
                )
            self.direct[key] = name
        else:
            self.groups.setdefault(key, []).append((key, name, pattern))

    def convert_tensors(self) -> tuple[dict[str, StoredTensor], list[str]]:
        """Give the tensor that is read for each key, and the names on disk that are not used."""
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        tensors: dict[str, StoredTensor] = {key: stored[name] for key, name in self.direct.items()}
        for first, group in self.groups.items():
            for key, tensor in self._trace(first, group).items():
                if key not in self.state:
                    self.extra.extend(self.recipes.list_leaves(tensor))
                elif self.recipes.untraced:
                    tensors[key] = self._rebuild(key, tensor, first, group)
                else:
                    tensors[key] = ConvertedTensor(key, tensor, self.recipes, stored)
        if self.quantised:  # the model is saved without its quantisation
            mark_used_conversions(self.model, stored)
        else:
            self.record_conversions()
        return tensors, self.extra

    def record_conversions(self) -> None:
        """Record on the model which conversions were used: saving reverses them."""
        self.model._weight_conversions = [t for t in self.mapping if t.was_used()]

    def _trace(self, first: str, group: _Group) -> Mapping[str, Tensor]:
        """Run a converter on tensors without values, recording its ops; give its results by key."""
        assert self.checkpoint is not None
        stored, recipes = self.checkpoint.tensors, self.recipes
        leaves = {n: recipes.make_leaf(n, stored[n].shape, stored[n].dtype) for _, n, _ in group}
        recipes.untraced = ""
        with recipes:
            return self._convert(first, group, leaves.__getitem__)

    def _rebuild(self, key: str, tensor: Tensor, first: str, group: _Group) -> RebuiltTensor:
        assert self.checkpoint is not None
        stored = self.checkpoint.tensors
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        label = f"{key}, made of {stored[group[0][1]].label}{more}"

        def read_full(name: str) -> Tensor:
            out = torch.empty(stored[name].shape, dtype=stored[name].dtype)
            fill_tensor(out, stored[name], make_full_box(stored[name].shape))
            return out

        return RebuiltTensor(label, tensor, lambda: self._convert(first, group, read_full)[key])

    def _convert(
        self, first: str, group: _Group, tensor: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Run a converter on the tensors of its group; give its results by key."""
        info = _make_loading_info()
        converter = copy.deepcopy(self.by_pattern[group[0][2]])
        for key, name, pattern in group:
            converter.add_tensor(key, name, pattern, tensor(name))
        try:
            with torch.no_grad():
                results: Mapping[str, Any] = converter.convert(
                    first, model=self.model, config=self.model.config, loading_info=info
                )
        except self.loading.SkipParameters:
            reason = info.conversion_errors.get(first, "").strip().splitlines()[-2:]
            assert self.checkpoint is not None
            raise WeightsError(
                f"{self.checkpoint.directory}: {first} is made of {len(group)} tensors "
                f"({group[0][1]}, …), which do not fit together: {' '.join(reason)}. Download the "
                "checkpoint again."
            ) from None
        return {key: r[0] if isinstance(r, list) else r for key, r in results.items()}


def _make_loading_info() -> Any:
    kind = import_transformers("utils.loading_report").LoadStateDictInfo
    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    return kind(**{field.name: empty.get(field.name, set()) for field in dataclasses.fields(kind)})


def _find_aliases(model: nn.Module) -> list[set[str]]:
    """Find the keys of each tensor that has several."""
    found: dict[int, set[str]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), set()).add(key)
    return [names for names in found.values() if len(names) > 1]


def _excuse_keys(model: Any, missing: set[str], extra: list[str]) -> tuple[set[str], list[str]]:
    """Drop the missing and unknown keys that the model's class accepts."""
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
    where = f"{checkpoint.directory}/{files}" if files != "its files" else checkpoint.directory
    name = type(model).__name__
    if missing:
        first = min(missing)
        at = f"{len(missing)} of the {len(missing) + len(found)} tensors of {name}"
        raise WeightsError(
            f"{where}: tensor {first} is missing, {at} in all{_list_more(missing)}. Download the "
            f"checkpoint again, or set config.architectures to the class that was saved."
        )
    if unknown:
        raise WeightsError(
            f"{checkpoint.tensors[unknown[0]].label}: {name} has no such parameter, and "
            f"{len(unknown)} of {len(checkpoint.tensors)} tensors are unknown"
            f"{_list_more(unknown)}. Set config.architectures to the class that was saved, or pass "
            "allow_extra=True to ignore them."
        )


def _list_more(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(listed[:4])
    return f": {shown}{', …' if len(listed) > 4 else ''}" if len(listed) > 1 else ""


def _check_fit(key: str, wanted: Tensor, stored: StoredTensor) -> None:
    if tuple(wanted.shape) != stored.shape:
        raise WeightsError(
            f"{stored.label}: has shape {list(stored.shape)}, but {key} has {list(wanted.shape)} "
            "by the configuration. Use the config.json that was saved with the checkpoint."
        )
    if stored.dtype.itemsize == 1 and stored.dtype.is_floating_point and wanted.dtype.itemsize > 1:
        raise WeightsError(
            f"{stored.label}: has dtype {stored.dtype}, whose 8 bits need a scale, but {key} has "
            f"{wanted.dtype}. Use the checkpoint before quantisation."
        )
    if _classify_dtype(stored.dtype) != _classify_dtype(wanted.dtype):
        raise WeightsError(
            f"{stored.label}: has dtype {stored.dtype}, but {key} has {wanted.dtype}, and one "
            "cannot be converted to the other. Save the checkpoint with the model's own dtypes."
        )


def _classify_dtype(dtype: torch.dtype) -> str:
    if dtype == torch.bool or dtype.is_complex:
        return str(dtype)
    return "floating" if dtype.is_floating_point else "integer"
