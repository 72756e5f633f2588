"""Rules of ops without a row are found by running them; what cannot be proven stays whole."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autotp
from autotp.capture.sizes import Sizes
from autotp.oprules.discover import discover
from autotp.oprules.discover.call import describe_call
from autotp.oprules.rule import Discovery, Operand
from autotp.oprules.rulebook import load_rulebook
from autotp.records.plan import Plan
from autotp.report.plan import format_plan
from autotp.verification.rules.cases import Sample, build_cases, call, flags, integers, real
from autotp.verification.rules.laws import find_violations, list_strategies
from tests.opaque_ops import opaque

RULES = load_rulebook()


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return mixed.clone()


def flattened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return mixed.flatten(2).clone(), scores.logsumexp(-1)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def average(x: Tensor) -> Tensor:
    return x.mean(-1)


def squares(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).pow(2).sum(0)


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index].clone()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, 0.0)


def cumulated(x: Tensor) -> Tensor:
    return x.flatten().cumsum(0).view(x.shape).clone()


def ordered(x: Tensor) -> Tensor:
    return x.flatten().sort()[0].view(x.shape).clone()


def bounded(x: Tensor) -> Tensor:
    return x.sum(-1).clamp(-50, 50)


def headed(x: Tensor, heads: int) -> Tensor:
    split = x.unflatten(-1, (heads, -1))
    return (split / split.norm(dim=-1, keepdim=True)).flatten(-2)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def writing(x: Tensor) -> Tensor:
    x += 1
    return x * 2


def failing(x: Tensor) -> Tensor:
    if x.device.type != "meta":
        raise RuntimeError("needs another machine")
    return torch.empty_like(x)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def balanced(x: Tensor, gradient: Tensor) -> Tensor:
    return 2 * gradient - gradient.mean(-1, keepdim=True)


OPS = {
    function.__name__: opaque(function.__name__, function)
    for function in (
        attention, flattened, gated, normed, product, average, squares, looked_up, masked,
        cumulated, ordered, bounded, headed, noisy, writing, failing,
    )
}  # fmt: skip
OPS["doubled"] = opaque("doubled", doubled, balanced)

SAMPLES: dict[str, tuple[Sample, str]] = {
    "attention": (
        call(real(2, 12, 4, 8), real(2, 6, 4, 8), real(2, 6, 4, 8), True),
        "a (b c) d e, a b f e, a b g h -> a (b c) d h; whole: d, e, f, g; linear in 2",
    ),
    "flattened": (
        call(real(2, 4, 6, 8), real(2, 5, 6, 8), real(2, 5, 6, 3)),
        "a b c d, a e c d, a e c f -> a b (c f), a c b; whole: d, e",
    ),
    "gated": (call(real(2, 6), real(2, 6)), "a b, a b -> a b; linear in 1"),
    "normed": (
        call(real(2, 4, 6), real(6), 1e-6),
        "a b c, c -> a b c; whole: c; linear in 1",
    ),
    "product": (
        call(real(2, 6), real(12, 6), real(12)),
        "a b, c b, c -> a c; b: sum; linear in 0, 2 or 1, 2; bias 2",
    ),
    "average": (call(real(2, 6)), "a b -> a; whole: b; linear in 0"),
    "squares": (call([real(2, 6), real(2, 6)]), "a b, a b -> a b"),
    "looked_up": (call(real(9, 6), integers(4, below=9)), "a b, c -> c b; whole: a; linear in 0"),
    "masked": (call(real(2, 6), flags(2, 6)), "a b, a b -> a b; linear in 0"),
    "cumulated": (call(real(2, 6)), "a b -> a b; whole: a, b; linear in 0"),
    "bounded": (call(real(2, 6)), "a b -> a; whole: b"),
    "headed": (call(real(2, 12), 3), "a b -> a b; whole: b"),
}


def told(name: str, sample: Sample) -> Discovery:
    """What is found of the op, all operands being parameters."""
    case = next(build_cases(str(OPS[name]), sample, RULES))
    return case.analysis.discovered[case.use.node]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_rule_of_an_opaque_op_is_found(name: str) -> None:
    sample, rule = SAMPLES[name]

    assert rule == str(told(name, sample).row)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_rule_found_keeps_the_law_of_rules(name: str) -> None:
    every = list(build_cases(str(OPS[name]), SAMPLES[name][0], RULES))

    assert [] == [
        reason for case in every for tp in (2, 3, 4) for reason in find_violations(case, tp)
    ]
    assert {"replicated"} < {s.label for s in list_strategies(every[0], 2, training=True)}


@pytest.mark.parametrize(
    ("name", "why"),
    {
        "ordered": "no way to shard it",
        "noisy": "two runs on equal operands differ",
        "writing": "it writes to its operands",
        "failing": "it fails on random numbers: RuntimeError: needs another machine",
    }.items(),
)
def test_what_cannot_be_proven_stays_whole(name: str, why: str) -> None:
    found = tried(name, gradients=True)

    assert found.row is None
    assert why in found.reason


def tried(name: str, *, gradients: bool) -> Discovery:
    """What is found of an op of one operand, past the cache."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 6, device="meta")
    node = graph.call_function(OPS[name], (x,))
    found = describe_call(node, [Operand((x, 0), (), 0, -1)], {0: x.meta["val"]}, Sizes())
    assert not isinstance(found, str)
    discover.CACHE.clear()
    return discover.discover_rule(found, gradients=gradients)


