"""Checks that all ranks have the same plan and weights, by hash.

Each check is one all-gather of 32 bytes per rank, in which every rank must take part; more is sent
only if something differs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autotp.errors import PlanError, WeightsError
from autotp.runtime.group.digest import digest_tensor
from autotp.runtime.group.exchange import gather_rows, gather_texts
from autotp.runtime.group.process_group import Group, group_exists

_SHOWN = 3


def require_agreement(group: Group, text: str, what: str) -> None:
    """Raise the same PlanError on every rank if `text` is not the same on all of them.

    - `what` names what is compared, e.g. "the plan".
    """
    found = digest_tensors(group, text.encode(), what)
    if not (odd := find_odd_ranks(found)):
        return
    common = Counter(found).most_common(1)[0][0]
    raise PlanError(
        f"{what} is not the same on all {group.size} ranks: {group.size - len(odd)} have the hash "
        f"{common.hex()[:12]}, but ranks {odd} have {', '.join(found[r].hex()[:12] for r in odd)}. "
        "Give every rank the same model, options and library versions, or one plan with plan=."
    )


def require_equal_weights(group: Group, tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise the same WeightsError on every rank if a tensor is not the same on all of them.

    - `what` names them, e.g. "the unsharded weights". Tensors on meta are skipped.

    Constraints: one pass over the memory of the tensors, without a copy.
    """
    if not group_exists(group.name) or group.size == 1:
        return
    own = {name: digest_tensor(tensor).hex()[:16] for name, tensor in tensors if not tensor.is_meta}
    if not find_odd_ranks(digest_tensors(group, json.dumps(own).encode(), what)):
        return
    ranks = [json.loads(text) for text in gather_texts(group, json.dumps(own))]
    raise WeightsError(_describe_difference(ranks, what))


def digest_tensors(group: Group, data: bytes, what: str) -> Sequence[bytes]:
    """Gather the hash of each rank's `data`; without processes, only the own one."""
    own = hashlib.sha256(data).digest()
    if not group_exists(group.name):
        return [own]
    found = gather_rows(group, torch.tensor(list(own), dtype=torch.uint8), what)
    return [bytes(row) for row in found.tolist()]


def find_odd_ranks(found: Sequence[object]) -> list[int]:
    """Find the ranks that differ from the majority; in a tie, from rank 0's side."""
    common = Counter(found).most_common(1)[0][0]
    return [rank for rank, item in enumerate(found) if item != common]


def _describe_difference(ranks: Sequence[Mapping[str, str]], what: str) -> str:
    """Describe which tensors differ, and on which ranks."""
    names = dict.fromkeys(name for own in ranks for name in own)
    wrong = [n for n in names if len({own.get(n) for own in ranks}) > 1]
    first, hashes = wrong[0], [own.get(wrong[0], "nothing") for own in ranks]
    odd = find_odd_ranks(hashes)
    return (
        f"{first}: {what} are not the same on all {len(ranks)} ranks: {len(ranks) - len(odd)} have "
        f"the hash {next(h for r, h in enumerate(hashes) if r not in odd)}, but ranks {odd} have "
        f"{', '.join(hashes[r] for r in odd)}. Tensors that differ: {len(wrong)} of "
        f"{len(names)} ({', '.join(wrong[:_SHOWN])}{', …' if len(wrong) > _SHOWN else ''}). Give "
        "every rank the same checkpoint, or the same seed before the model is built."
    )
