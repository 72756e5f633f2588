"""Pairs of real models by dataflow alone: openers, closers, roles; what is no pair."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

import autotp
from tests import models
from tests.analysed import Analysed, analysed, family

# (role, openers, closers) of one layer, names shortened to `weight`
LLAMA = (
    ("attention", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj"),
    ("mlp", "mlp.gate_proj mlp.up_proj", "mlp.down_proj"),
)
LAYERS: Mapping[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "llama": ("model.layers.{}.", LLAMA),
    "qwen3": ("model.layers.{}.", LLAMA),
    "gemma2": ("model.layers.{}.", LLAMA),
    "gpt2": (
        "transformer.h.{}.",
        (("attention", "attn.c_attn", "attn.c_proj"), ("mlp", "mlp.c_fc", "mlp.c_proj")),
    ),
    "gpt_neox": (
        "gpt_neox.layers.{}.",
        (
            ("attention", "attention.query_key_value", "attention.dense"),
            ("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
    ),
    "bloom": (
        "transformer.h.{}.",
        (
            ("attention", "self_attention.query_key_value", "self_attention.dense"),
            ("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
    ),
    "opt": (
        "model.decoder.layers.{}.",
        (
            (
                "attention",
                "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                "self_attn.out_proj",
            ),
            ("mlp", "fc1", "fc2"),
        ),
    ),
    "phi3": (
        "model.layers.{}.",
        (
            ("attention", "self_attn.qkv_proj", "self_attn.o_proj"),
            ("mlp", "mlp.gate_up_proj", "mlp.down_proj"),
        ),
    ),
    "bert": (
        "bert.encoder.layer.{}.",
        (
            (
                "attention",
                "attention.self.query attention.self.key attention.self.value",
                "attention.output.dense",
            ),
            ("mlp", "intermediate.dense", "output.dense"),
        ),
    ),
    "mixtral": (
        "model.layers.{}.",
        (LLAMA[0], ("experts", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    ),
    "hand": (
        "blocks.{}.",
        (
            ("attention", "attention.query attention.key attention.value", "attention.out"),
            ("mlp", "up", "down"),
        ),
    ),
}
VOCABULARIES = {
    "llama": ["model.embed_tokens", "lm_head"],
    "gpt2": ["transformer.wte"],
    "bert": ["bert.embeddings.word_embeddings"],
    "t5": ["shared"],
    "hand": ["words", "head"],
}

Pair = tuple[str, frozenset[str], frozenset[str]]


def short(name: str) -> str:
    return name.removesuffix(".weight")


def pairs(found: Analysed) -> set[Pair]:
    """Role, openers and closers of every pair but the vocabularies, weights only."""
    return {
        (p.role.name, frozenset(map(short, p.openers)), frozenset(map(short, p.closers)))
        for p in found.matching.pairs
        if not p.vocabulary
    }


def expected(name: str) -> set[Pair]:
    prefix, layer = LAYERS[name]
    return {
        (
            role,
            frozenset(prefix.format(number) + n for n in openers.split()),
            frozenset(prefix.format(number) + n for n in closers.split()),
        )
        for number in range(models.LAYERS)
        for role, openers, closers in layer
    }


def weights(found: set[Pair]) -> set[Pair]:
    """Pairs without biases, which follow their weights."""

    def plain(names: frozenset[str]) -> frozenset[str]:
        return frozenset(n for n in names if not n.endswith("bias"))

    return {(role, plain(openers), plain(closers)) for role, openers, closers in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_has_its_pairs(name: str) -> None:
    assert expected(name) == weights(pairs(family(name)))


@pytest.mark.slow
def test_layers_that_share_a_bias_table_share_their_heads() -> None:
    found = pairs(family("t5"))
    attention = {
        part: next(p for p in found if f"{part}.block.1.layer.0.SelfAttention.q" in p[1])
        for part in ("encoder", "decoder")
    }

    for part, (role, openers, closers) in attention.items():
        layers = [f"{part}.block.{n}.layer.0.SelfAttention." for n in range(models.LAYERS)]
        assert "attention" == role
        assert openers == {layer + n for layer in layers for n in "qkv"}
        assert closers == {layer + "o" for layer in layers}


@pytest.mark.slow
def test_a_cross_attention_is_a_pair_of_its_own() -> None:
    found = pairs(family("t5"))
    cross = [p for p in found if any("EncDecAttention" in n for n in p[1])]

    assert models.LAYERS == len(cross)
    assert {("attention", 3, 1)} == {(role, len(o), len(c)) for role, o, c in cross}


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_tables_and_heads_are_vocabularies(name: str) -> None:
    found = [p for p in family(name).matching.pairs if p.vocabulary]

    assert VOCABULARIES[name] == [short(n) for p in found for n in p.openers]
    assert {models.WORDS} == {axis.size.static for p in found for axis in p.axes}


def test_heads_and_their_group_are_one_family() -> None:
    sizes = family("llama").sizes("model.layers.0.self_attn.q_proj.weight")

    assert [models.KV_HEADS, models.HEADS // models.KV_HEADS] == sizes


@pytest.mark.slow
def test_only_norms_positions_and_routers_have_no_home() -> None:
    found = family("mixtral")
    homeless = {n for n in found.analysis.parameters if n not in found.matching.home}

    assert {True} == {"norm" in n or n.endswith("mlp.gate.weight") for n in homeless}


# ── names do not matter ──────────────────────────────────────────────────────────────────────────

RENAMED = tuple((part, f"x{number}") for number, part in enumerate(models.PLAIN_PARTS))


@pytest.mark.slow
def test_a_model_with_other_names_has_the_same_plan() -> None:
    plain, inputs = models.build("hand")
    other, _ = models.build("hand", rename=RENAMED)
    plans = [autotp.plan(model, 2, example_inputs=inputs) for model in (plain, other)]
    layouts = [[(p.layout, p.dim, p.shape) for p in q.parameters.values()] for q in plans]

    assert {n for n, _ in plain.named_parameters()} != {n for n, _ in other.named_parameters()}
    assert layouts[0] == layouts[1]
    assert plans[0].cost == plans[1].cost
    assert [c.kind for c in plans[0].collectives] == [c.kind for c in plans[1].collectives]


@pytest.mark.slow
def test_a_fused_projection_pairs_like_three() -> None:
    fused, plain = family("hand", fused=True), family("hand")

    assert [p.role.name for p in plain.matching.pairs] == [
        p.role.name for p in fused.matching.pairs
    ]
    assert "(8*8 + 8*8 + 8*8)" == fused.layout("blocks.0.attention.fused.weight")


# ── what is no pair ──────────────────────────────────────────────────────────────────────────────

WIDTH, HEADS, SIZE = 48, 6, 4
KINDS = ("latent", "normed", "shared", "summed")


class Attention(nn.Module):
    """Causal attention of one kind.

    Its queries come through a normed latent (`latent`) or are normed over all heads (`normed`), its
    heads share one key (`shared`), or are mixed before the output is projected (`summed`).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        inner = HEADS * SIZE
        latent = 12 if kind == "latent" else WIDTH
        self.down = nn.Linear(WIDTH, latent)
        self.latent_norm = nn.RMSNorm(latent)
        self.query, self.value = nn.Linear(latent, inner), nn.Linear(WIDTH, inner)
        self.key = nn.Linear(WIDTH, SIZE if kind == "shared" else inner)
        self.query_scale = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(SIZE if kind == "summed" else inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent = self.latent_norm(self.down(x)) if self.kind == "latent" else x
        query, key = self.query(latent), self.key(x)
        if self.kind == "normed":
            query = query * query.square().mean(-1, keepdim=True).rsqrt() * self.query_scale
        split = [t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in (query, key, self.value(x))]
        key = split[1].expand(-1, HEADS, -1, -1) if self.kind == "shared" else split[1]
        mixed = functional.scaled_dot_product_attention(split[0], key, split[2], is_causal=True)
        if self.kind == "summed":
            return self.out(mixed.softmax(1).sum(1))
        return self.out(mixed.transpose(1, 2).flatten(2))


def attention(kind: str) -> Analysed:
    torch.manual_seed(0)
    return analysed(Attention(kind), {"x": torch.randn(2, 5, WIDTH)})


def homes(found: Analysed) -> set[str]:
    """Parameters of the attention pair, weights only."""
    (pair,) = (p for p in found.matching.pairs if p.role.name == "attention")
    return {n for n in (*pair.openers, *pair.closers) if n.endswith("weight")}


def test_a_latent_before_a_norm_is_no_pair() -> None:
    found = attention("latent")

    assert {"query.weight", "key.weight", "value.weight", "out.weight"} == homes(found)
    assert "down.weight" not in found.matching.home
    assert "latent_norm.weight" not in found.matching.home


def test_queries_normed_over_all_heads_belong_to_the_pair_of_the_heads() -> None:
    assert {"query.weight", "key.weight", "value.weight", "out.weight"} == homes(
        attention("normed")
    )


def test_a_key_that_all_heads_share_stays_out_of_their_pair() -> None:
    assert {"query.weight", "value.weight", "out.weight"} == homes(attention("shared"))


def test_heads_that_meet_a_softmax_are_no_pair() -> None:
    found = attention("summed")
    heads = [a for p in found.matching.pairs for a in p.axes if a.size.static == HEADS]

    assert [] == heads
