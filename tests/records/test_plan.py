"""Plans as JSON: exact both ways, and clear about every way in which a file can be wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotp.errors import PlanError
from autotp.records.plan import Plan
from tests.plans import decoder_plan

PLAN = decoder_plan(layers=2, tp=4)
FIRST = "model.embed_tokens.weight"


def _changed(change: Callable[[Any], object]) -> str:
    """The plan's text after `change`, without the hash that would give it away."""
    fields = json.loads(PLAN.to_json())
    del fields["hash"]
    change(fields)
    return json.dumps(fields)


def test_json_round_trips_exactly() -> None:
    assert PLAN == Plan.from_json(PLAN.to_json())


def test_json_round_trips_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())

    assert PLAN == Plan.from_json(path)
    assert PLAN == Plan.from_json(str(path))


def test_json_keeps_the_order_of_parameters() -> None:
    assert list(PLAN.parameters) == list(Plan.from_json(PLAN.to_json()).parameters)


def test_json_is_plain_data_with_a_header() -> None:
    fields = json.loads(PLAN.to_json())

    assert ("autotp plan", 1, PLAN.hash) == (fields["format"], fields["version"], fields["hash"])
    assert {"all_gather", "all_reduce"} == {record["kind"] for record in fields["collectives"]}
    assert [[0, 32064]] == fields["parameters"]["lm_head.weight"]["shards"][0]["ranges"]


def test_the_hash_is_that_of_the_content() -> None:
    assert PLAN.hash == decoder_plan(layers=2, tp=4).hash
    assert PLAN.hash != replace(PLAN, objective="time").hash
    assert PLAN.hash == Plan.from_json(PLAN.to_json()).hash


def test_the_hash_does_not_tell_how_the_plan_was_found() -> None:
    again = replace(PLAN, cost={"index": 7}, bound={"index": 7}, method="milp", variables=1)

    assert PLAN.hash == again.hash
    assert again == Plan.from_json(again.to_json())


def test_a_changed_file_is_noticed() -> None:
    text = PLAN.to_json().replace('"machine": "h100"', '"machine": "gloo"')

    with pytest.raises(
        PlanError, match="stated hash is .*, the hash of the content .*: the file was changed"
    ):
        Plan.from_json(text)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_told_where_it_ends(tmp_path: Path, share: float) -> None:
    path, text = tmp_path / "plan.json", PLAN.to_json()
    path.write_text(text[: int(share * len(text))])

    with pytest.raises(PlanError, match=r"line \d+ column \d+: .*truncated.*Write it") as caught:
        Plan.from_json(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda f: f.update(version=7),
            "expected format 'autotp plan' version 1, found .* version 7",
        ),
        (lambda f: f.pop("format"), "found None version 1"),
        (lambda f: f.pop("tp"), "top level: missing key 'tp'"),
        (lambda f: f.update(speed=1), "top level: unknown key 'speed'"),
        (lambda f: f.update(tp="4"), "tp: expected int, found str '4'"),
        (lambda f: f.update(tp=True), "tp: expected int, found bool True"),
        (lambda f: f.update(tp=0), "tp is 0, it must be at least 1"),
        (lambda f: f.update(tp=2), f"parameters.{FIRST} has 4 shards for tp 2"),
        (lambda f: f.update(pairs={}), "pairs: expected a list, found dict {}"),
        (lambda f: f.update(collectives=[3]), r"collectives\[0\]: expected an object, found int 3"),
        (lambda f: f["pairs"][0].pop("role"), r"pairs\[0\]: missing key 'role'"),
        (
            lambda f: f["parameters"][FIRST]["shards"][2].update(bytes="many"),
            rf"parameters.{FIRST}.shards\[2\].bytes: expected int, found str 'many'",
        ),
        (
            lambda f: f["parameters"][FIRST]["placement"][0].update(kind="Q"),
            r"kind: expected 'R' or 'R~' or 'P' or 'S' or 'S~' or 'SS' or 'G', found str 'Q'",
        ),
        (
            lambda f: f["parameters"][FIRST]["shards"][0].update(ranges=[[1, 2, 3]]),
            r"ranges\[0\]: expected 2 entries, found 3",
        ),
        (
            lambda f: f["pairs"][0].update(openers=["nobody"]),
            "pair .* names 'nobody', which is not a parameter",
        ),
        (lambda f: f["parameters"][FIRST].update(name="x"), f"parameters.{FIRST} has the name 'x'"),
    ],
)
def test_a_wrong_file_is_told_what_and_where(change: Callable[[Any], object], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan.from_json(_changed(change))


def test_something_else_than_a_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[1, 2]")

    with pytest.raises(PlanError, match="expected an object, found list"):
        Plan.from_json(path)


def test_a_missing_file_is_told_by_path(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: does not exist\. .* with --training"):
        Plan.from_json(tmp_path / "none.json")


def test_a_plan_edited_by_hand_is_accepted_without_its_hash() -> None:
    edited = Plan.from_json(_changed(lambda f: f.update(width=9)))

    assert replace(PLAN, width=9) == edited
