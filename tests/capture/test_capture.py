"""Captured graphs give the model's own outputs, at sizes unlike those they were traced at."""

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotp.capture.capture import capture
from autotp.capture.clean import retarget_graph
from autotp.capture.program import Guard, Program, find_broken_guard
from autotp.errors import CaptureError
from tests import models

SHAPES = ((2, 12), (1, 1), (1, 9), (5, 1), (4, 21))


def sized(inputs: Mapping[str, Any], batch: int, sequence: int) -> dict[str, Any]:
    """The inputs, tiled or cropped; a `decoder_` input gets one token more."""

    def resized(name: str, tensor: torch.Tensor) -> torch.Tensor:
        lengths = (batch, sequence + name.startswith("decoder_"))
        for dim, length in enumerate(lengths):
            tensor = tensor.index_select(dim, torch.arange(length) % tensor.shape[dim])
        return tensor

    return {n: resized(n, v) if torch.is_tensor(v) else v for n, v in inputs.items()}


def left_padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    return mask


def assert_same(expected: Any, actual: Any) -> None:
    assert type(expected) is type(actual)
    wanted, found = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    assert len(wanted) == len(found)
    for one, other in zip(wanted, found, strict=True):
        assert one is other or torch.equal(one.nan_to_num(), other.nan_to_num())


def assert_runs_at(
    model: nn.Module, program: Program, inputs: Mapping[str, Any], shapes: Any = SHAPES
) -> None:
    for batch, sequence in shapes:
        call = sized(inputs, batch, sequence)
        fitting = program
        if 1 in (batch, sequence) and find_broken_guard(program, call) is not None:  # its code asks
            fitting = capture(model, call)
        with torch.no_grad():
            expected, actual = model(**call), models.run_program(model, fitting, call)

        assert find_broken_guard(fitting, call) is None
        assert_same(expected, actual)