def test_a_backward_pass_that_keeps_no_law_counts_in_training_only() -> None:
    found = [tried("doubled", gradients=gradients).row for gradients in (False, True)]

    assert ["a b -> a b; linear in 0", "a b -> a b; whole: b; linear in 0"] == list(map(str, found))


def test_trying_leaves_random_numbers_as_they_are_and_finds_the_same_again() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    once = tried("cumulated", gradients=True)
    torch.manual_seed(4)
    again = tried("cumulated", gradients=True)

    assert once == again
    torch.manual_seed(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_an_op_is_tried_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Block(), {"x": torch.randn(2, 5, 32)}
    autotp.plan(model, 2, example_inputs=inputs, training=True)
    monkeypatch.setattr(discover, "Trial", None)  # no op can be tried any more
    plan = autotp.plan(model, 4, example_inputs=inputs, training=True)

    assert 3 == len(plan.discovered)


class Block(nn.Module):
    """A block whose norm, attention and activation are opaque."""

    def __init__(self, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        width, self.sizes = 32, (heads, kv_heads)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.q, self.o = nn.Linear(width, heads * 4), nn.Linear(heads * 4, width)
        self.k, self.v = nn.Linear(width, kv_heads * 4), nn.Linear(width, kv_heads * 4)
        self.gate, self.up = nn.Linear(width, 96), nn.Linear(width, 96)
        self.down = nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = OPS["normed"](x, self.scale, 1e-6)
        q, k, v = (
            y.unflatten(-1, (-1, 4)).transpose(1, 2)
            for y in (self.q(normed), self.k(normed), self.v(normed))
        )
        mixed = OPS["attention"](q, k, v, True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        y = OPS["normed"](x, self.scale, 1e-6)
        return x + self.down(OPS["gated"](self.gate(y), self.up(y)))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3, 8])
def test_a_model_of_opaque_ops_is_split_and_right(tp: int) -> None:
    torch.manual_seed(0)
    model, inputs = Block(), {"x": torch.randn(2, 5, 32)}
    plan = autotp.plan(model, tp, example_inputs=inputs, training=True)
    evidence = autotp.verify(model, tp, example_inputs=inputs, training=True)

    assert evidence.ok, evidence
    assert {"column", "row", "norm", "replicated"} == {p.layout for p in plan.parameters.values()}
    assert plan.replicated_fraction < 0.02
    assert ((), 3) == (plan.unruled, len(plan.discovered))


@pytest.mark.slow
def test_a_plan_tells_what_was_found_and_keeps_it_in_json() -> None:
    plan = autotp.plan(Block(), 2, example_inputs={"x": torch.randn(2, 5, 32)})
    section = " ".join(format_plan(plan).partition("Rules discovered by running the op")[2].split())

    assert "2 × autotp_opaque.normed.default at" in section
    assert "a b c, c -> a b c; whole: c; linear in 1" in section
    assert plan == Plan.from_json(plan.to_json())


def test_strict_wants_rows_and_tries_nothing() -> None:
    with pytest.raises(autotp.UnknownOpError, match="autotp_opaque.normed.default has no rule"):
        autotp.plan(Block(), 2, example_inputs={"x": torch.randn(2, 5, 32)}, strict=True)
