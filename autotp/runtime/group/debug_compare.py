"""Debug mode: checks that all ranks are called with the same inputs, and names the difference.

A call costs one all-gather of 32 bytes per rank and a pass over its inputs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.capture.cache import CacheState
from autotp.capture.program import name_leaves
from autotp.dtypes import dtype_name
from autotp.errors import GroupError
from autotp.runtime.group.agreement import digest_tensors, find_odd_ranks
from autotp.runtime.group.digest import digest_tensor
from autotp.runtime.group.exchange import gather_rows, gather_texts
from autotp.runtime.group.process_group import Group

_CALL = "the call itself"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares the calls of the ranks of one group."""

    where: Group

    def __call__(self, model: str, graph: str, inputs: Mapping[str, Any]) -> None:
        """Raise the same GroupError on every rank if their calls differ.

        - `graph`: the key of the graph that runs, and its number among those of that key.

        Constraints: of caches, which are sharded, only the structure, the dtypes and the sizes that
        depend on the data are compared.
        """
        leaves = _list_leaves(inputs)
        own = {_CALL: graph} | {name: _describe_leaf(leaf) for name, leaf in leaves.items()}
        text = json.dumps(own)
        if find_odd_ranks(digest_tensors(self.where, text.encode(), f"{model}: comparing inputs")):
            self._raise(
                model, [json.loads(other) for other in gather_texts(self.where, text)], leaves
            )

    def _raise(
        self, model: str, ranks: Sequence[Mapping[str, str]], leaves: Mapping[str, Any]
    ) -> None:
        names = dict.fromkeys(name for own in ranks for name in own if name != _CALL)
        name = next(n for n in (*names, _CALL) if len({own.get(n) for own in ranks}) > 1)
        found = [own.get(name, "nothing") for own in ranks]
        odd = find_odd_ranks(found)
        usual = next(rank for rank in range(len(ranks)) if rank not in odd)
        what = name if name == _CALL else f"the input {name!r}"
        values = self._describe_values(found, leaves.get(name), usual, odd[0])
        raise GroupError(
            f"{model}: {what} is not the same on all {len(ranks)} ranks: rank {usual} has "
            f"{found[usual]}, but {', '.join(f'rank {r} {found[r]}' for r in odd)}"
            f"{values}. Give every rank the same, for "
            "example what rank 0 broadcasts; seed all ranks alike if tokens are sampled."
        )

    def _describe_values(self, found: Sequence[str], leaf: object, usual: int, odd: int) -> str:
        """Describe the first differing element, if the tensors have one shape and dtype."""
        if len({text.partition(" #")[0] for text in found}) > 1 or " #" not in found[0]:
            return ""
        assert isinstance(leaf, Tensor)
        data = leaf.detach().contiguous().view(-1)
        raw = gather_rows(self.where, data.view(torch.uint8), "comparing values")
        unlike = (raw[usual] != raw[odd]).view(-1, leaf.element_size())
        one, other = raw[usual].view(leaf.dtype), raw[odd].view(leaf.dtype)
        places = unlike.any(1).nonzero().view(-1)
        first = int(places[0])
        at = [int(k) for k in torch.unravel_index(places[0], leaf.shape)] if leaf.dim() else []
        return (
            f": {len(places)} of {len(one)} elements differ, the first at {at}: "
            f"{one[first].item()} and {other[first].item()}"
        )


def _list_leaves(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """List the leaves of the inputs by name; those of caches with their data-dependent dims."""
    found = name_leaves({n: v for n, v in inputs.items() if not isinstance(v, CacheState)})
    for name, state in inputs.items():
        if isinstance(state, CacheState):
            kept = zip(state.spec.list_paths(), state.leaves, state.data_dims, strict=True)
            found |= {f"{name} {path}": _CacheLeaf(leaf, dims) for path, leaf, dims in kept}
    return found


@dataclass(frozen=True, slots=True)
class _CacheLeaf:
    """A tensor of a cache, and its data-dependent dims."""

    tensor: Tensor
    dims: Mapping[int, str]

    def __str__(self) -> str:
        sizes = {kind: self.tensor.shape[dim] for dim, kind in self.dims.items()}
        counted = [*self.tensor.shape] if self.tensor.shape[-1:] == (0,) else []
        shown = sizes or counted or f"{self.tensor.dim()} dims"
        return f"{dtype_name(self.tensor.dtype)} of {shown}"


def _describe_leaf(leaf: object) -> str:
    """Describe a leaf for the comparison; for a tensor, this ends with the hash of its values."""
    if not isinstance(leaf, Tensor):
        return str(leaf)
    return f"{dtype_name(leaf.dtype)} {list(leaf.shape)} #{digest_tensor(leaf).hex()[:12]}"