def targets(program: Program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in models.names() if n != models.HAND])
def test_equals_the_model_with_left_padding_at_other_sizes(name: str) -> None:
    model, inputs = models.build(name, **models.ONE_LAYER.get(name, {"num_hidden_layers": 1}))
    inputs["attention_mask"] = left_padded(inputs["input_ids"])
    program = capture(model, inputs)

    assert program.dynamic
    assert program.reason == ""
    assert set(inputs) == {*program.inputs, *program.constants}
    # a size of 1 may need a capture of its own: tried with a decoder and with both
    shapes = [s for s in SHAPES if name in ("llama", "t5") or 1 not in s]
    assert_runs_at(model, program, inputs, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_equals_the_model_with_eager_attention_and_labels(name: str) -> None:
    model, inputs = models.build(name, attn="eager", **models.ONE_LAYER[name])
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    program = capture(model, inputs | {"labels": labels})
    call = sized(inputs, 3, 7)
    call["labels"] = call.get("decoder_input_ids", call["input_ids"])
    with torch.no_grad():
        expected, actual = model(**call), models.run_program(model, program, call)

    assert_same(expected, actual)


@pytest.mark.parametrize("fused", [False, True])
def test_a_hand_written_gpt(fused: bool) -> None:
    model, inputs = models.build("hand", fused=fused)
    program = capture(model, inputs)

    assert ("ids",) == program.inputs
    assert {"ids": (0, 1)} == program.data_dims
    assert_runs_at(model, program, inputs)


@pytest.mark.slow
def test_names_do_not_matter() -> None:
    rename = (("query", "frage"), ("down", "wo"), ("blocks", "h"), ("attention", "mixer"))
    plain, inputs = models.build("hand")
    renamed, _ = models.build("hand", rename=rename)

    assert targets(capture(plain, inputs)) == targets(capture(renamed, inputs))


@pytest.mark.slow
def test_embeddings_as_inputs() -> None:
    model, _ = models.build("llama", num_hidden_layers=1)
    embeds = torch.randn(2, 12, models.HIDDEN)
    program = capture(model, {"inputs_embeds": embeds, "use_cache": False})

    assert {"inputs_embeds": (0, 1)} == program.data_dims
    assert_runs_at(model, program, {"inputs_embeds": embeds, "use_cache": False})


@pytest.mark.slow
def test_a_mask_of_rank_four() -> None:
    model, inputs = models.build("llama", num_hidden_layers=1)
    inputs["attention_mask"] = torch.tril(torch.ones(12, 12, dtype=torch.bool)).expand(2, 1, 12, 12)
    program = capture(model, inputs)
    call = sized(inputs, 2, 5) | {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}
    with torch.no_grad():
        expected, actual = model(**call), models.run_program(model, program, call)

    assert {"input_ids": (0, 1), "attention_mask": (0, 2, 3)} == program.data_dims
    assert_same(expected, actual)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_training_graphs_drop_out_and_differentiate_like_the_model(name: str) -> None:
    model, inputs = models.build(name, **models.ONE_LAYER[name])
    inputs["labels"] = inputs.pop("decoder_input_ids", inputs["input_ids"]).clone()
    program = capture(model.train(), inputs)  # T5 shifts its labels in place: torch functionalises

    def gradients(forward: Callable[[], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        forward().loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(lambda: model(**inputs))
    actual = gradients(lambda: models.run_program(model, program, inputs))

    assert program.training
    assert "aten.dropout.default" in targets(program)
    assert_same(expected, actual)


@pytest.mark.slow
def test_no_dropout_in_eval() -> None:
    model, inputs = models.build("gpt2", n_layer=1)
    program = capture(model, inputs)

    assert not program.training
    assert "aten.dropout.default" not in targets(program)


@pytest.mark.slow
def test_graphs_are_clean_and_keep_what_later_stages_read() -> None:
    model, inputs = models.build("llama")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    program = capture(model, inputs)
    nodes = list(program.graph.nodes)
    attributes = [n.target for n in nodes if n.op == "get_attr"]
    linears = [n for n in nodes if n.target is torch.ops.aten.linear.default]

    assert not [t for t in targets(program) if "assert" in t or "dropout" in t or "alias" in t]
    assert 2 * 2 * 2 == targets(program).count("aten.slice.Tensor")  # halves, q and k, layers
    assert len(attributes) == len(set(attributes))
    assert {"model.layers.1.mlp.down_proj.weight", "model.rotary_emb.inv_freq"} <= set(attributes)
    assert all(n.users or n.op in ("placeholder", "output") for n in nodes)
    assert all("val" in n.meta for n in nodes if n.op != "output")
    assert all(n.meta["nn_module_stack"] and n.meta["stack_trace"] for n in linears)


@pytest.mark.slow
def test_meta_models_give_the_same_graph_that_runs_after_retarget() -> None:
    model, inputs = models.build("llama", num_hidden_layers=1)
    expected = capture(model, inputs)
    whole, _ = models.build("llama", num_hidden_layers=1)
    program = capture(model.to("meta"), {n: _on_meta(v) for n, v in inputs.items()})
    retarget_graph(program.graph, torch.device("cpu"))

    assert targets(expected) == [t for t in targets(program) if "contiguous" not in t]
    assert "meta" not in str(program.graph)
    assert_runs_at(whole, program, inputs)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if torch.is_tensor(value) else value


@pytest.mark.slow
def test_tied_parameters_go_by_their_first_name() -> None:
    model, inputs = models.build("gpt2", n_layer=1)
    program = capture(model, inputs)
    attributes = {n.target for n in program.graph.nodes if n.op == "get_attr"}

    assert {"lm_head.weight": "transformer.wte.weight"} == program.tied
    assert "transformer.wte.weight" in attributes
    assert "lm_head.weight" not in attributes


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model, inputs = models.build("mixtral", num_hidden_layers=1)
    model.train()

    def state() -> dict[str, Any]:
        tensors = {n: t.detach().clone() for n, t in model.state_dict().items()}
        modes = {n: (m.training, set(vars(m)), _hooks(m)) for n, m in model.named_modules()}
        kept = {n: id(t) for n, t in model.named_parameters()}
        return tensors | {"modes": (modes, kept)}

    before = state()
    modes = before.pop("modes")
    given = {n: v.clone() if torch.is_tensor(v) else v for n, v in inputs.items()}
    capture(model, inputs)
    after = state()

    assert modes == after.pop("modes")
    assert_same(before, after)
    assert_same(given, inputs)
    assert "_dynamo_dynamic_indices" not in vars(inputs["input_ids"])


def _hooks(module: nn.Module) -> list[int]:
    return [len(v) for n, v in vars(module).items() if n.endswith("_hooks")]


class Awkward(nn.Module):
    """Positional-only and nested inputs, any keyword, constants, a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.plain = torch.arange(8.0)

    def forward(
        self, x: torch.Tensor, /, pair: Any, scale: float = 1.0, none: Any = None, **more: Any
    ) -> dict[str, Any]:
        with torch.no_grad():
            frozen = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = frozen + self.linear(x) * scale + pair[0] - pair[1]["z"]
        return {"y": y + self.plain + torch.tensor(0.5), "none": none, "more": more["extra"] * 2}


def awkward_inputs() -> dict[str, Any]:
    x = torch.randn(2, 6, 8)
    pair = (torch.randn(2, 6, 8), {"z": torch.randn(2, 6, 8)})
    return {"scale": 3.0, "extra": torch.randn(2, 6), "pair": pair, "x": x, "none": None}


def test_awkward_signatures() -> None:
    inputs = awkward_inputs()
    model = Awkward().eval()
    program = capture(model, inputs)
    expected = model(inputs.pop("x"), **inputs)
    actual = models.run_program(model, program, awkward_inputs() | inputs | {"x": expected["y"]})
    rerun = model(expected["y"], **inputs)

    assert ("x", "pair.0", "pair.1", "extra") == program.inputs
    assert {"scale": 3.0} == program.constants
    assert 2 == len(program.lifted)
    assert all(name.startswith("_const_") and len(name) == 19 for name in program.lifted)
    assert_same(rerun, actual)


def test_regions_without_gradients_stay_so() -> None:
    inputs = awkward_inputs()
    model = Awkward()
    program = capture(model, inputs, gradients=True)
    models.run_program(model, program, inputs)["y"].sum().backward()
    actual = model.linear.bias.grad

    assert torch.full((8,), 3.0 * 12).equal(actual)  # 4 · 12 if the frozen half counted


class Unrolled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, i] * i for i in range(x.shape[1])], 1)


def test_falls_back_to_a_fixed_sequence() -> None:
    program = capture(Unrolled(), {"x": torch.randn(2, 6, 8)})

    assert not program.dynamic
    assert "specialized it to be a constant" in program.reason
    assert {"x": (0, 1)} == program.data_dims
    assert find_broken_guard(program, {"x": torch.randn(5, 6, 8)}) is None
    broken = find_broken_guard(program, {"x": torch.randn(2, 7, 8)})
    assert Guard("L['x'].size()[1] == 6") == broken


class Limited(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * 2 + mask if x.shape[1] <= 100 else x


def test_guards_name_the_input_they_are_about() -> None:
    good = {"x": torch.ones(2, 6, 8), "mask": torch.ones(2, 6, 8)}
    program = capture(Limited(), good)
    longer = {n: torch.ones(2, 101, 8) for n in good}
    unequal = good | {"mask": torch.ones(2, 5, 8)}
    typed = good | {"mask": torch.ones(2, 6, 8, dtype=torch.int64)}

    assert find_broken_guard(program, good) is None
    assert Guard("L['x'].size()[1] <= 100") == find_broken_guard(program, longer)
    assert "L['mask'].size()[1]" in str(find_broken_guard(program, unequal))
    assert Guard("L['mask'].dtype == torch.float32") == find_broken_guard(program, typed)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return x + 1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.count


class Casts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.transpose(-1, -2)


BAD = [
    (
        Branches(),
        {"x": torch.ones(2, 3)},
        r"Branches \(.*test_capture.py:\d+, in forward: if x.sum",
    ),
    (Branches(), {"x": torch.ones(2, 3)}, "Could not guard on data-dependent expression"),
    (Counts(), {"x": torch.ones(2, 3)}, "writes to 'count'"),
    (Casts(), {"x": torch.ones(2, 3, 4)}, r"test_capture.py.*wrap_with_autocast"),
    (Limited(), {"x": torch.ones(2), "mak": torch.ones(2)}, "'mak', only 'x', 'mask'.*mean 'mask'"),
    (Limited(), {"x": torch.ones(2)}, "needs 'mask', but the inputs are 'x'"),
]


@pytest.mark.parametrize(("model", "inputs", "message"), BAD)
def test_errors_say_where_what_and_what_to_do(
    model: nn.Module, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, inputs)


def test_failures_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(Branches(), {"x": torch.ones(2, 3)})

    assert ("", "") == tuple(capfd.readouterr())


class Joins(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[:, :, :1]], 1)  # sizes that no tensor can have: torch logs it


@pytest.mark.slow
def test_what_torch_logs_of_a_failure_is_seen_only_on_demand(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    ours = logging.getLogger("autotp")
    before = ours.level
    said: list[bool] = []
    for level, variable in ((before, ""), (logging.DEBUG, ""), (before, "export")):
        caplog.clear()
        ours.setLevel(level)
        monkeypatch.setenv("TORCH_LOGS", variable)
        with pytest.raises(CaptureError, match="Sizes of tensors must match"):
            capture(Joins(), {"x": torch.ones(2, 3, 4)})
        said.append("failed while attempting to run meta" in caplog.text)
    ours.setLevel(before)
    logger.removeHandler(caplog.handler)

    assert [False, True, True] == said


@pytest.mark.slow
def test_needs_no_transformers() -> None:
    code = "import sys, autotp.capture.capture; print('transformers' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "False\n" == shown.stdout
