"""Names decide nothing: renamed, wrapped or nested in another model, a model keeps its plan."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autotp
from autotp.compiler import ModelCompiler
from autotp.errors import PlanError
from autotp.options import read_request
from autotp.records.plan import CollectiveRecord, Plan
from autotp.runtime.model import ShardedModel
from tests import models
from tests.renamed import plain, rename

Built = tuple[nn.Module, dict[str, Any]]
TP = 3  # divides neither heads nor ffn nor vocabulary: parts and padding must be the same, too


def scan() -> Built:
    """A state-space model of heads, a layer deep."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 16}
    scanned = {"state_size": 8, "n_groups": 1, "chunk_size": 8, "vocab_size": 512}
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, **scanned)).eval()
    models.randomize(model, 0)
    return model, models.build("llama")[1]


def of(name: str) -> Callable[[], Built]:
    return lambda: models.build(name)


BUILDERS = {name: of(name) for name in ("llama", "bert", "t5", "gpt2", "mixtral", models.HAND)}
BUILDERS["scan"] = scan
_KNOWN: dict[str, Plan] = {}


def planned(model: nn.Module, inputs: dict[str, Any], tp: int = TP) -> Plan:
    return autotp.plan(model, tp, example_inputs=inputs, training=True)


def own(name: str) -> Plan:
    """The plan of a model under its own names, made once."""
    if name not in _KNOWN:
        _KNOWN[name] = planned(*BUILDERS[name]())
    return _KNOWN[name]


class Taken(nn.Module):
    """Children that are called as members of a sharded model are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.plan = nn.Linear(16, 32), nn.Linear(32, 16)
        self.rank = nn.Parameter(torch.randn(16))
        self.register_buffer("code", torch.randn(16))
        self.view = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))])
        self.variants, self.add = nn.LayerNorm(16), nn.Linear(16, 16)
        self.prepare, self.graph_module = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plan(self.key(x).relu()) * self.rank + self.code
        x = self.add(self.variants(self.view[0](x)))
        return self.graph_module(self.prepare(x).relu())


def test_children_may_have_any_name() -> None:
    inputs = {"x": torch.randn(4, 16)}

    assert autotp.verify(Taken(), 2, gradients=True, example_inputs=inputs).ok


class Named(nn.Module):
    """A model with a child and a parameter of one name, beside a layer with the same."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.layer = nn.ModuleDict({name: nn.Linear(16, 32)})
        self.add_module(name, nn.Linear(32, 16))
        self.last = nn.Module()
        self.last.register_parameter(name, nn.Parameter(torch.randn(16)))

    def forward(self, x: Tensor) -> Tensor:
        opened = self.layer[self.name](x).relu()
        return self.get_submodule(self.name)(opened) * getattr(self.last, self.name)


