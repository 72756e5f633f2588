"""Our plans beside those that Transformers brings: no more whole, and no more collectives."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import hf_plans

TYPES = ["llama", "mixtral", "qwen3", "codegen", "gemma3_text"]


@pytest.mark.parametrize("kind", TYPES)
def test_ours_is_no_worse_than_theirs(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["run", "--out", str(out), "--types", kind, "--tasks", "causal-lm", "--tp", "4"]

    assert 0 == hf_plans.main(words)
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert ("ok", "") == (row["result"], row["reason"])
    assert 0.02 + row["theirs"]["whole"] >= row["ours"]["training"]["whole"]
    theirs, ours = (
        sum(plan["forward"].values()) for plan in (row["theirs"], row["ours"]["inference"])
    )
    assert 1 <= ours <= theirs


def test_theirs_is_counted_as_it_runs() -> None:
    theirs = hf_plans.hand_made("causal-lm", "llama", 2)

    # an all-reduce of the table, two a layer, and the head's gather
    assert {"all_reduce": 5, "all_gather": 1} == theirs["forward"]
    assert "" == theirs["died"]
    assert 0.01 > theirs["whole"]


def figures(whole: float, reduces: int) -> dict[str, object]:
    return {"whole": whole, "forward": {"all_reduce": reduces}, "died": ""}


@pytest.mark.parametrize(
    ("theirs", "ours", "result"),
    [
        ((0.1, 4), (0.13, 1), "more whole"),
        ((0.1, 4), (0.11, 5), "more collectives"),
        ((0.1, 4), (0.11, 4), "ok"),
        ((0.5, 4), (0.11, 9), "ok"),
    ],
)
def test_what_is_worse_is_told(
    theirs: tuple[float, int], ours: tuple[float, int], result: str
) -> None:
    assert result == hf_plans.verdict(figures(*theirs), figures(*ours))


def test_the_page_tells_where_ours_is_worse() -> None:
    ours = figures(0.01, 6) | {"largest": ["a.weight: it is in no pair"], "places": {"x": 6}}
    row = {
        "task": "causal-lm", "type": "odd", "tp": 2, "result": "more collectives", "commit": "abc",
        "theirs": figures(0.01, 5), "ours": {"training": ours, "inference": ours},
    }  # fmt: skip
    page = hf_plans.report([row], [("causal-lm", "odd"), ("causal-lm", "other")])

    assert "commit `abc`" in page
    assert "- odd (causal-lm, tp 2): more collectives: a.weight: it is in no pair; 6 x" in page
    assert "| causal-lm | odd | 2 | 1.0% | 1.0% | 5 all-reduce | 6 all-reduce |" in page
    assert "of 2 1 were not run" in page
