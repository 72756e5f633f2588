"""The zoo and the coverage over it: what is counted, and that a failure is told."""

import json
from collections import Counter
from pathlib import Path

import torch

from tests import zoo
from tests.benchmarks import coverage


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_denominator_is_253_pairs_of_task_and_type() -> None:
    listed = zoo.exportable()

    assert 253 == len(set(listed)) == len(listed)
    assert Counter(
        {"causal-lm": 170, "masked-lm": 39, "image-classification": 25, "seq2seq": 19}
    ) == Counter(task for task, _ in listed)
    assert all(kind in zoo.CLASSES[task] for task, kind in listed)


def test_a_model_is_small_random_and_the_same_each_time() -> None:
    model, inputs = zoo.build("llama", "causal-lm")
    again, _ = zoo.build("llama", "causal-lm")

    assert {"input_ids", "use_cache"} == set(inputs)
    assert (512, 64) == model.get_input_embeddings().weight.shape
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_scan_shrinks_with_its_model() -> None:
    config = zoo.build("bamba", "causal-lm")[0].config
    inner = config.mamba_expand * config.hidden_size

    assert inner == config.mamba_n_heads * config.mamba_d_head
    assert inner > 2 * config.mamba_n_groups * config.mamba_d_state  # what all heads share
    assert zoo.SEQUENCE > config.mamba_chunk_size  # more than one chunk


def test_a_run_adds_a_line_a_size_once(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["run", "--out", str(out), "--types", "opt", "--tasks", "causal-lm", "--tp", "2,4"]

    assert [0, 0] == [coverage.main(words) for _ in range(2)]
    assert [(2, "ok"), (4, "ok")] == [(row["tp"], row["result"]) for row in rows_of(out)]


def test_a_type_that_takes_too_long_is_told_and_run_again_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["run", "--out", str(out), "--types", "opt", "--tasks", "causal-lm", "--tp", "2"]

    coverage.main([*words, "--limit", "0"])
    coverage.main(words)
    coverage.main([*words, "--retry"])

    assert [("error", "took more than 0 s"), ("ok", "")] == [
        (row["result"], row["reason"]) for row in rows_of(out)
    ]


def test_the_page_counts_all_and_tells_failures_with_their_reason() -> None:
    ok = {
        "task": "causal-lm",
        "type": "a",
        "tp": 2,
        "result": "ok",
        "commit": "abc",
        "reason": "",
        "whole": 0.25,
        "unused": 0.2,
        "layers": {"2/2": 2},
        "unruled": {"aten.x.default": 1},
        "output_error": 1e-7,
        "gradient_error": 2e-7,
    }
    bad = {
        "task": "causal-lm",
        "type": "b",
        "tp": 2,
        "result": "error",
        "commit": "abc",
        "reason": "CaptureError: no",
        "stage": "capture",
    }
    wanted = [("causal-lm", kind) for kind in "abc"]

    page = coverage.report([ok, bad], wanted)

    assert "| causal-lm | 2 | 3 | 1 | 0 | 1 | 1 | 0 |" in page
    assert "- b (causal-lm, tp 2): **error, capture**: CaptureError: no" in page
    assert "| causal-lm | a | 2 | ok | 25.0% (20.0%) | 1e-07, 2e-07 | 2/2 ×2 |" in page
    assert "- `aten.x.default`: a" in page
    assert "commit `abc`" in page
