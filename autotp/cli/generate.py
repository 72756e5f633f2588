"""Text from a checkpoint: the prompt goes in, tokens come out one by one, and are timed."""

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autotp.errors import PlanError
from autotp.loading import from_pretrained
from autotp.runtime.model import ShardedModel

_ADVICE = "Put the model's tokenizer files there, or give token ids: --token-ids 1,2,3."


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate.

    - `prompt`: text; or `token_ids`, which need no tokenizer.
    - `chat`: the prompt is a user's turn, put into the tokenizer's chat template.
    - `loading`: further keywords of `from_pretrained`.
    - `temperature`: 0 is greedy; otherwise tokens are sampled from `seed`, the same on all ranks.
    """

    directory: str
    prompt: str = ""
    token_ids: Sequence[int] = ()
    new_tokens: int = 64
    chat: bool = False
    temperature: float = 0.0
    seed: int = 0
    loading: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Pace:
    """How many tokens were generated, and when, in seconds.

    - `ready`: until the weights were read and the graphs captured, before any token.
    - `first`, `last`: from then until the first and the last token.
    """

    ready: float = 0.0
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    def __str__(self) -> str:
        """As one line of text."""
        rest = (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 else 0.0
        speed = f", then {rest:.1f} tokens/s" if rest else ""
        ready = f"ready after {self.ready:.1f} s"
        return f"{ready}; {self.tokens} tokens: the first after {self.first:.2f} s{speed}"


class _TimedStreamer:
    """A streamer as Transformers has them, which times tokens and passes them to another."""

    def __init__(self, onward: Any, ready: float) -> None:
        self.onward, self.pace, self.begun = onward, Pace(ready), time.perf_counter()
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then each new token."""
        if self.prompt_seen:
            now = time.perf_counter() - self.begun
            self.pace.tokens += value.numel()
            self.pace.first, self.pace.last = self.pace.first or now, now
        self.prompt_seen = True
        if self.onward is not None:
            self.onward.put(value)

    def end(self) -> None:
        """Receive the end of the text."""
        if self.onward is not None:
            self.onward.end()


def check_request(request: GenerationRequest) -> None:
    """Raise PlanError for a request that is known to fail before any process is started."""
    directory = Path(request.directory)
    if not (directory / "config.json").is_file():
        raise PlanError(f"{directory}: has no config.json. Give the directory of a checkpoint.")
    named = ("tokenizer*", "vocab*", "*.model", "spiece*")
    if not request.token_ids and not any(f for name in named for f in directory.glob(name)):
        raise PlanError(f"{directory}: has no tokenizer files. {_ADVICE}")
    size = _read_vocabulary_size(directory)
    if size is not None and (outside := [i for i in request.token_ids if not 0 <= i < size]):
        raise PlanError(
            f"{directory}: token id {outside[0]} is out of range: the vocabulary has {size} tokens "
            f"(0 to {size - 1})."
        )


def _read_vocabulary_size(directory: Path) -> int | None:
    """Read the vocabulary size from config.json; None where it is not given."""
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        count: Any = {**config, **config.get("text_config", {})}.get("vocab_size")
    except (ValueError, TypeError, AttributeError):  # loading the model reports what is wrong
        return None
    return count if isinstance(count, int) else None


def generate_text(request: GenerationRequest, tp: int) -> tuple[list[int], Pace, int]:
    """Generate in each process of a group of `tp`; rank 0 streams the text to stdout.

    Returns the new token ids, their pace, and the rank of this process.
    """
    started = time.perf_counter()
    tokenizer = None if request.token_ids else _load_tokenizer(request)
    ids = _encode_prompt(request, tokenizer)
    model = from_pretrained(
        request.directory,
        tp,
        example_inputs={"input_ids": ids},
        new_tokens=request.new_tokens,
        **request.loading,
    )
    ids = ids.to(next(model.parameters()).device)
    onward = None
    if tokenizer is not None and model.sharded_state.group.rank == 0:
        text_streamer = importlib.import_module("transformers").TextStreamer
        onward = text_streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    _run_generation(
        model, ids, replace(request, new_tokens=3), None
    )  # captures prefill and decode step
    streamer = _TimedStreamer(onward, time.perf_counter() - started)
    output = _run_generation(model, ids, request, streamer)
    return output[0, ids.shape[1] :].tolist(), streamer.pace, model.sharded_state.group.rank


def _run_generation(
    model: ShardedModel,
    ids: torch.Tensor,
    request: GenerationRequest,
    streamer: _TimedStreamer | None,
) -> torch.Tensor:
    torch.manual_seed(request.seed)  # all ranks sample the same from the same logits
    sampling = {"do_sample": True, "temperature": request.temperature}
    how = sampling if request.temperature else {"do_sample": False}
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise PlanError(
            f"{request.directory}: a {type(model).__name__} cannot generate. Give a model with a "
            "language-modelling head."
        )
    limit = {"max_new_tokens": request.new_tokens}
    return generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **limit, **how)


def _load_tokenizer(request: GenerationRequest) -> Any:
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        trust = bool(request.loading.get("trust_remote_code"))
        return auto.from_pretrained(str(Path(request.directory)), trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"{request.directory}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}. "
            f"{_ADVICE}"
        ) from error


def _encode_prompt(request: GenerationRequest, tokenizer: Any) -> torch.Tensor:
    """Encode the prompt as token ids, of shape (1, length)."""
    if tokenizer is None:
        return torch.tensor([list(request.token_ids)])
    if not request.chat:
        return tokenizer(request.prompt, return_tensors="pt")["input_ids"]
    turn = [{"role": "user", "content": request.prompt}]
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(turn, **how)["input_ids"]
