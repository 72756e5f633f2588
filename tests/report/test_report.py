"""The printed plan: everything is on it, once, at any width, and nothing is cut off."""

import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import ViTConfig, ViTModel

import autotp
from autotp.records.plan import BUCKET, Pair, Plan
from autotp.report.distinct import list_pair_rows, star_layers_of
from autotp.report.plan import format_plan
from autotp.report.units import format_bytes, format_share, format_time
from tests.models import build
from tests.plans import decoder_plan, parameter
from tests.toys import MLP

PLAN = decoder_plan()
WIDTHS = [80, 100, 160]


def _squeezed(report: str) -> str:
    """The report without white space, so that wrapping does not matter."""
    return re.sub(r"\s", "", report)


def _section(report: str, title: str) -> str:
    return report.partition(f"\n{title}")[2].partition("\n\n")[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_page(width: int) -> None:
    assert width >= max(len(line) for line in format_plan(PLAN, width).splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "fact",
    [
        "DecoderForCausalLM: tensor-parallel over 8 ranks, training",
        "attention_mask, input_ids · eval",
        "batch 1, sequence 4,096 on h100",
        "communication, proven minimal (exact elimination, width 2, 1,996 variables)",
        PLAN.hash[:16],
        "kv: 8 -> 1",
        "of kv*g*d",
        "ffn: 14,336 -> 1,792",
        "vocabulary: 128,256 -> 16,032",
        "[128256, 4096] -> [128256, 512]",
        "33.6 MB",
        "9.71 ms",
        "9.63 ms",
        "3.79 GB",
        "16.1 GB",
        "2.01 GB",
        "64.2 GB",
        "8.03 GB",
        "12.5 %",
    ],
)
def test_every_fact_is_on_the_page(width: int, fact: str) -> None:
    report = format_plan(PLAN, width)

    assert _squeezed(fact) in _squeezed(report) or all(word in report for word in fact.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_never_cut_off(width: int) -> None:
    report = format_plan(PLAN, width)

    assert "…" not in report
    assert {"gate_proj", "up_proj", "down_proj", "o_proj", ".post_attention_layernorm"} <= set(
        re.findall(r"\.?\w+", report)
    )


def test_a_pair_is_said_once_with_its_count_layouts_and_collectives() -> None:
    rows = _section(format_plan(PLAN, 160), "Pairs").splitlines()[3:]

    assert [
        (
            "32 attention column: q_proj, k_proj, v_proj kv: 8 -> 1 "
            "forward: 1 all-reduce, 33.6 MB, 150 µs"
        ),
        "model.layers.*.self_attn row: o_proj of kv*g*d backward: 1 all-reduce, 33.6 MB, 150 µs",
        (
            "32 mlp column: gate_proj, up_proj ffn: 14,336 -> 1,792 "
            "forward: 1 all-reduce, 33.6 MB, 150 µs"
        ),
        "model.layers.*.mlp row: down_proj backward: 1 all-reduce, 33.6 MB, 150 µs",
        "1 vocabulary vocabulary: lm_head vocabulary: 128,256 -> 16,032 none",
        "lm_head",
    ] == [" ".join(row.split()) for row in rows]


def test_collectives_are_summed_by_phase() -> None:
    section = _section(format_plan(PLAN, 160), "Collectives")
    rows = [" ".join(line.split()) for line in section.splitlines()]

    assert "32 forward all-reduce model.layers.*.self_attn.o_proj 33.6 MB 1.88 GB 4.82 ms" in rows
    assert 4 == sum("layers.*" in row for row in rows)


def test_inference_has_no_backward_and_no_gradients() -> None:
    report = format_plan(decoder_plan(training=False))

    assert "inference" in report
    assert not re.search("backward|gradients|optimizer", report)


def test_replicated_parameters_have_a_reason() -> None:
    section = _section(format_plan(PLAN), "Replicated parameters")

    assert "norm: a norm needs the whole hidden state" in section
    assert "model.layers.*.input_layernorm.weight" in section
    assert "524 kB" in section


def test_an_unsharded_axis_has_a_reason() -> None:
    pair = replace(PLAN.pairs[0], split=False, local_sizes=(8,) * 8, note="8 heads over 3 ranks")
    report = format_plan(replace(PLAN, pairs=(pair, *PLAN.pairs[1:])), 160)

    assert "kv: 8, unsharded" in report
    assert "8 heads over 3 ranks" in report


def test_unruled_ops_and_warnings_are_listed() -> None:
    plan = replace(PLAN, unruled=("aten.foo at model.bar",), warnings=("a [red]loud[/] warning",))
    report = format_plan(plan)

    assert "aten.foo at model.bar" in _section(report, "Ops without a rule")
    assert "a [red]loud[/] warning" in _section(report, "Warnings")


def test_a_gap_is_admitted() -> None:
    report = format_plan(replace(PLAN, gap=0.02, method="milp", width=0), 160)

    assert "within 2.00 % of the lower bound (milp, width 0, 1,996 variables)" in report


def test_the_proof_says_that_the_latency_of_the_bucket_is_left_out() -> None:
    bucket = replace(PLAN.collectives[0], phase="backward", where=BUCKET)
    report = format_plan(replace(PLAN, collectives=(*PLAN.collectives, bucket)), 160)

    assert "proven minimal, excluding the latency of the gradient bucket (exact" in report
    assert "excluding" not in format_plan(PLAN, 160)


def test_tied_names_are_shown_with_the_parameter() -> None:
    name = "model.embed_tokens.weight"
    tied = replace(PLAN.parameters[name], tied=("head.weight",))
    report = format_plan(replace(PLAN, parameters={**PLAN.parameters, name: tied}), 160)

    assert "= head.weight" in _section(report, "Sharded outside pairs")


def test_colour_is_only_on_demand() -> None:
    assert "\x1b" not in format_plan(PLAN)
    assert "\x1b" in format_plan(PLAN, color=True)


def test_colours_change_nothing_else() -> None:
    plain = re.sub(r"\x1b\[[\d;]*m", "", format_plan(PLAN, color=True))

    assert _squeezed(format_plan(PLAN)) == _squeezed(plain)


def test_printing_a_plan_shows_the_report() -> None:
    assert format_plan(PLAN) == str(PLAN)


def test_rich_prints_the_report() -> None:
    console = Console(width=100, record=True, quiet=False, file=None, color_system=None)
    with console.capture() as capture:
        console.print(PLAN)

    assert _squeezed(format_plan(PLAN)) == _squeezed(capture.get())


def test_a_collective_is_filed_under_the_pair_whose_parameter_it_follows() -> None:
    rows = list_pair_rows(PLAN)

    assert [("forward", 1), ("backward", 1)] == [(t[0], t[4]) for t in rows[0].collectives]
    assert () == rows[2].collectives


def test_layers_that_differ_get_their_own_rows() -> None:
    plan = decoder_plan(layers=3)
    odd = replace(plan.pairs[2], size=16)
    rows = list_pair_rows(replace(plan, pairs=(*plan.pairs[:2], odd, *plan.pairs[3:])))

    assert [(2, "model.layers.*.self_attn"), (3, "model.layers.*.mlp")] == [
        (row.count, row.path) for row in rows[:2]
    ]
    assert (1, "model.layers.1.self_attn") == (rows[2].count, rows[2].path)


def test_a_pair_of_bare_parameters_keeps_their_names() -> None:
    records = [
        parameter("block.experts.up", (4, 8), 2, "column", 0, "f", 4),
        parameter("block.experts.down", (8, 4), 2, "row", 1, "f", 4),
    ]
    pair = Pair(
        "experts",
        "f",
        4,
        (2, 2),
        (records[0].name,),
        (records[1].name,),
        "f",
        "block.experts",
        True,
    )
    plan = _with(records, pair)

    assert (("column", ("up",)), ("row", ("down",))) == list_pair_rows(plan)[0].layouts


def test_pairs_that_share_an_axis_keep_their_own_weights() -> None:
    records = [parameter(f"{name}.weight", (4, 8), 2, "column", 1, "h", 4) for name in ("a", "b")]
    pairs = [Pair("mlp", "h", 4, (2, 2), (r.name,), (), "h", r.name[:1], True) for r in records]
    plan = replace(_with(records, pairs[0]), pairs=tuple(pairs))

    assert ["a", "b"] == [row.layouts[0][1][0].split(".")[0] for row in list_pair_rows(plan)]


def _with(records: list, pair: Pair) -> Plan:  # type: ignore[type-arg]
    return replace(
        PLAN, tp=2, pairs=(pair,), parameters={r.name: r for r in records}, collectives=()
    )


def test_patterns_star_only_what_varies() -> None:
    assert "a.*.layer.0.b" == star_layers_of(["a.0.layer.0.b", "a.1.layer.0.b"])


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (16_777_216, "16.8 MB"),
        (999_999, "1.00 MB"),
        (405 * 2 * 10**9, "810 GB"),
    ],
)
def test_bytes_have_three_figures(number: int, shown: str) -> None:
    assert shown == format_bytes(number)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 ps"), (150_260_000, "150 µs"), (7_200_000_000, "7.20 ms"), (10**13, "10.0 s")],
)
def test_times_have_three_figures(number: int, shown: str) -> None:
    assert shown == format_time(number)


