"""Text from a directory: the prompt in, words out as they come, and how fast they came."""

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

__all__ = ["Pace", "GenerationRequest", "check_request", "generate_text"]

_NUMBERS = "Put the model's tokenizer files there, or give numbers: --ids 1,2,3."


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is to be generated.

    - `prompt`: text, or numbers of words in `ids` where the directory has no tokenizer.
    - `chat`: the prompt is a user's turn, put into the tokenizer's chat template.
    - `loading`: further keywords of `from_pretrained`.
    - `temperature`: 0 is greedy; else words are drawn, from `seed`, the same on all ranks.
    """

    directory: str
    prompt: str = ""
    ids: Sequence[int] = ()
    new_tokens: int = 64
    chat: bool = False
    temperature: float = 0.0
    seed: int = 0
    loading: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Pace:
    """How many words came, and when: seconds to the first, words a second after it.

    - `ready`: seconds until weights were read and graphs captured, before any of it.
    """

    ready: float = 0.0
    words: int = 0
    first: float = 0.0
    last: float = 0.0

    def __str__(self) -> str:
        """Both in words."""
        rest = (self.words - 1) / (self.last - self.first) if self.words > 1 else 0.0
        speed = f", then {rest:.1f} tokens/s" if rest else ""
        begun = f"ready after {self.ready:.1f} s"
        return f"{begun}; {self.words} tokens: the first after {self.first:.2f} s{speed}"


class _TimedStreamer:
    """A streamer of Transformers' kind that notes when words come, and hands them on."""

    def __init__(self, onward: Any, ready: float) -> None:
        self.onward, self.pace, self.begun = onward, Pace(ready), time.perf_counter()
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then each new word."""
        if self.prompt_seen:
            now = time.perf_counter() - self.begun
            self.pace.words += value.numel()
            self.pace.first, self.pace.last = self.pace.first or now, now
        self.prompt_seen = True
        if self.onward is not None:
            self.onward.put(value)

    def end(self) -> None:
        """Takes the end."""
        if self.onward is not None:
            self.onward.end()


def check_request(wanted: GenerationRequest) -> None:
    """Raises PlanError for what can be known to fail before any process is started."""
    directory = Path(wanted.directory)
    if not (directory / "config.json").is_file():
        raise PlanError(f"{directory}: it has no config.json. Give a checkpoint's directory.")
    named = ("tokenizer*", "vocab*", "*.model", "spiece*")
    if not wanted.ids and not any(f for name in named for f in directory.glob(name)):
        raise PlanError(f"{directory}: it has no tokenizer's files. {_NUMBERS}")
    count = _read_vocabulary_size(directory)
    if count is not None and (odd := [i for i in wanted.ids if not 0 <= i < count]):
        raise PlanError(
            f"{directory}: {odd[0]} is none of its {count} words. "
            f"Give numbers from 0 to {count - 1}."
        )


def _read_vocabulary_size(directory: Path) -> int | None:
    """How many words the model there has; None where its configuration does not say."""
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        count: Any = {**config, **config.get("text_config", {})}.get("vocab_size")
    except (ValueError, TypeError, AttributeError):  # who loads it says what is wrong with it
        return None
    return count if isinstance(count, int) else None


def generate_text(wanted: GenerationRequest, tp: int) -> tuple[list[int], Pace, int]:
    """The new words, their pace and this process's rank; rank 0 streams the text to stdout.

    Constraints: runs in each process of a group of `tp`, or in one for tp 1.
    """
    started = time.perf_counter()
    tokenizer = None if wanted.ids else _load_tokenizer(wanted)
    ids = _encode_prompt(wanted, tokenizer)
    model = from_pretrained(
        wanted.directory,
        tp,
        example_inputs={"input_ids": ids},
        new_tokens=wanted.new_tokens,
        **wanted.loading,
    )
    ids = ids.to(next(model.parameters()).device)
    onward = None
    if tokenizer is not None and model.sharded_state.group.rank == 0:
        streamer = importlib.import_module("transformers").TextStreamer
        onward = streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    _run_generation(
        model, ids, replace(wanted, new_tokens=3), None
    )  # captures a prompt and a new word
    clock = _TimedStreamer(onward, time.perf_counter() - started)
    made = _run_generation(model, ids, wanted, clock)
    return made[0, ids.shape[1] :].tolist(), clock.pace, model.sharded_state.group.rank


def _run_generation(
    model: ShardedModel, ids: torch.Tensor, wanted: GenerationRequest, clock: _TimedStreamer | None
) -> torch.Tensor:
    torch.manual_seed(wanted.seed)  # all ranks draw the same from the same logits
    drawn = {"do_sample": True, "temperature": wanted.temperature}
    how = drawn if wanted.temperature else {"do_sample": False}
    generate: Any = getattr(model, "generate", None)
    if generate is None:
        raise PlanError(
            f"{wanted.directory}: a {type(model).__name__} generates nothing. Give a model with a "
            "language-modelling head."
        )
    limit = {"max_new_tokens": wanted.new_tokens}
    return generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **limit, **how)


def _load_tokenizer(wanted: GenerationRequest) -> Any:
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        trust = bool(wanted.loading.get("trust_remote_code"))
        return auto.from_pretrained(str(Path(wanted.directory)), trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"{wanted.directory}: no tokenizer can be made of it: {str(error).splitlines()[0]}. "
            f"{_NUMBERS}"
        ) from error


def _encode_prompt(wanted: GenerationRequest, tokenizer: Any) -> torch.Tensor:
    """The prompt as numbers, (1, length)."""
    if tokenizer is None:
        return torch.tensor([list(wanted.ids)])
    if not wanted.chat:
        return tokenizer(wanted.prompt, return_tensors="pt")["input_ids"]
    turn = [{"role": "user", "content": wanted.prompt}]
    said = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(turn, **said)["input_ids"]
