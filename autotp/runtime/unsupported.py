"""Calls and methods that a sharded model refuses, because its graphs do not cover them."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from autotp.errors import PlanError


def refuse_to_run(model: str, rank: str) -> NoReturn:
    """Refuse to call a model that was built for one rank without a process group."""
    raise PlanError(
        f"{model}: {rank} was called, but it was built with rank= and has no process group. Build "
        "it without rank= in each process started by torchrun --nproc-per-node "
        f"{rank.rpartition(' ')[2]} your_script.py."
    )


def refuse_gradients(model: str, what: str) -> NoReturn:
    """Refuse what needs gradients if the plan has no backward pass."""
    raise PlanError(
        f"{model}: {what}, but the plan has no backward pass. Pass training=True when "
        "parallelizing."
    )


def refuse_full_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Refuse full weights where a rank has shards of them."""
    local = dict(model.named_parameters(remove_duplicate=False))
    for record in model.sharded_state.plan.parameters.values():
        for name in {record.name, *record.tied} & local.keys() & weights.keys():
            given, own = tuple(getattr(weights[name], "shape", ())), tuple(local[name].shape)
            if given == tuple(record.shape) != own:
                raise PlanError(
                    f"{type(model).__name__}: load_state_dict() was given the full {name}, "
                    f"{list(given)}, but {model.sharded_state} has a shard of {list(own)}. Load a "
                    "directory with autotp.from_pretrained, or load the unsharded model and "
                    "parallelize it. load_state_dict() accepts what state_dict() returned here."
                )


def override_unsupported(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Give the methods of `original` that its sharded models refuse, by name."""
    return {name: method for name, method in _METHODS.items() if hasattr(original, name)}


def _refuse_resizing(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: {self.sharded_state} has shards, which resize_token_embeddings "
        "would replace by full embeddings that are not in the plan. Resize the unsharded model "
        "before parallelizing it."
    )


def _check_attention(self: Any, attn_implementation: object, *_: object, **__: object) -> None:
    """Refuse another implementation of attention than the captured one."""
    captured = getattr(self.config, "_attn_implementation", None)
    if attn_implementation != captured:
        raise PlanError(
            f"{type(self).__name__}: set_attn_implementation({attn_implementation!r}) on "
            f"{self.sharded_state}, whose graphs were captured with {captured!r}. Set it on the "
            "unsharded model before parallelizing it."
        )


def _refuse_batching(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: continuous batching (generate_batch, or "
        'cache_implementation="paged") stores keys and values of all heads in pages that only its '
        "own attention writes, which the captured graphs do not contain. Use generate()."
    )


def _refuse_adapter(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: {self.sharded_state} runs captured graphs, so an adapter added to "
        "its modules would have no effect. Add or load the adapter before parallelizing the "
        "unsharded model."
    )


def _refuse_upload(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: push_to_hub() on {self.sharded_state}, which has only its "
        "shards. Call save_pretrained(directory) on every rank, then upload the directory."
    )


_METHODS: dict[str, Callable[..., Any]] = {
    "resize_token_embeddings": _refuse_resizing,
    "set_attn_implementation": _check_attention,
    "init_continuous_batching": _refuse_batching,
    "add_adapter": _refuse_adapter,
    "load_adapter": _refuse_adapter,
    "push_to_hub": _refuse_upload,
}
