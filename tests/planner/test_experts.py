"""Experts by expert: a rank has some of them, and all tokens; the ranks' sum is the whole model's.

Hand-written mixtures meet the forms in which experts are written, and libraries' the sorted one.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import PlanError
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.verification.simulate import simulate
from tests import zoo
from tests.models import build
from tests.proven import Captured, of_zoo
from tests.spmd.beside import joined_over

HIDDEN, FFN, TOKENS = 16, 24, 10
BY_EXPERT = {"*experts*": "expert"}


def drawn(model: nn.Module) -> nn.Module:
    """`model` with weights large enough for faults to show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def tokens() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(2, TOKENS // 2, HIDDEN, generator=generator)}


class Dense(nn.Module):
    """All experts for all tokens, weighted by a router, written in one of several ways."""

    def __init__(self, form: str, experts: int) -> None:
        super().__init__()
        self.form, self.count = form, experts
        self.router = nn.Linear(HIDDEN, experts)
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, FFN))
        self.up_bias = nn.Parameter(torch.empty(experts, 1, FFN))
        self.down = nn.Parameter(torch.empty(experts, FFN, HIDDEN))
        self.down_bias = nn.Parameter(torch.empty(experts, 1, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights = self.router(rows).softmax(-1)  # (tokens, experts)
        if self.form == "einsum":
            middle = functional.gelu(torch.einsum("th,ehf->etf", rows, self.up) + self.up_bias)
            made = torch.einsum("etf,efh->eth", middle, self.down) + self.down_bias
            return x + torch.einsum("te,eth->th", weights, made).view(x.shape)
        if self.form == "bmm":
            copies = rows.repeat(self.count, 1).view(self.count, -1, HIDDEN)
            middle = functional.gelu(torch.bmm(copies, self.up) + self.up_bias)
            made = torch.bmm(middle, self.down) + self.down_bias
        elif self.form == "baddbmm":
            copies = rows.unsqueeze(0).expand(self.count, -1, -1)
            middle = functional.gelu(torch.baddbmm(self.up_bias, copies, self.up))
            made = torch.baddbmm(self.down_bias, middle, self.down)
        else:
            made = functional.gelu(rows @ self.up + self.up_bias) @ self.down + self.down_bias
        return x + (made * weights.t().unsqueeze(-1)).sum(0).view(x.shape)


class Sorted(nn.Module):
    """Two experts a token, tokens sorted by expert; `dead` experts are never chosen."""

    def __init__(self, experts: int, dead: tuple[int, ...] = (), scaled: bool = False) -> None:
        super().__init__()
        self.count, self.dead = experts, dead
        self.router = nn.Linear(HIDDEN, experts)
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, 2 * FFN))
        self.up_bias = nn.Parameter(torch.empty(experts, 2 * FFN))
        self.down = nn.Parameter(torch.empty(experts, FFN, HIDDEN))
        self.down_bias = nn.Parameter(torch.empty(experts, HIDDEN))
        self.scale = nn.Parameter(torch.empty(FFN)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        alive = torch.tensor([-1e4 if k in self.dead else 0.0 for k in range(self.count)])
        weights, chosen = (self.router(rows) + alive).softmax(-1).topk(2)
        ids, order = chosen.reshape(-1).sort()
        counts = ids.float().histc(self.count, 0, self.count - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        gate, up = (product(rows[order // 2], self.up, ends) + self.up_bias[ids]).chunk(2, -1)
        middle = (up.clamp(-1, 1) + 1) * gate.clamp(max=1) * (gate * 1.7).sigmoid()
        if self.scale is not None:
            middle = middle * self.scale
        made = product(middle, self.down, ends) + self.down_bias[ids]
        made = (made * weights.reshape(-1)[order].unsqueeze(-1))[order.argsort()]
        return x + made.view(-1, 2, HIDDEN).sum(1).view(x.shape)


def verify_experts(
    model: nn.Module, inputs: Mapping[str, Any], tp: int, overrides: Mapping[str, str]
) -> tuple[Plan, list[Evidence]]:
    """The plan for training, and the evidence of both modes."""
    return both(
        [Captured(model, inputs, training=t, overrides=overrides) for t in (True, False)], tp
    )


def both(modes: Iterable[Captured], tp: int) -> tuple[Plan, list[Evidence]]:
    """The plan of the first mode, and the evidence of each."""
    proofs = [captured.proof(tp) for captured in modes]
    return proofs[0].plan, [proof.evidence for proof in proofs]


def layouts(plan: Plan, *names: str) -> list[str]:
    return [r.layout for n, r in plan.parameters.items() if any(n.endswith(x) for x in names)]


# ── all experts for all tokens ───────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "experts"), [(2, 4), (4, 6)])
@pytest.mark.parametrize("form", ["bmm", "baddbmm", "einsum", "matmul"])
def test_dense_experts_are_handed_out(form: str, tp: int, experts: int) -> None:
    model = drawn(Dense(form, experts))
    plan, evidence = verify_experts(model, tokens(), tp, {"up": "expert", "down": "expert"})

    assert all(one.ok for one in evidence), evidence
    assert ["expert", "expert"] == [plan.parameters[n].layout for n in ("up", "down")]
    assert ["replicated"] * 2 == layouts(plan, "router.weight", "router.bias")
    local = tuple(sorted((-(-(experts - r) // tp) for r in range(tp)), reverse=True))
    assert [local] == [pair.local_sizes for pair in plan.pairs]


# ── tokens sorted by expert ──────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "tp", "dead"), [(4, 2, ()), (6, 4, ()), (4, 3, (1,)), (4, 2, (2, 3))]
)
def test_sorted_experts_are_handed_out_with_their_biases(
    experts: int, tp: int, dead: tuple[int, ...]
) -> None:
    """The last case has a rank to which no token goes."""
    overrides = {"up": "expert", "down": "expert"}
    plan, evidence = verify_experts(drawn(Sorted(experts, dead)), tokens(), tp, overrides)

    assert all(one.ok for one in evidence), evidence
    assert ["expert"] * 4 == layouts(plan, "up", "down", "up_bias", "down_bias")
    assert {"forward all_reduce": 1} == {
        k: n for k, n in evidence[1].collectives_seen.items() if k.startswith("forward")
    }
    assert {"router.weight", "router.bias", "up", "down_bias"} <= set(evidence[0].gradients)


@pytest.mark.slow
def test_an_expert_without_a_token_has_a_gradient_of_zero() -> None:
    model = drawn(Sorted(4, dead=(2, 3)))
    options: dict[str, Any] = {"training": True, "overrides": {"up": "expert", "down": "expert"}}
    ranks = [
        autotp.parallelize(model, tp=2, rank=r, example_inputs=tokens(), **options)
        for r in range(2)
    ]
    torch.stack([output.sum() for output in simulate(ranks, tokens()).outputs]).sum().backward()

    for name in ("up", "up_bias", "down", "down_bias"):
        gradients = [dict(rank.named_parameters())[name].grad for rank in ranks]
        assert gradients[0] is not None
        assert gradients[0].any()
        assert gradients[1] is not None
        assert not gradients[1].any()


@pytest.mark.slow
def test_what_all_rows_share_keeps_them_whole_in_training() -> None:
    """Rows of others mean nothing: they must not reach the gradient of a scale between products."""
    overrides = {"up": "expert", "down": "expert"}
    plan, evidence = verify_experts(drawn(Sorted(4, scaled=True)), tokens(), 2, overrides)

    assert all(one.ok for one in evidence), evidence
    assert ["expert", "expert", "norm"] == layouts(plan, "up", "down", "scale")
    assert 2 == sum(c.phase == "forward" for c in plan.collectives)


@cache
def by_expert(model_type: str) -> tuple[Captured, ...]:
    """A model whose experts are handed out: in training, one of them in inference too."""
    model, inputs = zoo.build(model_type, "causal-lm")
    modes = (True, False) if model_type == "mixtral" else (True,)
    return tuple(Captured(model, inputs, training=t, overrides=BY_EXPERT) for t in modes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tp"),
    [("mixtral", 4), ("qwen3_moe", 2), ("gpt_oss", 3), ("gpt_oss", 4), ("deepseek_v3", 2)],
)
def test_experts_of_a_library_are_handed_out(model_type: str, tp: int) -> None:
    by_cost = of_zoo(model_type).plan(tp)
    plan, evidence = both(by_expert(model_type), tp)

    assert all(one.ok for one in evidence), evidence
    found = [r for n, r in plan.parameters.items() if n.endswith(("gate_up_proj", "down_proj"))]
    experts = [r for r in found if len(r.shape) == 3]
    assert experts
    assert {"expert"} == {r.layout for r in experts}
    assert {"column", "row"} == {by_cost.parameters[r.name].layout for r in experts}
    assert len(by_cost.collectives) == len(plan.collectives)


@pytest.mark.slow
def test_three_steps_of_an_optimizer_end_where_the_whole_model_does() -> None:
    """In float64: the optimizer divides a gradient by its own size, which magnifies rounding."""
    model, inputs = drawn(Sorted(4)).double(), {"x": tokens()["x"].double()}
    overrides = {"up": "expert", "down": "expert"}
    options: dict[str, Any] = {"tp": 3, "training": True, "overrides": overrides}
    ranks = [autotp.parallelize(model, rank=r, example_inputs=inputs, **options) for r in range(3)]
    whole = copy.deepcopy(model)
    trained = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, *ranks)]
    for _ in range(3):
        outputs = [whole(**inputs), *simulate(ranks, inputs).outputs]
        torch.stack([(o**2).mean() for o in outputs]).sum().backward()
        for optimizer in trained:
            optimizer.step()
            optimizer.zero_grad()
    plan = ranks[0].plan

    for name, expected in whole.named_parameters():
        parts = [dict(rank.named_parameters())[name].detach() for rank in ranks]
        assert torch.allclose(expected, joined_over(plan, name, parts), rtol=0, atol=1e-9), name


# ── more ranks than experts, words ───────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_more_ranks_than_experts_cut_each_of_them_and_the_plan_says_so() -> None:
    model, inputs = build("mixtral", num_hidden_layers=1)
    plan = autotp.plan(model, tp=8, training=True, example_inputs=inputs)
    pair = next(pair for pair in plan.pairs if pair.role == "experts")

    assert ["column", "row"] == layouts(plan, "experts.gate_up_proj", "experts.down_proj")
    assert "experts (4): too few for tp 8, so each is sharded" == pair.note
    with pytest.raises(
        PlanError, match=r"its axis of 4 cannot be sharded over 8 ranks; tp sizes that"
    ):
        autotp.plan(model, tp=8, example_inputs=inputs, overrides=BY_EXPERT)


@pytest.mark.slow
def test_a_router_is_no_expert() -> None:
    with pytest.raises(PlanError, match="requests layout 'expert', which router.weight"):
        autotp.plan(
            drawn(Sorted(4)), tp=2, example_inputs=tokens(), overrides={"router.*": "expert"}
        )


# ── a list of modules ────────────────────────────────────────────────────────────────────────────


class Listed(nn.Module):
    """Experts as modules, each called with the tokens that chose it, however many."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.ups = nn.ModuleList(nn.Linear(HIDDEN, FFN) for _ in range(experts))
        self.downs = nn.ModuleList(nn.Linear(FFN, HIDDEN) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for k, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            row, place = torch.where(chosen == k)
            made = down(functional.silu(up(rows[row]))) * weights[row, place].unsqueeze(-1)
            out = out.index_add(0, row, made)
        return x + out.view(x.shape)


@pytest.fixture(scope="module")
def listed() -> list[Captured]:
    model = drawn(Listed())
    return [Captured(model, tokens(), training=training) for training in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 3])
def test_a_list_of_experts_is_cut_along_their_hidden_axis(listed: list[Captured], tp: int) -> None:
    plan, evidence = both(listed, tp)

    assert all(one.ok for one in evidence), evidence
    assert [*["column"] * 8, *["row", "replicated"] * 4] == [
        r.layout for n, r in plan.parameters.items() if not n.startswith("gate")
    ]
