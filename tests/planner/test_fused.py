"""Faults that users of tensor-parallel tools reported, each with the test of its whole kind.

`CASES` names the tests; those that no other file has are here, in the order of their cases.
"""

import ast
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import autotp
from autotp.errors import PlanError
from tests import models
from tests.models import build
from tests.proven import Captured, proven
from tests.spmd.beside import joined_over

TESTS = Path(__file__).parents[1]

CASES = {
    # head counts and divisibility
    "C000": "test_any_tp: test_heads_are_shared_in_whole_units",
    "C001": "test_any_tp: test_copies_of_key_value_heads_are_summed_among_those_that_hold_them",
    "C002": "test_names: test_random_names_change_nothing_in_the_plan",
    "C004": "test_any_tp: test_too_few_heads_stay_whole_alone_and_the_plan_says_which_tp_would_do",
    "C005": "test_any_tp: test_heads_are_shared_in_whole_units",
    "C007": "test_any_tp: test_odd_head_counts_are_cut",
    "C009": "test_any_tp: test_odd_head_counts_are_cut",
    "C010": "test_any_tp: test_an_override_that_forces_such_a_split_is_told_the_legal_sizes",
    "C012": "test_any_tp: test_a_fused_weight_in_four_blocks",
    # fused and packed weights
    "C013": "test_any_tp: test_heads_are_shared_in_whole_units",
    "C014": "test_fused: test_layouts_of_one_attention_are_each_cut_right",
    "C015": "test_any_tp: test_fused_layouts_are_told_by_dataflow",
    "C018": "test_fused: test_what_an_override_keeps_whole_keeps_its_sizes",
    "C019": "test_any_tp: test_fused_layouts_are_told_by_dataflow",
    "C021": "test_fused: test_an_intermediate_is_gathered_in_the_order_of_the_whole",
    "C022": "test_fused: test_segments_come_back_in_the_order_of_the_whole",
    "C024": "test_any_tp: test_attention_and_mlp_in_one_projection_are_both_cut",
    "C025": "test_fused: test_segments_that_are_cut_behind_a_convolution",
    # plans that were not applied
    "C027": "test_representatives: test_a_kind_is_right_and_nearly_all_cut",
    "C028": "test_fused: test_layers_of_two_kinds_are_both_cut",
    "C030": "test_names: test_a_text_model_in_one_of_images_keeps_its_plan",
    "C033": "test_names: test_random_names_change_nothing_in_the_plan",
    "C034": "test_fused: test_what_is_sharded_says_so",
    "C036": "test_fused: test_every_weight_has_its_layout_in_the_plan",
    "C037": "test_names: test_a_text_model_in_one_of_images_keeps_its_plan",
    # vocabulary, embeddings, tying
    "C039": "test_fused: test_plans_in_a_configuration_are_not_read",
    "C040": "test_fused: test_a_weight_of_several_products_has_one_layout",
    "C042": "test_any_tp: test_an_odd_vocabulary_is_cut_over_any_tp",
    "C043": "test_fused: test_a_tied_model_keeps_its_keys",
    "C045": "test_fused: test_a_file_without_the_head_gives_the_tied_one",
    "C046": "test_fused: test_a_table_of_all_layers_is_cut",
    # position bias, norms over heads, unusual attention
    "C055": "test_representatives: test_a_kind_is_right_and_nearly_all_cut",
    "C057": "test_representatives: test_a_kind_is_right_and_nearly_all_cut",
    "C058": "test_fused: test_a_class_that_nobody_knows_is_cut",
    "C059": "test_fused: test_a_norm_over_all_heads_costs_one_small_sum",
    "C060": "test_representatives: test_a_kind_is_right_and_nearly_all_cut",
    "C061": "test_any_tp: test_too_few_heads_stay_whole_alone_and_the_plan_says_which_tp_would_do",
    # capture
    "C096": "test_fused: test_random_views_of_a_cut_value",
    "C097": "test_fused: test_patches_of_video_and_images",
    "C100": "test_fused: test_parallel_and_sequential_blocks_are_told_apart",
    "C102": "test_fused: test_a_class_that_nobody_knows_is_cut",
    # versions and messages
    "C103": "test_fused: test_no_version_is_compared",
    "C105": "test_fused: test_attributes_that_a_library_removed_are_not_asked_for",
    "C106": "test_fused: test_no_class_is_refused",
    "C108": "test_fused: test_what_does_not_work_yet_is_refused_before_anything_runs",
    "C109": "test_fused: test_the_plan_says_which_ranks_share_what",
}
NUMBERS = {
    "head counts": (0, 1, 2, 4, 5, 7, 9, 10, 12),
    "fused": (13, 14, 15, 18, 19, 21, 22, 24, 25),
    "not applied": (27, 28, 30, 33, 34, 36, 37),
    "vocabulary": (39, 40, 42, 43, 45, 46),
    "position bias": (55, 57, 58, 59, 60, 61),
    "capture": (96, 97, 100, 102),
    "versions": (103, 105, 106, 108, 109),
}