def test_shares_are_per_cent() -> None:
    assert ["12.5 %", "-", "0 %", "< 0.01 %"] == [
        format_share(1, 8),
        format_share(1, 0),
        format_share(0, 5),
        format_share(1, 10**6),
    ]


@pytest.fixture(scope="module", params=[2, 5])
def tied(request: pytest.FixtureRequest) -> Plan:
    """The plan of a model whose head is its table of words; positions are added to the words."""
    model, inputs = build("gpt2", n_layer=1)
    return autotp.plan(model, request.param, example_inputs=inputs, training=True)


@pytest.mark.slow
def test_every_collective_is_filed_under_the_pair_that_makes_it_necessary(tied: Plan) -> None:
    found = {
        row.first.role: [(c[0], c[1]) for c in row.collectives] for row in list_pair_rows(tied)
    }

    assert {
        "vocabulary": [
            ("forward", "all_reduce"),
            ("forward", "all_gather"),
            ("backward", "all_reduce"),
        ],
        "attention": [("forward", "all_reduce"), ("backward", "all_reduce")],
        "mlp": [("forward", "all_reduce"), ("backward", "all_reduce")],
    } == found


@pytest.mark.slow
def test_a_collective_inside_a_module_of_several_ops_names_its_op(tied: Plan) -> None:
    places = {record.where for record in tied.collectives}

    assert {"lm_head", "transformer.h.0.mlp.c_proj"} < places
    assert "transformer.(add)" in places or 5 == tied.tp


