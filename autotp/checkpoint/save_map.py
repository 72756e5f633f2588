"""How a model is saved: which keys, of what shapes, in which files, from which parameters.

All of it is what Transformers' own save_pretrained does, run on tensors without values: the
conversions of loading are reversed, tied weights are left out, and files are filled to their size.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autotp.checkpoint.atomic_write import append_tensor, begin_file, write_text
from autotp.checkpoint.directory import INDEX
from autotp.checkpoint.recipe import Recipes
from autotp.checkpoint.safetensors_format import Entry, lay_out_tensors
from autotp.checkpoint.stored_tensor import Box, make_full_box
from autotp.errors import PlanError
from autotp.model_source import import_transformers


@dataclass(frozen=True, slots=True)
class SaveMap:
    """The files of a saved model.

    - `files`: the entries of each, in order; `index`: the content of the index, empty for a single
      file.
    """

    files: Mapping[str, list[Entry]]
    index: Mapping[str, object]
    _tensors: Mapping[str, Tensor]
    _recipes: Recipes

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(e.stop - e.start for entries in self.files.values() for e in entries)

    def write(
        self,
        directory: Path | None,
        fetch: Callable[[str], Tensor],
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Write all files into `directory`, one tensor in memory at a time.

        - `directory`: None on the ranks that only take part in `fetch`.
        - `fetch`: the full tensor of a parameter or buffer of the model, by name.
        - `together`: entered around each step that may fail on one rank alone.
        """
        full: dict[str, Tensor] = {}
        done = self._find_last_uses()
        for name, entries in self.files.items():
            with together():
                if directory is not None:
                    begin_file(directory / name, entries)
            for entry in entries:
                for key in self._list_needed(entry.name):
                    if key not in full:
                        full[key] = fetch(key)
                with together():
                    if directory is not None:
                        append_tensor(directory / name, entry, self._build_tensor(entry.name, full))
                for key in done.get(entry.name, ()):
                    del full[key]

    def write_index(self, directory: Path) -> None:
        """Write the index, if there are several files."""
        if self.index:
            write_text(directory / INDEX, json.dumps(self.index, indent=2, sort_keys=True) + "\n")

    def _list_needed(self, key: str) -> list[str]:
        """List the parameters and buffers of the model that a saved tensor is computed from."""
        return self._recipes.list_leaves(self._tensors[key])

    def _build_tensor(self, key: str, full: Mapping[str, Tensor]) -> Tensor:
        """Compute a saved tensor from the full tensors that it needs."""

        def read_leaf(name: str, box: Box) -> Tensor:
            return full[name][tuple(slice(*span) for span in box)]

        tensor = self._tensors[key]
        result = self._recipes.read(tensor, make_full_box(tuple(tensor.shape)), read_leaf)
        self._recipes.forget()
        return result

    def _find_last_uses(self) -> dict[str, list[str]]:
        """Find, by the key of each saved tensor, the model's tensors that are not used after it."""
        last: dict[str, str] = {}
        for entries in self.files.values():
            for entry in entries:
                last.update(dict.fromkeys(self._list_needed(entry.name), entry.name))
        uses: dict[str, list[str]] = {}
        for name, key in last.items():
            uses.setdefault(key, []).append(name)
        return uses


def map_saved_files(full: nn.Module, max_shard_size: int | str) -> SaveMap:
    """Map the parameters of `full`, a Transformers model on meta, to the files of its checkpoint.

    - `max_shard_size`: of a file, in bytes or as text, such as "5GB".

    Raises PlanError for a converter that cannot be traced.
    """
    model = cast("Any", full)
    state = _list_saved_tensors(model)
    loading, recipes = import_transformers("core_model_loading"), Recipes()
    for name, tensor in state.items():
        recipes.add_leaf(tensor, name)
    with recipes, torch.no_grad():
        saved: dict[str, Tensor] = loading.revert_weight_conversion(model, state)
    if recipes.untraced:
        raise PlanError(
            f"{type(model).__name__}: one of its {len(state)} tensors is saved by a converter that "
            f"writes into tensors ({recipes.untraced}), which cannot be traced. Save what "
            "full_state_dict(rank0_only=True) returns on rank 0."
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
    """List the tensors to save, by the model's own keys."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    modeling = import_transformers("modeling_utils")
    return modeling.remove_tied_weights_from_state_dict(state, model)


def _split_files(saved: Mapping[str, Tensor], max_shard_size: int | str) -> Any:
    """Split tensors over files as the library does for tensors with values.

    It keeps tensors that share memory in one file, such as experts that were one parameter; for
    tensors on meta it must be given their storage.
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
            f"max_shard_size={max_shard_size!r}: {error}. Give bytes, or a text such as '5GB'."
        ) from error


def _count_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _identify_storage(tensor: Tensor) -> int:
    """Identify the storage of a tensor; all empty storages are one."""
    return tensor.untyped_storage()._cdata if _count_bytes(tensor) else 0  # pyright: ignore[reportPrivateUsage]