def test_every_case_has_its_test() -> None:
    named = {(test.partition(": ")[0], test.partition(": ")[2]) for test in CASES.values()}
    files = {file: ast.parse(next(TESTS.rglob(f"{file}.py")).read_text()) for file, _ in named}
    known = {
        (file, node.name)
        for file, tree in files.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }

    assert set(CASES) == {f"C{n:03}" for numbers in NUMBERS.values() for n in numbers}
    assert set() == named - known


# ── fused and packed weights ─────────────────────────────────────────────────────────────────────

HIDDEN, HEADS, SIZE = 16, 8, 4


def by_head(x: Tensor) -> list[Tensor]:
    """[q k v] of each head."""
    return list(x.unflatten(-1, (HEADS, 3, SIZE)).unbind(-2))


def in_blocks(x: Tensor) -> list[Tensor]:
    """[q | k | v]."""
    return [part.unflatten(-1, (HEADS, SIZE)) for part in x.chunk(3, -1)]


def in_four_blocks(x: Tensor) -> list[Tensor]:
    """[q | k | v] of each quarter of the heads."""
    parts = x.unflatten(-1, (4, 3, HEADS // 4 * SIZE)).unbind(-2)
    return [part.flatten(-2).unflatten(-1, (HEADS, SIZE)) for part in parts]


LAYOUTS = {"by head": by_head, "in blocks": in_blocks, "in four blocks": in_four_blocks}


class Attention(nn.Module):
    """One attention, whatever the layout of its fused weight is; the product too, if asked."""

    def __init__(self, layout: str, *, shows: bool = False) -> None:
        super().__init__()
        self.apart, self.shows = LAYOUTS[layout], shows
        self.fused, self.out = nn.Linear(HIDDEN, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, HIDDEN)
        torch.manual_seed(0)
        base = torch.randn(3 * HEADS * SIZE, HIDDEN) * 0.3
        rows = torch.stack(self.apart(torch.arange(len(base)))).flatten()
        nn.init.normal_(self.out.weight, std=0.3)
        nn.init.normal_(self.out.bias)
        with torch.no_grad():
            self.fused.weight[rows] = base
            self.fused.bias[rows] = base[:, 0]

    def forward(self, x: Tensor) -> Any:
        fused = self.fused(x)
        q, k, v = (part.transpose(1, 2) for part in self.apart(fused))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return (y, fused) if self.shows else y


def vectors(*sizes: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(*sizes)}


def test_layouts_of_one_attention_are_each_cut_right() -> None:
    inputs = vectors(2, 5, HIDDEN)
    attentions = [Attention(layout) for layout in LAYOUTS]
    outputs = [attention(**inputs) for attention in attentions]
    found = [Captured(attention, inputs) for attention in attentions]

    assert all(torch.allclose(outputs[0], other, atol=1e-5) for other in outputs)
    for tp in (2, 3, 8):
        proofs = [captured.proof(tp) for captured in found]
        rows = [p.plan.parameters["fused.weight"].shards[0].shape[0] for p in proofs]
        most = 3 * SIZE * -(-HEADS // tp)
        quarters = 3 * SIZE * HEADS // 4 * -(-4 // tp) if tp == 3 else most
        assert [True] * 3 == [p.evidence.ok for p in proofs]
        assert [most, most, quarters] == rows  # a quarter, of two heads, is the unit of the last
        assert 1 == len({p.plan.cost["time_ps"] for p in proofs})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_intermediate_is_gathered_in_the_order_of_the_whole(layout: str) -> None:
    """The fused product, which is cut, is an output, too."""
    plan = proven(Attention(layout, shows=True), vectors(2, 5, HIDDEN), 3)

    assert plan.parameters["fused.weight"].dim == 0
    assert "row" == plan.parameters["out.weight"].layout
    assert ["all_gather", "all_reduce"] == sorted(
        c.kind for c in plan.collectives if c.phase == "forward"
    )


def test_what_an_override_keeps_whole_keeps_its_sizes() -> None:
    """Attention whole beside a split MLP: the sizes in its code are those of the whole model."""
    model, inputs = build("phi3", num_hidden_layers=1)
    one, two = (
        Captured(model, inputs, overrides={"*self_attn*": "replicated"}).proof(tp) for tp in (1, 2)
    )
    cut = [n for n, p in two.plan.parameters.items() if p.dim is not None]

    assert two.evidence.ok
    assert {"model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"} <= {
        *cut
    }
    assert sizes_in(one.ranks[0].code()) == sizes_in(two.ranks[1].code())


def sizes_in(code: str) -> list[str]:
    """The lines of a graph's code that cut or fold a tensor at sizes written in them."""
    return [
        line.partition("  #")[0].strip()
        for line in code.splitlines()
        if any(f"aten.{op}" in line for op in ("slice", "view", "reshape", "split_with_sizes"))
    ]


class Segments(nn.Module):
    """A gate beside queries and values in one product; the two pass a convolution a channel."""

    def __init__(self) -> None:
        super().__init__()
        inner = 6 * SIZE
        self.into = nn.Linear(HIDDEN, 3 * inner)
        self.conv = nn.Conv1d(2 * inner, 2 * inner, 3, groups=2 * inner, padding=2)
        self.out = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, both = self.into(x).split([6 * SIZE, 12 * SIZE], -1)
        both = functional.silu(self.conv(both.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        q, v = (part.unflatten(-1, (6, SIZE)) for part in both.chunk(2, -1))
        states = torch.einsum("bshd,bshe->bshde", q, v).cumsum(1)
        read = torch.einsum("bshde,bshd->bshe", states, q.softmax(-1))
        return x + self.out(read.flatten(-2) * functional.silu(gate))


@pytest.fixture(scope="module")
def segments() -> Captured:
    torch.manual_seed(0)
    return Captured(Segments(), vectors(2, 5, HIDDEN))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_segments_that_are_cut_behind_a_convolution(segments: Captured, tp: int) -> None:
    proof = segments.proof(tp)
    layouts = {name: p.layout for name, p in proof.plan.parameters.items()}

    assert proof.evidence.ok
    assert {"column", "row"} == set(layouts.values())
    assert 3 * SIZE * -(-6 // tp) == proof.plan.parameters["into.weight"].shards[0].shape[0]
    assert 1 == sum(c.phase == "forward" for c in proof.plan.collectives)


def test_segments_come_back_in_the_order_of_the_whole(segments: Captured) -> None:
    proof = segments.proof(4)
    whole = dict(segments.model.named_parameters())
    parts = [dict(rank.named_parameters()) for rank in proof.ranks]

    for name, tensor in whole.items():
        joined = joined_over(proof.plan, name, [p[name].detach() for p in parts])
        assert torch.equal(tensor, joined), name


# ── plans that were not applied ──────────────────────────────────────────────────────────────────


class Linear(nn.Module):
    """Attention of which the sum over positions is linear; `Full` has a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, 6 * SIZE) for _ in range(3))
        self.o = nn.Linear(6 * SIZE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (6, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return x + self.o(self.mixed(q, k, v).transpose(1, 2).flatten(-2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        states = torch.einsum("bhsd,bhse->bhsde", k.sigmoid(), v).cumsum(2)
        return torch.einsum("bhsde,bhsd->bhse", states, q.sigmoid())


class Full(Linear):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Stack(nn.Module):
    """Layers one after another, under names that a list gives them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_of_two_kinds_are_both_cut() -> None:
    torch.manual_seed(0)
    plan = proven(Stack(Linear(), Linear(), Linear(), Full()), vectors(2, 5, HIDDEN), 3)

    for layer in range(4):
        layouts = [plan.parameters[f"layers.{layer}.{n}.weight"].layout for n in "qkvo"]
        assert ["column", "column", "column", "row"] == layouts
    assert 4 == sum(c.phase == "forward" for c in plan.collectives)


def test_what_is_sharded_says_so() -> None:
    model, inputs = build(models.HAND)
    sharded = autotp.parallelize(model, 2, rank=1, example_inputs=inputs)
    held = dict(sharded.named_parameters())

    assert (2, 1) == (sharded.plan.tp, sharded.rank)
    assert "tensor-parallel over 2 ranks" in str(sharded.plan)
    assert {n: p.shards[1].shape for n, p in sharded.plan.parameters.items()} == {
        n: tuple(p.shape) for n, p in held.items()
    }


def test_every_weight_has_its_layout_in_the_plan() -> None:
    model, inputs = build(models.HAND)
    plan = autotp.plan(model, 2, example_inputs=inputs)
    printed = " ".join(str(plan).split())
    whole = sum(p.bytes for p in plan.parameters.values())
    large = {n: p for n, p in plan.parameters.items() if p.bytes > 0.01 * whole}

    assert [n for n, _ in model.named_parameters()] == list(plan.parameters)
    assert len(large) > 12
    for name, record in large.items():
        word = name.removesuffix(".weight").rpartition(".")[2]
        assert record.layout in ("column", "row", "vocabulary")
        assert word in printed, word


# ── vocabulary, embeddings, tying ────────────────────────────────────────────────────────────────


def test_plans_in_a_configuration_are_not_read() -> None:
    """Words of another library's plan, known or not, mean nothing here."""
    model, inputs = build("llama", num_hidden_layers=1)
    expected = autotp.plan(model, 2, example_inputs=inputs)
    anything = cast("Any", model)
    anything.config.base_model_tp_plan = {"layers.*.self_attn.q_proj": "embedding_rowwise"}
    anything._tp_plan = {"lm_head": "colwise_rep"}

    assert expected == autotp.plan(model, 2, example_inputs=inputs)


class Shared(nn.Module):
    """One weight of two products, and once more transposed, where it is a closer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.up(x).relu())
        z = y + functional.linear(self.up(y).tanh(), self.up.weight.T)
        return z + self.down(self.up(z).sigmoid())


@pytest.mark.parametrize("tp", [2, 3])
def test_a_weight_of_several_products_has_one_layout(tp: int) -> None:
    torch.manual_seed(0)
    plan = proven(Shared(), vectors(2, 5, HIDDEN), tp)

    assert ["column", "row"] == [plan.parameters[f"{n}.weight"].layout for n in ("up", "down")]
    assert 3 == sum(c.phase == "forward" for c in plan.collectives)


@pytest.fixture(scope="module")
def tied() -> Captured:
    return Captured(*build("llama", num_hidden_layers=1, tie_word_embeddings=True))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_tied_model_keeps_its_keys(tied: Captured, tp: int) -> None:
    proof = tied.proof(tp)
    record = proof.plan.parameters["model.embed_tokens.weight"]

    assert proof.evidence.ok
    assert ("vocabulary", ("lm_head.weight",)) == (record.layout, record.tied)
    for rank in proof.ranks:
        assert list(tied.model.state_dict()) == list(rank.state_dict())
        assert rank.get_parameter("lm_head.weight") is rank.get_parameter(record.name)


def test_a_file_without_the_head_gives_the_tied_one(tied: Captured, tmp_path: Path) -> None:
    cast("Any", tied.model).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sharded = autotp.parallelize(read, 2, rank=1, example_inputs=tied.work.inputs)

    assert "lm_head.weight" not in saved
    assert torch.equal(saved["model.embed_tokens.weight"][256:], sharded.lm_head.weight)


class Packed(nn.Module):
    """One table has a vector a word for every layer, read by indexing; a layer takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, HIDDEN)
        self.packed = nn.Parameter(torch.randn(30, 2 * 12))
        self.gates = nn.ModuleList(nn.Linear(HIDDEN, 12) for _ in range(2))
        self.backs = nn.ModuleList(nn.Linear(12, HIDDEN) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, own = self.words(ids), self.packed[ids].unflatten(-1, (2, 12))
        for k, (gate, back) in enumerate(zip(self.gates, self.backs, strict=True)):
            x = x + back(functional.gelu(gate(x)) * own[..., k, :])
        return x


@pytest.mark.parametrize("tp", [2, 3])
def test_a_table_of_all_layers_is_cut(tp: int) -> None:
    torch.manual_seed(0)
    plan = proven(Packed(), {"ids": torch.randint(0, 30, (2, 7))}, tp)

    assert plan.parameters["packed"].dim is not None
    assert 0.07 > plan.replicated_fraction


# ── position bias, norms over heads, unusual attention ───────────────────────────────────────────


class Raw(nn.Module):
    """A block of no module that a library has: parameters, einsum, a softmax spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(3, HIDDEN, 6, SIZE) * 0.3)
        self.back = nn.Parameter(torch.randn(6, SIZE, HIDDEN) * 0.3)
        self.wide, self.narrow = (nn.Parameter(torch.randn(HIDDEN, 40) * 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,zdhe->zbhse", x, self.into)
        scores = (q @ k.mT / SIZE**0.5).exp()
        mixed = (scores / scores.sum(-1, keepdim=True)) @ v
        x = x + torch.einsum("bhse,hed->bsd", mixed, self.back)
        return x + (x @ self.wide).square() @ self.narrow.T


@pytest.mark.parametrize("tp", [2, 4])
def test_a_class_that_nobody_knows_is_cut(tp: int) -> None:
    torch.manual_seed(0)
    plan = proven(Stack(Raw(), Raw()), vectors(2, 5, HIDDEN), tp)

    assert 0 == plan.replicated_fraction
    assert 4 == sum(c.phase == "forward" for c in plan.collectives)


def test_a_norm_over_all_heads_costs_one_small_sum() -> None:
    """Queries and keys are each normed by the sum of their squares over the ranks: no gather.

    Priced at the sizes of a real model, where bytes count and not the number of messages.
    """
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.Olmo2Config(num_hidden_layers=1, eos_token_id=2, **sizes)
    with torch.device("meta"):
        model = transformers.Olmo2ForCausalLM(config).eval()
    words = torch.ones(1, 2048, dtype=torch.int64)
    plan = autotp.plan(model, 4, example_inputs={"input_ids": words})
    moved = [(c.kind, c.where, c.payload_bytes) for c in plan.collectives if "attn" in c.where]
    attention, whole = "model.layers.0.self_attn.", 2048 * 4096 * 4

    assert [
        ("all_reduce", f"{attention}q_norm", whole // 4096),
        ("all_reduce", f"{attention}k_norm", whole // 4096),
        ("all_reduce", f"{attention}o_proj", whole),
    ] == moved


# ── capture ──────────────────────────────────────────────────────────────────────────────────────


class Viewed(nn.Module):
    """Folds and turns a product at random, scales it, and turns it back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        folds = [(2, 3, 8), (12, 4), (4, 12), (2, 2, 2, 6), (6, 8), (3, 16), (48,)]
        self.fold = folds[seed % len(folds)]
        self.turn = torch.randperm(len(self.fold), generator=draw).tolist()
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)
        self.scale = nn.Parameter(torch.randn([self.fold[k] for k in self.turn], generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        folded = self.up(x).view(batch, length, *self.fold)
        turned = folded.permute(0, 1, *[2 + k for k in self.turn]) * self.scale
        mixed = turned.reshape(batch, length, 48).relu()
        return self.down(mixed)


@pytest.mark.parametrize("seed", range(7))
def test_random_views_of_a_cut_value(seed: int) -> None:
    captured = Captured(Viewed(seed), vectors(2, 5, HIDDEN))
    for tp in (2, 3, 5):
        proof = captured.proof(tp)
        assert proof.evidence.ok, proof.evidence.first_divergence
        assert proof.plan.pairs[0].split or tp > max(proof.plan.pairs[0].size, 2)


class Patches(nn.Module):
    """Patches of video (3-D) and of an image (2-D), in one sequence before an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.video = nn.Conv3d(3, 12, (2, 4, 4), (2, 4, 4))
        self.image = nn.Conv2d(3, 12, 4, 4, bias=False)
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 6)

    def forward(self, video: Tensor, image: Tensor) -> Tensor:
        parts = (self.video(video).flatten(2), self.image(image).flatten(2))
        x = torch.cat(parts, -1).transpose(1, 2)
        return self.down(functional.gelu(self.up(x))).mean(1)


@pytest.mark.parametrize("tp", [2, 3])
def test_patches_of_video_and_images(tp: int) -> None:
    torch.manual_seed(0)
    inputs = {"video": torch.randn(2, 3, 4, 8, 8), "image": torch.randn(2, 3, 8, 8)}
    plan = proven(Patches(), inputs, tp)

    assert all(plan.parameters[f"{n}.weight"].dim is not None for n in ("up", "down"))
    assert () == plan.unruled


@pytest.mark.parametrize(("parallel", "sums"), [(True, 1), (False, 2)])
def test_parallel_and_sequential_blocks_are_told_apart(parallel: bool, sums: int) -> None:
    model, inputs = build("gpt_neox", num_hidden_layers=1, use_parallel_residual=parallel)
    plan = autotp.plan(model, 2, example_inputs=inputs)

    assert ["all_reduce"] * sums == [c.kind for c in plan.collectives if "layers.0" in c.where]


# ── versions and messages ────────────────────────────────────────────────────────────────────────

SOURCES = sorted((TESTS.parent / "autotp").rglob("*.py"))


def names_in(path: Path) -> set[str]:
    """The names, attributes and texts in a file, docstrings and comments apart."""
    tree = ast.parse(path.read_text())
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    found |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    texts = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in said)
    return found | {n.value for n in texts if isinstance(n.value, str)}


def test_no_version_is_compared() -> None:
    """What is there is tried; no number decides. A message may name a version."""
    words = {"version_info", "TorchVersion", "packaging", "parse_version"}

    assert len(SOURCES) > 50
    assert {} == {p.name: names_in(p) & words for p in SOURCES if names_in(p) & words}
    assert set() == {p.name for p in SOURCES if compares(p, "__version__")}


def compares(path: Path, word: str) -> bool:
    """Whether an attribute called `word` stands in a comparison."""
    found = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Compare))
    parts = (part for compared in found for part in ast.walk(compared))
    return any(isinstance(part, ast.Attribute) and word == part.attr for part in parts)


def test_attributes_that_a_library_removed_are_not_asked_for() -> None:
    """Numbers of heads, sizes of heads: all of that is read from the graph."""
    words = {f"{kind}{what}" for kind in ("num_", "n_") for what in ("heads", "head", "kv_heads")}
    words |= {"num_attention_heads", "num_key_value_heads", "head_dim", "num_key_value_groups"}
    words |= {"hidden_size", "intermediate_size", "n_embd", "d_model", "tie_word_embeddings"}

    assert {} == {p.name: names_in(p) & words for p in SOURCES if names_in(p) & words}


class Odd(nn.Module):
    """Sorts the channels between two products: nothing that could be cut there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sort(-1).values)


def test_no_class_is_refused() -> None:
    """What cannot be cut stays whole, and the plan says what and why."""
    torch.manual_seed(0)
    plan = proven(Odd(), vectors(2, 5, HIDDEN), 2)
    whole = {n: p.reason for n, p in plan.parameters.items() if p.dim is None}

    assert "up.weight" in whole
    assert all(whole.values())
    assert "up.weight" in str(plan)


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("save_pretrained", ("directory",), "the parts of the others are not here"),
        ("resize_token_embeddings", (600,), "before"),
        ("set_attn_implementation", ("eager",), "before"),
        ("init_continuous_batching", (), "Use generate"),
        ("push_to_hub", ("somebody/model",), "then upload the directory"),
        ("add_adapter", (None,), "left out of all calls"),
        ("half", (), "torch.float32 on cpu, and so is the code"),
    ],
)
def test_what_does_not_work_yet_is_refused_before_anything_runs(
    method: str, arguments: tuple[object, ...], said: str, sharded: nn.Module
) -> None:
    with pytest.raises(PlanError, match=said):
        getattr(sharded, method)(*arguments)


def test_whole_weights_are_not_loaded_into_parts(sharded: nn.Module) -> None:
    whole, own = build("llama", num_hidden_layers=1)[0].state_dict(), sharded.state_dict()

    with pytest.raises(PlanError, match="as a whole, .* rank 0 of 2 holds .*from_pretrained"):
        sharded.load_state_dict(whole)
    assert "<All keys matched successfully>" == str(sharded.load_state_dict(own))


@pytest.fixture(scope="module")
def sharded() -> nn.Module:
    model, inputs = build("llama", num_hidden_layers=1)
    return autotp.parallelize(model, 2, rank=0, example_inputs=inputs)


def test_the_plan_says_which_ranks_share_what() -> None:
    model, inputs = build("llama", num_hidden_layers=1, num_key_value_heads=2)
    plan = autotp.plan(model, 4, example_inputs=inputs, training=True)

    assert "tp is ranks 0 to 3; tp/2:1 is 0+1, 2+3" in " ".join(str(plan).split())


class Block(nn.Module):
    """C081: a residual of two linear layers, its sum normalised at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 128), nn.Linear(128, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("shape", [(10, HIDDEN), (2, 5, HIDDEN), (2, 2, 5, HIDDEN)])
def test_a_sum_before_a_norm_takes_rows_of_any_rank(shape: tuple[int, ...]) -> None:
    plan = proven(Block(), vectors(*shape), 2)

    assert ["all_reduce"] == [c.kind for c in plan.collectives if c.phase == "forward"]
    assert {"up.weight": 0, "down.weight": 1} == {
        name: plan.parameters[name].dim for name in ("up.weight", "down.weight")
    }
