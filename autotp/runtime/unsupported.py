"""What a sharded model refuses, in words: calls, and methods of its own that no graph follows."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from autotp.errors import PlanError

__all__ = ["refuse_gradients", "refuse_to_run", "refuse_whole", "override_unsupported"]


def refuse_to_run(model: str, rank: str) -> NoReturn:
    """Refuses to call a model of which this process has one rank's part, and no group to run in."""
    raise PlanError(
        f"{model}: called as {rank}, but it was built with rank= and has no group to run in. Build "
        "it without rank= in each of the processes that torchrun --nproc-per-node "
        f"{rank.rpartition(' ')[2]} your_script.py starts."
    )


def refuse_gradients(model: str, what: str) -> NoReturn:
    """Refuses what needs gradients of a model whose plan has none."""
    raise PlanError(
        f"{model}: {what}, but the plan has no backward pass. Pass training=True when "
        "parallelizing."
    )


def refuse_whole(model: Any, weights: Mapping[str, Any]) -> None:
    """Refuses whole weights, in the place of a rank's parts, among those to be loaded."""
    parts = dict(model.named_parameters(remove_duplicate=False))
    for record in model.sharded_state.plan.parameters.values():
        for name in {record.name, *record.tied} & parts.keys() & weights.keys():
            given, own = tuple(getattr(weights[name], "shape", ())), tuple(parts[name].shape)
            if given == tuple(record.shape) != own:
                raise PlanError(
                    f"{type(model).__name__}: load_state_dict() was given {name} as a whole, "
                    f"{list(given)}, and {model.sharded_state} holds {list(own)} of it. Load a "
                    "directory by autotp.from_pretrained, or load the whole model and parallelize "
                    "that; what state_dict() gave on this rank can be loaded again."
                )


def override_unsupported(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The methods of `original` that sharded models of it refuse, by name."""
    return {name: method for name, method in _METHODS.items() if hasattr(original, name)}


def _resized(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: {self.sharded_state} holds shards, which resize_token_embeddings "
        "would replace by whole tables that no plan knows. Resize the whole model before "
        "parallelizing it."
    )


def _attended(self: Any, attn_implementation: object, *_: object, **__: object) -> None:
    """Refuses another implementation of attention than the one captured."""
    captured = getattr(self.config, "_attn_implementation", None)
    if attn_implementation != captured:
        raise PlanError(
            f"{type(self).__name__}: set_attn_implementation({attn_implementation!r}) on "
            f"{self.sharded_state}, whose graphs are captured with {captured!r}. Set it on the "
            "whole model before parallelizing it."
        )


def _batched(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: continuous batching (generate_batch, or "
        'cache_implementation="paged") keeps keys and values in pages of its own, sized for all '
        "heads and written by its own attention, which no graph has. Use generate()."
    )


def _adapted(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: {self.sharded_state} runs graphs, which know of no adapter that "
        "is added to its modules: it would be left out of all calls. Add or load the adapter "
        "before parallelizing the whole model."
    )


def _pushed(self: Any, *_: object, **__: object) -> NoReturn:
    raise PlanError(
        f"{type(self).__name__}: push_to_hub() on {self.sharded_state}, which holds no more than "
        "its part. Call save_pretrained(directory) on every rank, then upload the directory."
    )


_METHODS: dict[str, Callable[..., Any]] = {
    "resize_token_embeddings": _resized,
    "set_attn_implementation": _attended,
    "init_continuous_batching": _batched,
    "add_adapter": _adapted,
    "load_adapter": _adapted,
    "push_to_hub": _pushed,
}
