"""What a model is saved as: which keys, of what shapes, in which files, made of which parameters.

All of it is what Transformers' own save_pretrained would do, asked on tensors without values: the
conversion that loading did is reversed, tied weights are left out, files are filled to their size.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.directory import INDEX
from autotp.checkpoint.recipe import Recipes
from autotp.checkpoint.safetensors_format import Entry, lay_out_tensors
from autotp.checkpoint.stored_tensor import Box, make_full_box
from autotp.errors import PlanError
from autotp.model_source import import_transformers

__all__ = ["SaveMap", "map_saved_files"]


@dataclass(frozen=True, slots=True)
class SaveMap:
    """The files of a saved model.

    - `files`: the entries of each, in order; `index`: the text of the index, empty if there is one
      file.
    """

    files: Mapping[str, list[Entry]]
    index: Mapping[str, object]
    _tensors: Mapping[str, Tensor]
    _recipes: Recipes

    @property
    def index_name(self) -> str:
        """The name of the index file."""
        return INDEX

    def needed(self, key: str) -> list[str]:
        """The parameters and buffers of the model that a saved tensor is made of."""
        return self._recipes.leaves(self._tensors[key])

    def made(self, key: str, whole: Mapping[str, Tensor]) -> Tensor:
        """A saved tensor, made of the whole tensors that it needs."""

        def leaf(name: str, box: Box) -> Tensor:
            return whole[name][tuple(slice(*span) for span in box)]

        tensor = self._tensors[key]
        made = self._recipes.read(tensor, make_full_box(tuple(tensor.shape)), leaf)
        self._recipes.forget()
        return made

    def last_uses(self) -> dict[str, list[str]]:
        """After which saved tensor each of the model's is needed no more: by the former's key."""
        last: dict[str, str] = {}
        for entries in self.files.values():
            for entry in entries:
                last.update(dict.fromkeys(self.needed(entry.name), entry.name))
        found: dict[str, list[str]] = {}
        for name, key in last.items():
            found.setdefault(key, []).append(name)
        return found

    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(e.stop - e.start for entries in self.files.values() for e in entries)


def map_saved_files(whole: nn.Module, max_shard_size: int | str) -> SaveMap:
    """What `whole`, a transformers model on meta, is saved as."""
    model = cast("Any", whole)
    state = _list_saved_tensors(model)
    loading, recipes = import_transformers("core_model_loading"), Recipes()
    for name, tensor in state.items():
        recipes.name(tensor, name)
    with recipes, torch.no_grad():
        saved: dict[str, Tensor] = loading.revert_weight_conversion(model, state)
    if recipes.untraced:
        raise PlanError(
            f"{type(model).__name__}: one of the {len(state)} tensors is saved by a converter that "
            f"writes into tensors ({recipes.untraced}), which cannot be traced. Save what "
            "full_state_dict(rank0_only=True) gives on rank 0."
        )
    split = _split_files(saved, max_shard_size)
    files = {
        name: lay_out_tensors((key, saved[key].dtype, tuple(saved[key].shape)) for key in keys)
        for name, keys in split.filename_to_tensors.items()
    }
    index: dict[str, object] = {}
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    return SaveMap(files, index, saved, recipes)


def _list_saved_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors that are saved, by the model's own keys."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    modeling = import_transformers("modeling_utils")
    return modeling.remove_tied_weights_from_state_dict(state, model)


def _split_files(saved: Mapping[str, Tensor], max_shard_size: int | str) -> Any:
    """Which file each tensor goes to: the library's answer for tensors with values.

    It keeps those that share memory in one file, such as the experts that were one parameter, and
    leaves tensors on meta apart, unless it is told.
    """
    hub: Any = importlib.import_module("huggingface_hub")  # comes with Transformers
    try:
        return hub.split_state_dict_into_shards_factory(
            dict(saved),
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
            get_storage_size=_count_bytes,
            get_storage_id=_identify_storage,
        )
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"max_shard_size is {max_shard_size!r}: {error}. Give bytes, or a text such as '5GB'."
        ) from error


def _count_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _identify_storage(tensor: Tensor) -> int:
    """What tells the memory of a tensor from that of others, all without any being one."""
    return tensor.untyped_storage()._cdata if _count_bytes(tensor) else 0  # pyright: ignore[reportPrivateUsage]
