"""What is replicated on every rank is counted right, and reported with its cause."""

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autotp
from autotp.capture.program import Program
from autotp.compiler import ModelCompiler
from autotp.errors import PlanError
from autotp.options import Request, read_request
from autotp.records.plan import ParameterRecord, Plan
from autotp.records.replication import describe_excess_replication, group_by_layer, star_layers
from autotp.report.plan import format_plan
from tests import zoo
from tests.proven import proven
from tests.toys import MLP, vectors

KINDS = [
    "causal-lm/opt",
    "causal-lm/mixtral",
    "causal-lm/deepseek_v2",
    "causal-lm/marian",
    "causal-lm/gpt_bigcode",
    "seq2seq/t5",
    "masked-lm/bert",
    "masked-lm/squeezebert",
    "masked-lm/fnet",
    "masked-lm/albert",
    "image-classification/vit",
    "image-classification/segformer",
]


def places(program: Program) -> set[tuple[str, str]]:
    """The ops of a graph, each with its module path, or its own name if it is in no module."""

    def path(node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        return [entry[0] for entry in stack.values()][-1] if stack else ""

    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    return {(str(n.target), path(n) or n.name) for n in calls}


def doubts(record: ParameterRecord, work: ModelCompiler, at: set[tuple[str, str]]) -> Iterator[str]:
    """What a reason claims that is not so."""
    read = {str(n.target) for n in work.program.graph.nodes if n.op == "get_attr" and n.users}
    named = re.findall(r"([a-z]\w+\.\w+\.\w+) at (\S+)", record.reason)
    if "unused" in record.reason and record.name in read:
        yield "it is used"
    for op, place in named:
        if (op, place.rstrip(",;:")) not in at:
            yield f"no {op} at {place}"
    for dim, size in re.findall(r"dim (\d+) \((\d+)\)", record.reason):
        if record.shape[int(dim)] % int(size) and record.shape[int(dim)] < int(size):
            yield f"dim {dim} has no {size}"
    if not named and not re.search(r"unused|\(\d+\)|\d+ bytes are below|\d+ of its", record.reason):
        yield "it names nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_whole_names_an_op_or_a_size_that_is_there(kind: str) -> None:
    task, model_type = kind.split("/")
    work = ModelCompiler(*_model(task, model_type))
    plan = work.compile(4, "tp").plan
    total = sum(r.bytes for r in plan.parameters.values())
    large = {h.pattern for h in group_by_layer(plan.parameters) if h.bytes > total / 1000}
    whole = [
        r for r in plan.parameters.values() if r.replicated_bytes and star_layers(r.name) in large
    ]
    at = places(work.program)
    found = [f"{r.name}: {doubt} ({r.reason})" for r in whole for doubt in doubts(r, work, at)]

    assert whole
    assert [] == found
    printed = numberless(format_plan(plan, width=2000))
    assert [] == [r.reason for r in whole if numberless(r.reason) not in printed]


def _model(task: str, model_type: str) -> tuple[nn.Module, Request, dict[str, Tensor]]:
    model, inputs = zoo.build(model_type, task)
    return model, read_request(training=True), inputs


def numberless(line: str) -> str:
    return re.sub(r"(?<=\.)\d+(?!\w)", "*", " ".join(line.split()))


class Odd(MLP):
    """A head tied to a table, a layer that no forward uses, one whose width no group divides."""

    def __init__(self, unused: int) -> None:
        super().__init__(32, 48, torch.relu)
        self.table = nn.Embedding(64, 32)
        self.unused = nn.Linear(unused, unused, bias=False)
        self.odd, self.back = nn.Linear(32, 3), nn.Linear(3, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.norm(x + self.body(x))
        x = self.norm(x + self.back(torch.relu(self.odd(x))))
        return self.head(x)


IDS = {"ids": torch.arange(12).reshape(2, 6)}


@pytest.mark.slow
def test_the_share_is_what_every_rank_really_holds_of_tied_and_unused_parameters() -> None:
    torch.manual_seed(0)
    model = Odd(16)
    plan = autotp.plan(model, 4, example_inputs=IDS, shard_threshold=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = [
            dict(
                autotp.parallelize(
                    model, 4, rank=rank, example_inputs=IDS, shard_threshold=0.0
                ).named_parameters()
            )
            for rank in range(4)
        ]
    own = dict(model.named_parameters())  # a tied one once
    whole = sum(t.nbytes for n, t in own.items() if all(r[n].shape == t.shape for r in ranks))
    share = whole / sum(t.nbytes for t in own.values())

    assert {"unused.weight", "odd.weight", "norm.weight"} < {
        n for n, t in own.items() if all(r[n].shape == t.shape for r in ranks)
    }
    assert "table.weight" in own
    assert "head.weight" not in own
    assert share == pytest.approx(plan.replicated_fraction, rel=1e-12)
    assert "unused: no op of the captured graph" in plan.parameters["unused.weight"].reason
    assert "(3): too few for tp 4; tp sizes that split it: 2 to 3" in (
        plan.parameters["odd.weight"].reason
    )


@pytest.mark.slow
def test_segments_that_every_rank_holds_count_and_are_told() -> None:
    model, inputs = zoo.build("gpt_bigcode", "causal-lm")
    plan = autotp.plan(model, 2, example_inputs=inputs)
    record = plan.parameters["transformer.h.0.attn.c_attn.weight"]
    ranks = [{i for span in shard.ranges for i in range(*span)} for shard in record.shards]
    common = len(set.intersection(*ranks))

    assert common
    assert record.bytes * common // record.shape[record.dim or 0] == record.replicated_bytes
    assert f"{common} of its {record.shape[record.dim or 0]} elements" in record.reason


def test_parallelize_warns_once_above_a_tenth_with_the_largest_and_why() -> None:
    with pytest.warns(UserWarning, match="of the parameter bytes are replicated") as caught:
        sharded = autotp.parallelize(Odd(100), 4, rank=1, example_inputs=IDS)
    told = [str(w.message) for w in caught]

    assert 1 == len(told)
    assert __file__ == caught[0].filename
    assert "1 × unused.weight (" in told[0]
    assert "unused: no op of the captured graph" in told[0]
    assert f"{100 * sharded.plan.replicated_fraction:.3g} %" in told[0]
    assert sharded.plan.warnings[0] in told[0]
    assert "Warnings" in format_plan(sharded.plan)


def test_nothing_is_said_below_a_tenth() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autotp.parallelize(Odd(4), 2, rank=0, example_inputs=IDS).plan

    assert 0.1 > plan.replicated_fraction
    assert "" == describe_excess_replication(plan.parameters, 2)
    assert () == plan.warnings


@pytest.mark.parametrize("call", [autotp.plan, autotp.parallelize])
def test_strict_refuses_it_with_the_largest_and_what_to_do(call: object) -> None:
    where = {"rank": 0} if call is autotp.parallelize else {}
    with pytest.raises(PlanError) as caught:
        call(Odd(100), 4, example_inputs=IDS, strict=True, **where)

    assert "Odd: strict=True, but 66.6 % of the parameter bytes are replicated" in str(caught.value)
    assert "1 × unused.weight (" in str(caught.value)
    assert "Choose a smaller tp" in str(caught.value)


def test_one_rank_is_not_warned(recwarn: pytest.WarningsRecorder) -> None:
    plan: Plan = autotp.parallelize(Odd(100), 1, rank=0, example_inputs=IDS).plan

    assert () == plan.warnings
    assert [] == recwarn.list


class Joined(nn.Module):
    """One product of two streams beside each other, with a bias that is added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(20, 8)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.one(x).cumsum(-2), functional.gelu(self.two(x))
        return functional.linear(torch.cat([one, two], -1), self.out.weight) + self.bias


def test_what_stays_whole_is_told_the_right_reason() -> None:
    plan = autotp.plan(Joined(), 8, example_inputs={"x": torch.randn(2, 5, 8)}, training=True)
    reason = plan.parameters["out.weight"].reason

    prevented = "sharding dim 1 (16) is prevented by aten.linear.default at linear_2"
    assert f"{prevented} (test_replicated.py:" in reason
    assert "which sums over it together with elements that are not sharded" in reason
    assert "norm" != plan.parameters["bias"].layout


def test_no_class_is_refused() -> None:
    """Sorted channels cannot be cut: they stay whole, and the plan says what and why (C106)."""
    torch.manual_seed(0)
    plan = proven(MLP(16, 24, lambda x: x.sort(-1).values), vectors(2, 5, 16), 2)
    whole = {n: p.reason for n, p in plan.parameters.items() if p.dim is None}

    assert "up.weight" in whole
    assert all(whole.values())
    assert "up.weight" in str(plan)


class Tower(nn.Module):
    """Words, and a tower for images that words alone do not climb."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.tower = nn.Linear(32, 128, bias=False)

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        return self.head(x if images is None else x + self.tower(images).sum())


def test_what_the_inputs_do_not_use_is_told_apart_from_what_stays_whole() -> None:
    model, ids = Tower(), torch.randint(0, 64, (2, 12))
    plan = autotp.plan(model, 2, example_inputs={"ids": ids})
    both = autotp.plan(model, 2, example_inputs={"ids": ids, "images": torch.randn(2, 32)})

    assert 0.5 == plan.unused_fraction == plan.replicated_fraction
    assert "50 % of the parameter bytes are in parameters that these" in plan.warnings[1]
    assert "50.0 % of the parameter bytes are replicated on every rank, 50.0 % unused" in str(plan)
    assert 0 == both.unused_fraction
    assert "unused" not in str(both)
