"""Which architectures generate: the words of a sharded model beside those of the whole one.

    python -m tests.benchmarks.generating run --out generating.jsonl --tp 1 --tasks causal-lm
    python -m tests.benchmarks.generating run --out generating.jsonl --tp 2 --types llama,t5
    python -m tests.benchmarks.generating report --out generating.jsonl \\
        > docs/tables/generating-kinds.md

`run` makes a tiny model of each type of tests/zoo.tsv and asks `generate` for words: two prompts,
one of them padded, greedily and with two beams. A tp above 1 is run in as many processes. A type
of which the whole model generates nothing is *none*, with the reason; one whose words are the same
in float64 only is *rounding*. A way in which the whole model fails is left out, and named.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

import autotp
from tests import zoo
from tests.benchmarks import coverage
from tests.benchmarks.generating_report import report
from tests.spmd.pool import Pool, close_all

NEW, PADDING = 12, 4
Row = dict[str, Any]
WAYS: Mapping[str, Mapping[str, Any]] = {"greedy": {}, "beams": {"num_beams": 2}}


_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
MIXED: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": _LINEAR_FIRST,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": _LINEAR_FIRST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_FIRST,
    "qwen3_next": _LINEAR_FIRST,
}
"""Settings that give two layers one of each kind: a cache without attention generates nothing."""


def rows(task: str, kind: str, sizes: list[int], times: coverage._Times) -> Iterator[Row]:
    """A line for each tp."""
    model, _ = times.timed("build", _built)(kind, task)
    expected: dict[str, list[list[int]]] = {}
    failed: dict[str, str] = {}
    for way in WAYS:
        try:
            expected |= words(model, task, [way])
        except Exception as error:  # noqa: BLE001 whatever a model raises that generates nothing
            failed[way] = f"{way}: {coverage._reason(error)}"
    if not expected:
        reason = "; ".join(failed.values())
        yield from (coverage._row(task, kind, tp, "none", reason) for tp in sizes)
        return
    for tp in sizes:
        try:
            made = times.timed("generate", _ranks)(task, kind, tp, list(expected))
        except Exception as error:  # noqa: BLE001 any failure is a figure
            yield coverage._failed(task, kind, tp, times.stage, coverage._reason(error))
            continue
        wrong = [way for way in expected if any(expected[way] != of[way] for of, _ in made)]
        result = "wrong" if wrong else "ok"
        if wrong and _equal_in_double(task, kind, tp, wrong):
            result = "rounding"
        row = coverage._row(task, kind, tp, result, ", ".join(wrong))
        none = "; ".join(failed.values())
        yield row | {"graphs": made[0][1], "seconds": times.taken(), "none": none}


def _built(kind: str, task: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, with an inner attention that looks back only, and its inputs."""
    return zoo.build(kind, task, is_decoder=task == "causal-lm", **MIXED.get(kind, {}))


def words(model: Any, task: str, ways: Iterable[str]) -> dict[str, list[list[int]]]:
    """What `model` generates, by the way that it is asked."""
    asked = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    if task == "seq2seq":
        asked |= {"decoder_start_token_id": 1}
    return {way: model.generate(**_prompts(task), **asked, **WAYS[way]).tolist() for way in ways}


def _prompts(task: str) -> dict[str, torch.Tensor]:
    """Two prompts; the shorter one is padded before it, or after it where an encoder reads it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 500, (zoo.BATCH, zoo.SEQUENCE), generator=generator)
    padding = slice(-PADDING, None) if task == "seq2seq" else slice(PADDING)
    mask = torch.ones_like(ids)
    ids[0, padding], mask[0, padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _equal_in_double(task: str, kind: str, tp: int, ways: list[str]) -> bool:
    """Whether the words are the same in float64, so that in float32 two were equally likely."""
    expected = words(_built(kind, task)[0].double(), task, ways)
    return all(expected == made for made, _ in _ranks(task, kind, tp, ways, torch.float64))


def _ranks(
    task: str, kind: str, tp: int, ways: list[str], dtype: torch.dtype = torch.float32
) -> list[tuple[dict[str, list[list[int]]], int]]:
    """What each rank generates, and the number of its graphs."""
    if tp == 1:
        return [_told(0, 1, task, kind, ways, dtype)]
    try:
        return Pool(tp).run(_told, task, kind, ways, dtype)
    finally:
        close_all()


def _told(
    rank: int, world: int, task: str, kind: str, ways: list[str], dtype: torch.dtype
) -> tuple[dict[str, list[list[int]]], int]:
    model, inputs = _built(kind, task)
    sharded = autotp.parallelize(model.to(dtype), world, example_inputs=inputs)
    return words(sharded, task, ways), len(sharded.plans)


if __name__ == "__main__":
    make: Callable[..., Iterator[Row]] = rows
    sys.exit(coverage.main(rows=make, page=report, description=__doc__))
