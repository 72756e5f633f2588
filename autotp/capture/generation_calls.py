"""The calls that generating makes, as the model's own `generate` makes them.

`generate` runs on a copy of the model without memory, whose forward only notes what it is given;
what the first call returns is made from the sizes of the captured program's outputs.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autotp.capture.cache import flatten_caches, rebuild_caches
from autotp.capture.program import Program, list_tensor_leaves
from autotp.capture.sizes import Pricing
from autotp.capture.source_model import copy_without_memory
from autotp.errors import PlanError

__all__ = ["GenerationCalls"]

_DECIDED_BY_GENERATE = ("use_cache", "labels", "return_dict")
"""Inputs of a forward that `generate` decides by itself."""


class _CallReached(Exception):  # noqa: N818  nothing went wrong
    """The call that was waited for has come."""


@dataclass(frozen=True, slots=True)
class GenerationCalls:
    """What generating from `given` calls the model with.

    - `bare`: the model without memory, whose forward is replaced while `generate` runs.
    - `given`: the prompt, as `generate` takes it.
    """

    bare: nn.Module
    given: Mapping[str, Any]

    @staticmethod
    def of(model: nn.Module, example: Mapping[str, Any]) -> "GenerationCalls":
        """Those for the inputs of `example`; PlanError for a model that generates nothing."""
        name = type(model).__name__
        if getattr(model, "generate", None) is None:
            raise PlanError(
                f"new_tokens: a {name} has no generate(). Give a model with a language-modelling "
                "head, or leave new_tokens out."
            )
        bare = copy_without_memory(model)
        settings = getattr(bare, "generation_config", None)
        if settings is not None:  # an end of text would end the recording
            settings.eos_token_id = settings.forced_eos_token_id = settings.pad_token_id = None
            if settings.decoder_start_token_id is None:
                settings.decoder_start_token_id = 0  # any word: only sizes are looked at
        asked = {k: v for k, v in example.items() if k not in _DECIDED_BY_GENERATE and v is not None}
        return GenerationCalls(bare, {k: _copy_with_values(v) for k, v in asked.items()})

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder runs once, before the words."""
        return bool(getattr(getattr(self.bare, "config", None), "is_encoder_decoder", False))

    def first(self) -> dict[str, Any]:
        """What the prompt's call is given; with an encoder, the call of the whole model."""
        if self.has_encoder:
            return {**self.given, "use_cache": True}
        return self._recorded(self.given, None)

    def next(self, program: Program, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the call after the prompt's is given, which was `program` at `inputs`."""
        output = _build_output(program, inputs)
        given = dict(self.given)
        encoded = getattr(output, "encoder_last_hidden_state", None)
        if encoded is not None:
            main = str(getattr(self.bare, "main_input_name", "input_ids"))
            given.pop(main, None)
            outputs: Any = sys.modules["transformers.modeling_outputs"]  # of which `generate` is
            given["encoder_outputs"] = outputs.BaseModelOutput(last_hidden_state=encoded)
        return self._recorded(given, output)

    def longer(self, words: int) -> "GenerationCalls":
        """The same with so many more words in the prompt; itself where not all inputs are words."""
        main = "decoder_input_ids" if self.has_encoder else "input_ids"
        ids = self.given.get(main)
        words_alone = {"input_ids", "attention_mask", "decoder_input_ids"}.issuperset(self.given)
        if not isinstance(ids, torch.Tensor) or not words_alone:
            return self
        length = ids.shape[1]
        order = torch.arange(length + words) % length
        lengthened = {
            name: value[:, order]
            for name, value in self.given.items()
            if name == main or (not self.has_encoder and value.shape == ids.shape)
        }
        return GenerationCalls(self.bare, {**self.given, **lengthened})

    def _recorded(self, given: Mapping[str, Any], output: Any) -> dict[str, Any]:
        """The last call's inputs: the first's if there is no output to go on with."""
        seen: list[dict[str, Any]] = []
        enough = 1 if output is None else 2

        def note(**inputs: Any) -> Any:
            seen.append(inputs)
            if len(seen) == enough:
                raise _CallReached
            return output

        self._generate(note, given, enough)
        return {name: value for name, value in seen[-1].items() if value is not None}

    def _generate(self, forward: Any, given: Mapping[str, Any], calls: int) -> None:
        bare: Any = self.bare
        setattr(forward, "__signature__", inspect.signature(bare.forward))  # noqa: B010
        bare.forward = forward
        how = {"do_sample": False, "max_new_tokens": calls + 2}
        try:
            bare.generate(**given, **how)
        except _CallReached:
            return
        except Exception as error:
            raise PlanError(
                f"new_tokens: {type(bare).__name__}.generate({', '.join(given)}) was followed to "
                f"see what it calls, and failed: {type(error).__name__}: {error}. Give "
                "example_inputs that generate() takes, or leave new_tokens out."
            ) from error
        finally:
            del bare.forward
        raise PlanError(
            f"new_tokens: {type(bare).__name__}.generate() ended after fewer than {calls} calls of "
            "its forward. Leave new_tokens out."
        )


def _copy_with_values(value: Any) -> Any:
    """Ones for a tensor on meta: a mask of ones, words that there are."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.ones_like(value, device="cpu")
    return value


def _build_output(program: Program, inputs: Mapping[str, Any]) -> Any:
    """What the program returns for inputs of these sizes: zeros, which take no memory."""
    pricing = Pricing(program, list_tensor_leaves(flatten_caches(inputs)))
    outputs: Sequence[Any] = program.graph.output_node().args[0]  # pyright: ignore
    flat = [_make_zeros(pricing, out) for out in outputs]
    return rebuild_caches(pytree.tree_unflatten(flat, program.out_spec))


def _make_zeros(pricing: Pricing, output: Any) -> Any:
    if not isinstance(output, fx.Node):
        return output
    val = output.meta["val"]
    if not isinstance(val, torch.Tensor):
        return pricing.number(val)
    return torch.zeros([pricing.number(n) for n in val.shape], dtype=val.dtype)