MEMBERS = {n for n in vars(ShardedModel) if n[:2] != "__" and not hasattr(nn.Module, n)}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MEMBERS | {"self"}))
def test_a_child_may_have_the_name_of_any_member(name: str) -> None:
    model, x = Named(name).eval(), torch.randn(4, 16)
    expected = model(x)

    assert autotp.verify(model, 2, gradients=True, example_inputs={"x": x}).ok
    assert torch.equal(autotp.parallelize(model, tp=1, example_inputs={"x": x})(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self", "own"])
def test_a_parameter_may_be_called_as_code_calls_the_module(name: str) -> None:
    model, x = Scaled(name).eval(), torch.randn(4, 16)

    sharded = autotp.parallelize(model, tp=1, example_inputs={"x": x})

    assert torch.equal(sharded(x), model(x))
    assert torch.equal(sharded.graph_module(x=x), model(x))


class Scaled(nn.Module):
    """A model of one parameter, read twice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.rand(16)))

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, self.name) + getattr(self, self.name)


def test_a_view_cannot_hide_a_child() -> None:
    sharded = autotp.parallelize(Scaled("code"), tp=1, example_inputs={"x": torch.randn(4, 16)})

    with pytest.raises(PlanError, match="'code' would be hidden in a view"):
        _ = sharded.graph_module


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_random_names_change_nothing_in_the_plan(name: str) -> None:
    """Users of other tools reported plans that went by the names of modules (C002, C033)."""
    model, inputs = BUILDERS[name]()
    before = [n for n, _ in model.named_parameters()]
    old = rename(model, seed=1)
    plan = planned(model, inputs)

    assert set() == set(before) & set(plan.parameters)
    assert plain(own(name), {}) == plain(plan, old)


@pytest.mark.slow
def test_a_renamed_model_is_verified() -> None:
    """Weights are sliced, layers built and outputs compared by the new names."""
    model, inputs = models.build("llama", num_hidden_layers=1)
    rename(model, seed=2)

    assert autotp.verify(model, TP, example_inputs=inputs, training=True).ok


@pytest.mark.slow
def test_a_plan_under_other_names_is_another_one() -> None:
    """What the comparison above would miss, if it could miss anything: nothing is left out."""
    model, inputs = BUILDERS[models.HAND]()
    plan = planned(model, inputs, 2)

    assert plain(own(models.HAND), {}) != plain(plan, {})


# ── wrapped ──────────────────────────────────────────────────────────────────────────────────────


class Keywords(nn.Module):
    """Passes on what it is called with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class Deep(nn.Module):
    """Takes positions, gives logits, and holds the model two levels down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"text": Keywords(inner)})

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Tensor:
        return self.parts["text"](input_ids=input_ids, use_cache=use_cache).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "prefix", "name"),
    [(Keywords, "inner.", "llama"), (Deep, "parts.text.inner.", "gpt2")],
)
def test_a_wrapped_model_has_the_plan_of_the_model(
    wrapper: type[nn.Module], prefix: str, name: str
) -> None:
    model, inputs = BUILDERS[name]()
    plan = planned(wrapper(model).eval(), inputs)
    expected, actual = plain(own(name), {}), plain(plan, {}, prefix)
    said = [p.pop("variant") for p in (expected, actual)]  # which names the wrapper's own inputs

    assert all(text.startswith("input_ids") for text in said)
    assert {True} == {n.startswith(prefix) for n in plan.parameters}
    assert expected == actual


# ── nested in a model of images and text ─────────────────────────────────────────────────────────

IMAGE = 510  # the word that stands for a piece of an image
TEXT = ("model.language_model.", "lm_head.")


def images_and_text() -> Built:
    text = transformers.LlamaConfig(**models.LLAMA, **models.SPECIAL_WORDS)
    sizes = {**models.BERT, "image_size": 16, "patch_size": 8, "num_hidden_layers": 1}
    del sizes["max_position_embeddings"]
    vision = transformers.CLIPVisionConfig(**sizes)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    config.image_token_index, config.vision_feature_layer = IMAGE, -1
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    models.randomize(model, 0)
    _, inputs = models.build("llama")
    inputs["input_ids"][:, 2:6] = IMAGE  # a piece each
    return model, inputs | {"pixel_values": torch.randn(2, 3, 16, 16)}


@pytest.fixture(scope="module")
def both() -> tuple[ModelCompiler, ModelCompiler]:
    """The text model alone and in another, captured."""
    found = (BUILDERS["llama"](), images_and_text())
    alone, nested = (
        ModelCompiler(m, read_request(example_inputs=i, training=True)) for m, i in found
    )
    return alone, nested


def lies(plan: Plan) -> dict[str, tuple[object, ...]]:
    """How each parameter of the text model lies, under the names that it has alone."""
    return {
        name.replace("language_model.", ""): (p.layout, p.dim, p.axis_size, p.shards, p.reason)
        for name, p in plan.parameters.items()
        if name.startswith(TEXT) or not any("language_model" in n for n in plan.parameters)
    }


def moves(collectives: Iterable[CollectiveRecord]) -> Counter[tuple[str, ...]]:
    """The collectives, of one value each, under the names that the text model has alone."""
    return Counter(
        (c.kind, c.phase, c.where.replace("language_model.", ""), f"{c.payload_bytes} {c.group}")
        for c in collectives
    )


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_text_model_in_one_of_images_keeps_its_plan(
    tp: int, both: tuple[ModelCompiler, ModelCompiler]
) -> None:
    """A model that wraps another hid the plan of tools that go by names (C030, C037)."""
    alone, plan = (work.compile(tp, "tp").plan for work in both)
    nested = [c for c in plan.collectives if f"{c.where}.".startswith(TEXT)]

    assert "column" == plan.parameters["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].layout
    assert lies(alone) == lies(plan)
    assert moves(alone.collectives) == moves(nested)
