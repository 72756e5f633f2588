"""The calls of a model that generation makes, recorded from the model's own `generate`.

`generate` runs on a copy of the model without memory, whose forward only records its inputs; the
output of the first call is built from the sizes of the captured program's outputs.
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

_DECIDED_BY_GENERATE = ("use_cache", "labels", "return_dict")
"""Inputs of a forward that `generate` sets itself."""


class _CallReached(Exception):  # noqa: N818  nothing went wrong
    """The call to be recorded has been made."""


@dataclass(frozen=True, slots=True)
class GenerationCalls:
    """The inputs with which generation from a prompt calls the model.

    - `bare`: the model without memory, whose forward is replaced while `generate` runs.
    - `prompt`: the inputs of `generate`.
    """

    bare: nn.Module
    prompt: Mapping[str, Any]

    @staticmethod
    def build(model: nn.Module, example: Mapping[str, Any]) -> "GenerationCalls":
        """The calls for the inputs of `example`; PlanError for a model without `generate`."""
        name = type(model).__name__
        if getattr(model, "generate", None) is None:
            raise PlanError(
                f"new_tokens: {name} has no generate(). Give a model with a language-modelling "
                "head, or leave new_tokens out."
            )
        bare = copy_without_memory(model)
        settings = getattr(bare, "generation_config", None)
        if settings is not None:  # an end-of-sequence token would end the recording
            settings.eos_token_id = settings.forced_eos_token_id = settings.pad_token_id = None
            if settings.decoder_start_token_id is None:
                settings.decoder_start_token_id = 0  # any token: only sizes matter
        prompt = {
            k: v for k, v in example.items() if k not in _DECIDED_BY_GENERATE and v is not None
        }
        return GenerationCalls(bare, {k: _copy_with_values(v) for k, v in prompt.items()})

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder runs once, before the first token."""
        return bool(getattr(getattr(self.bare, "config", None), "is_encoder_decoder", False))

    def record_prefill(self) -> dict[str, Any]:
        """The inputs of the prefill; with an encoder, those of the full model."""
        if self.has_encoder:
            return {**self.prompt, "use_cache": True}
        return self._record(self.prompt, None)

    def record_decode(self, program: Program, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the first decode step, after the prefill by `program` at `inputs`."""
        output = _build_output(program, inputs)
        given = dict(self.prompt)
        encoded = getattr(output, "encoder_last_hidden_state", None)
        if encoded is not None:
            main = str(getattr(self.bare, "main_input_name", "input_ids"))
            given.pop(main, None)
            outputs: Any = sys.modules["transformers.modeling_outputs"]  # `generate` imported it
            given["encoder_outputs"] = outputs.BaseModelOutput(last_hidden_state=encoded)
        return self._record(given, output)

    def lengthen(self, tokens: int) -> "GenerationCalls":
        """The same with `tokens` more in the prompt; itself if it has inputs other than tokens."""
        main = "decoder_input_ids" if self.has_encoder else "input_ids"
        ids = self.prompt.get(main)
        has_only_tokens = {"input_ids", "attention_mask", "decoder_input_ids"}.issuperset(
            self.prompt
        )
        if not isinstance(ids, torch.Tensor) or not has_only_tokens:
            return self
        length = ids.shape[1]
        order = torch.arange(length + tokens) % length
        lengthened = {
            name: value[:, order]
            for name, value in self.prompt.items()
            if name == main or (not self.has_encoder and value.shape == ids.shape)
        }
        return GenerationCalls(self.bare, {**self.prompt, **lengthened})

    def _record(self, given: Mapping[str, Any], output: Any) -> dict[str, Any]:
        """The inputs of the second call, or of the first if there is no output to continue from."""
        seen: list[dict[str, Any]] = []
        enough = 1 if output is None else 2

        def note(**inputs: Any) -> Any:
            seen.append(inputs)
            if len(seen) == enough:
                raise _CallReached
            return output

        self._run_generate(note, given, enough)
        return {name: value for name, value in seen[-1].items() if value is not None}

    def _run_generate(self, forward: Any, given: Mapping[str, Any], calls: int) -> None:
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
                f"new_tokens: {type(bare).__name__}.generate({', '.join(given)}) was run to record "
                f"its calls and failed: {type(error).__name__}: {error}. Give example_inputs that "
                "generate() accepts, or leave new_tokens out."
            ) from error
        finally:
            del bare.forward
        raise PlanError(
            f"new_tokens: {type(bare).__name__}.generate() called its forward fewer than {calls} "
            "times. Leave new_tokens out."
        )


def _copy_with_values(value: Any) -> Any:
    """Ones for a tensor on meta: a valid attention mask, and valid token ids."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.ones_like(value, device="cpu")
    return value


def _build_output(program: Program, inputs: Mapping[str, Any]) -> Any:
    """What the program returns for inputs of these sizes, with zeros for values."""
    pricing = Pricing(program, list_tensor_leaves(flatten_caches(inputs)))
    outputs: Sequence[Any] = program.graph.output_node().args[0]  # pyright: ignore
    flat = [_make_zeros(pricing, out) for out in outputs]
    return rebuild_caches(pytree.tree_unflatten(flat, program.out_spec))


def _make_zeros(pricing: Pricing, output: Any) -> Any:
    if not isinstance(output, fx.Node):
        return output
    val = output.meta["val"]
    if not isinstance(val, torch.Tensor):
        return pricing.evaluate(val)
    return torch.zeros([pricing.evaluate(n) for n in val.shape], dtype=val.dtype)