@pytest.mark.slow
def test_a_table_of_positions_is_no_bias(tied: Plan) -> None:
    record = tied.parameters["transformer.wpe.weight"]

    assert (0, "") == (record.dim, record.reason)
    assert "transformer.wpe.dim 0 (128)" == record.axis
    assert "added once, after the sum" in tied.parameters["transformer.h.0.mlp.c_proj.bias"].reason


def test_a_bias_of_a_product_that_stays_whole_is_none_of_a_row_parallel_layer() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    plan = autotp.plan(ViTModel(config).eval(), 2)
    record = plan.parameters["embeddings.patch_embeddings.projection.bias"]

    assert (
        "not in a column/row pair: sharding dim 0 (64) needs a 4,352-byte all-gather before "
        "aten.layer_norm.default at layers.0.layernorm_before (modeling_vit.py:…), which needs it "
        "unsharded"
    ) == re.sub(r"py:\d+", "py:…", record.reason)


class Fixed(MLP):
    """Its own code takes one length only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).view(x.shape[0], 12, 16)


def test_sizes_that_the_capture_fixes_are_told_with_what_happens_to_others() -> None:
    plan = autotp.plan(Fixed().eval(), 2, example_inputs={"x": torch.randn(2, 12, 16)})

    assert "x · eval (fixed sizes only, see Warnings)" in format_plan(plan)
    assert plan.warnings[0].startswith(
        "the graph is valid for these sizes only: sequence 12; other sizes are captured when they "
        "occur"
    )


@pytest.mark.slow
def test_the_plan_says_which_ranks_share_what() -> None:
    """How ranks map to groups was told nowhere: reported of other tools (C109)."""
    model, inputs = build("llama", num_hidden_layers=1, num_key_value_heads=2)
    plan = autotp.plan(model, 4, example_inputs=inputs, training=True)

    assert "tp is ranks 0 to 3; tp/2:1 is 0+1, 2+3" in " ".join(str(plan).split())
