"""The node that sums partial gradients of parameters, and the collectives that it runs."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from autotp.algebra.split import Peers, Split
from autotp.dtypes import choose_sum_dtype
from autotp.lower.conversion import Target
from autotp.planner.analysis import EmittedCollective
from autotp.records.plan import BUCKET


def share_gradients(
    nodes: Sequence[fx.Node],
    unsharded: Sequence[torch.Tensor],
    splits: Sequence[tuple[int, Split] | None],
    to: Target,
) -> tuple[fx.Node, list[EmittedCollective]]:
    """The bucket of the parameters `nodes`: it returns them, and sums their gradients in backward.

    - `unsharded`: the full parameters; `splits`: the dim and split of each, None if replicated.
    """
    keywords: dict[str, Any] = {}
    if to.reduce_dtype is not None:
        keywords["dtype"] = to.reduce_dtype
    flat = [[] if s is None else [s[0], *s[1].encode()] for s in splits]
    function = torch.ops.autotp.share_gradients.default
    shared = nodes[0].graph.call_function(function, (list(nodes), flat, to.group), keywords)
    shared.meta["val"] = [n.meta["val"] for n in nodes]
    dims = [None if s is None else s[1] for s in splits]
    return shared, list(_list_collectives(unsharded, dims, to))


def _list_collectives(
    unsharded: Sequence[torch.Tensor], splits: Sequence[Split | None], to: Target
) -> list[EmittedCollective]:
    """One all-reduce for each dtype and kind of sub-group that shares gradients."""
    everyone = Peers(0, to.tp, 1)
    moved: dict[tuple[torch.dtype, Peers], list[tuple[torch.Tensor, Fraction]]] = {}
    for meta, split in zip(unsharded, splits, strict=True):
        if not meta.requires_grad:
            continue
        shares = {everyone: Fraction(1)}
        if split is not None:
            copied = split.count_shared(to.tp)
            shares = {p: Fraction(n, split.length()) for p, n in copied.items()}
        for peers, share in shares.items():
            moved.setdefault((choose_sum_dtype(meta.dtype, to.reduce_dtype), peers), []).append(
                (meta, share)
            )
    return [_build_collective(peers, everyone, items) for (_, peers), items in moved.items()]


def _build_collective(
    peers: Peers, everyone: Peers, items: list[tuple[torch.Tensor, Fraction]]
) -> EmittedCollective:
    metas, shares = tuple(m for m, _ in items), tuple(share for _, share in items)
    count = 0 if peers == everyone else peers.count
    return EmittedCollective("all_reduce", "backward", BUCKET, metas, shares, count, peers.stride)
