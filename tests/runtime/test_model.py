import ast
import copy
import inspect
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.capture.capture import capture
from autotp.capture.program import Guard
from autotp.errors import CaptureError, PlanError, WeightsError
from autotp.lower.outline import outline
from autotp.runtime.codegen.tidy import name_device, tidy_code, wrap_lines
from autotp.runtime.group.process_group import Group
from autotp.runtime.layer import Layer
from autotp.runtime.model import ShardedModel, add_variant
from autotp.runtime.module_tree import build_tree
from tests import models
from tests.hand_made import capture_nothing
from tests.plans import decoder_plan

CPU = torch.device("cpu")
ALONE = Group("tp", 1, 0, CPU)


def build(
    model: nn.Module, *, training: bool = True, guards: tuple[Guard, ...] = ()
) -> ShardedModel:
    """A "sharded" model of one rank, whose graphs are the captured ones."""
    plan = decoder_plan(1, 1, training)

    def capture_again(sharded: ShardedModel, inputs: Mapping[str, Any]) -> None:
        program = replace(capture(model.train(sharded.training), inputs), guards=guards)
        add_variant(sharded, sharded.key(**inputs), program, outline(program.graph), plan)

    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    return build_tree(
        model,
        tensors,
        plan=plan,
        group=ALONE,
        device=CPU,
        source=model,
        capture_variant=capture_again,
    )


def hand(**keywords: Any) -> tuple[nn.Module, ShardedModel, torch.Tensor]:
    model, inputs = models.build(models.HAND)
    return model, build(model, **keywords), inputs["ids"]


def calls(name: str, inputs: Mapping[str, Any]) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Kinds of call, each with its mode, at sizes that the captures were not made at."""
    ids = inputs["input_ids"]
    labels = inputs.get("decoder_input_ids", ids).clone()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    yield True, {**inputs, "labels": labels}
    yield False, {**inputs, "attention_mask": padded}
    yield True, {**inputs, "labels": labels[:1], **_first_row(inputs)}
    if name in ("llama", "gpt2"):
        yield False, {**inputs, "labels": labels}
        yield False, {**inputs, "logits_to_keep": 1}
        yield True, {**inputs, "labels": labels}


def _first_row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v[:1] for n, v in inputs.items() if isinstance(v, torch.Tensor)}


def assert_same(expected: Any, actual: Any) -> None:
    one, other = pytree.tree_leaves(expected), pytree.tree_leaves(actual)

    assert type(expected) is type(actual)
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def called(model: nn.Module, training: bool, inputs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The output and, in training, every parameter's gradient; dropout drawn from one seed."""
    torch.manual_seed(0)
    output = model.train(training)(**inputs)
    if not training:
        return output, []
    model.zero_grad()
    output.loss.backward()
    return output, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_equals_the_model_in_every_variant(name: str) -> None:
    model, inputs = models.build(name)
    tree = build(model)
    for training, given in calls(name, inputs):
        expected, wanted = called(model, training, given)
        actual, found = called(tree, training, given)

        assert_same(expected, actual)
        assert_same(wanted, found)

    functions = {
        f for m in tree.modules() if isinstance(m, Layer) for f in m.sharded_functions.values()
    }
    dropping = name in ("gpt2", "bert")  # their eval code is another
    assert {"t5": 8}.get(name, 2 if dropping else 1) == len(functions)


@pytest.mark.parametrize("tie", [False, True])
def test_the_tree_is_the_models(tie: bool) -> None:
    model, _ = models.build("llama", tie_word_embeddings=tie)
    tree = build(model)

    assert list(model.state_dict()) == list(tree.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in tree.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in tree.named_buffers()]
    assert (tree.lm_head.weight is tree.model.embed_tokens.weight) == tie
    assert isinstance(tree, type(model))
    assert type(model).__name__ == type(tree).__name__
    assert inspect.signature(model.forward) == inspect.signature(tree.forward)
    assert model.config.to_dict() == tree.config.to_dict()


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that ops make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in pytree.tree_leaves(args) if _is(a)}
        made = [t for t in pytree.tree_leaves(result) if _is(t)]
        new = [t for t in made if t.untyped_storage().data_ptr() not in known]
        self.bytes += sum(t.untyped_storage().nbytes() for t in new)
        return result


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def test_building_copies_buffers_and_no_parameter() -> None:
    model, _ = models.build("llama")
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Allocations() as allocations:
        tree = build_tree(
            model,
            tensors,
            plan=decoder_plan(1, 1),
            group=ALONE,
            device=CPU,
            source=model,
            capture_variant=capture_nothing,
        )

    assert sum(b.nbytes for b in model.buffers()) == allocations.bytes
    assert all(p.data_ptr() == tensors[name].data_ptr() for name, p in tree.named_parameters())


def test_no_storage_is_shared_with_the_model() -> None:
    model, _ = models.build("llama")
    tree = build_tree(
        model,
        {name: p.detach() for name, p in model.named_parameters()},
        plan=decoder_plan(1, 1),
        group=ALONE,
        device=CPU,
        source=model,
        capture_variant=capture_nothing,
    )
    own = {t.data_ptr() for t in (*tree.parameters(), *tree.buffers())}

    assert set() == own & {t.data_ptr() for t in (*model.parameters(), *model.buffers())}


def test_a_missing_parameter_and_a_buffer_without_values_are_named() -> None:
    model, _ = models.build("llama")
    keywords: dict[str, Any] = {
        "plan": decoder_plan(1, 1),
        "group": ALONE,
        "device": CPU,
        "source": model,
        "capture_variant": capture_nothing,
    }
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    del tensors["model.norm.weight"]

    with pytest.raises(
        WeightsError, match="model.norm.weight: the 20 local tensors do not include it"
    ):
        build_tree(model, tensors, **keywords)
    with pytest.raises(WeightsError, match=r"inv_freq: a buffer of \(4,\) on the meta device"):
        build_tree(model.to("meta"), dict(model.named_parameters()), **keywords)


@pytest.mark.slow
def test_variants_are_captured_once_and_listed() -> None:
    model, tree, ids = hand()
    tree.eval().prepare(ids=ids)
    with torch.no_grad():
        expected, actual = model(ids[:1, :1]), tree(ids[:1, :1])
    tree.train()(ids=ids)

    assert ["ids · eval", "ids · train"] == list(tree.plans)
    assert "ids · train" == tree.key(ids)
    assert tree.plan is tree.plans["ids · eval"]
    assert_same(expected, actual)


@pytest.mark.slow
def test_identical_layers_run_one_function() -> None:
    _, tree, ids = hand()
    tree(ids)
    functions = {
        f for m in tree.modules() if isinstance(m, Layer) for f in m.sharded_functions.values()
    }

    assert 2 == sum(isinstance(m, Layer) for m in tree.modules())
    assert 1 == len(functions)
    assert type(tree.blocks[0]) is type(tree.blocks[1])


@pytest.mark.slow
def test_a_broken_guard_asks_for_another_variant() -> None:
    guard = Guard("L['ids'].size()[1] <= 12")
    _, tree, ids = hand(guards=(guard,))
    tree.eval().prepare(ids)
    tree.prepare(ids[:, :5])

    assert ["ids · eval"] == list(tree.plans)
    with pytest.raises(CaptureError, match="captured at these sizes has guards that exclude them"):
        tree.prepare(torch.cat([ids, ids], 1))
    assert ["ids · eval", "ids · eval (2)"] == list(tree.plans)


def test_inputs_that_change_nothing_are_dropped() -> None:
    model, _ = models.build("llama")
    tree = build(model)
    ids = torch.ones(1, 2)

    assert "input_ids · eval" == tree.key(ids, labels=None, use_cache=False, logits_to_keep=0)
    assert "input_ids, logits_to_keep=1 · eval" == tree.key(input_ids=ids, logits_to_keep=1)
    assert "input_ids, use_cache=True · eval" == tree.key(ids, use_cache=True)


def test_modes_set_by_hand_after_train_are_seen() -> None:
    _, tree, ids = hand()
    tree.eval()
    assert tree.key(ids).endswith("eval")
    tree.train()
    for module in tree.modules():
        module.training = False

    assert tree.key(ids).endswith("eval")


def test_wrong_calls_say_what_is_wrong() -> None:
    _, tree, ids = hand()

    with pytest.raises(CaptureError, match="does not take 'input_ids', only ids. Leave it out"):
        tree(input_ids=ids)
    with pytest.raises(CaptureError, match="'ids' is given twice"):
        tree(ids, ids=ids)
    with pytest.raises(CaptureError, match="2 positional arguments, but its forward takes 1"):
        tree(ids, ids)
    with pytest.raises(
        CaptureError, match="the input 'ids' is of type object. A graph takes tensors"
    ):
        tree(object())


@pytest.mark.slow
def test_a_plan_without_training_refuses_gradients() -> None:
    model, tree, ids = hand(training=False)

    assert not any(p.requires_grad for p in tree.parameters())
    with pytest.raises(PlanError, match=r"train\(\) was called, but the plan has no backward"):
        tree.train()
    with pytest.raises(PlanError, match="the input 'ids' requires a gradient"):
        tree(ids=torch.ones(1, 2, requires_grad=True))
    with pytest.raises(PlanError, match="the input 'ids' requires a gradient"):
        tree(ids={"nested": [torch.ones(1, 2, requires_grad=True)]})
    with pytest.raises(PlanError, match=r"requires_grad_\(\) was called"):
        tree.requires_grad_()
    assert_same(model(ids), tree(ids))
    next(tree.parameters()).requires_grad_()
    with pytest.raises(RuntimeError, match="does not require grad"):
        tree(ids).sum().backward()


def test_frozen_parameters_stay_frozen() -> None:
    model, _ = models.build(models.HAND)
    model.words.requires_grad_(False)
    tree = build(model)

    assert [False, True] == [tree.words.weight.requires_grad, tree.places.weight.requires_grad]


@pytest.mark.slow
def test_a_layer_runs_and_changes_mode_only_with_the_whole_model() -> None:
    _, tree, ids = hand()
    tree(ids)

    with pytest.raises(PlanError, match="HandBlock: a layer of a sharded model runs only inside"):
        tree.blocks[0](torch.ones(1, 2, models.HIDDEN))
    with pytest.raises(PlanError, match=r"train\(\) on one layer of a sharded model"):
        tree.blocks.train()
    assert tree.train().blocks[0].training


@pytest.mark.slow
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda m: m.to("meta")])
def test_dtype_and_device_stay(change: Any) -> None:
    _, tree, ids = hand()
    expected = tree(ids)

    with pytest.raises(PlanError, match="torch.float32 on cpu, like the generated code"):
        change(tree)
    assert_same(expected, tree.to(torch.float32).to("cpu")(ids))


@pytest.mark.slow
def test_a_deep_copy_runs_with_parameters_of_its_own() -> None:
    model, tree, ids = hand()
    tree(ids)
    twin = copy.deepcopy(tree)
    with torch.no_grad():
        twin.norm.bias.add_(1)
    twin.train().prepare(ids)

    assert_same(model(ids), tree(ids))
    assert not torch.equal(model(ids), twin.eval()(ids))
    assert (["ids · eval"], 2) == (list(tree.plans), len(twin.plans))


def test_pickling_is_refused_with_the_reason() -> None:
    _, tree, _ = hand()

    with pytest.raises(PlanError, match="cannot be pickled.*state_dict"):
        pickle.dumps(tree)
    with pytest.raises(PlanError, match="is sharded already"):
        build(tree)


@pytest.mark.slow
def test_a_view_shares_parameters_and_returns_the_models_type() -> None:
    model, inputs = models.build("llama")
    tree = build(model)
    tree.prepare(**inputs)
    view = tree.graph_module
    ids = inputs["input_ids"]

    assert {p.data_ptr() for p in tree.parameters()} == {p.data_ptr() for p in view.parameters()}
    assert list(tree.state_dict()) == list(view.state_dict())
    assert_same(model(ids, use_cache=False), view(input_ids=ids))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch, copying its own pytree specs
        twin = copy.deepcopy(view)
    assert_same(model(ids, use_cache=False), twin(input_ids=ids))
    assert 'getattr(self.model.layers, "1")(' in view.print_readable(print_output=False)
    with pytest.raises(
        PlanError, match="there is no variant 'x'. Captured so far: input_ids · eval"
    ):
        tree.view("x")


@pytest.mark.slow
def test_the_code_is_a_python_module_with_each_distinct_layer_once() -> None:
    model, tree, ids = hand()
    tree(ids)
    code = tree.code()
    module = ModuleType("graph")
    exec(compile(code, "graph.py", "exec"), module.__dict__)
    (actual,) = module.forward(tree, ids)
    functions = [n.name for n in ast.parse(code).body if isinstance(n, ast.FunctionDef)]

    assert ["forward", "layer_0"] == functions
    assert "# blocks.0, blocks.1\ndef layer_0(self, x0):\n    # x0 (b, s, 64)\n" in code
    assert "up = torch.ops.aten.linear.default(norm2, self.up.weight, self.up.bias)" in code
    assert "# b = ids.shape[0]\n# s = ids.shape[1]\n" in code
    assert "    # attention\n    query = " in code
    assert_same(model(ids), actual)


def test_the_code_is_written_as_people_write_it() -> None:
    value = "torch.ops.aten.slice.Tensor(x, 1, 4, 9223372036854775807)"
    stepped = "f(x, 0, 0, 9223372036854775807, 2, device = device(type='cpu'))"

    assert "torch.ops.aten.slice.Tensor(x, 1, 4)" == tidy_code(value)
    assert "f(x, 0, 0, None, 2, device=device(type='cpu'))" == tidy_code(stepped)
    assert "    y = f(x)  # (b, 4)" == wrap_lines("y", "f(x)", "(b, 4)")


def test_a_long_line_is_wrapped_and_means_the_same() -> None:
    call = f"f({', '.join(['self.weight'] * 9)}, 'tp')"
    written = wrap_lines("y", call, "(b)")

    assert 100 >= max(map(len, written.splitlines()))
    assert ast.dump(ast.parse(f"y = {call}")) == ast.dump(ast.parse(written.strip()))


def test_the_code_names_its_device_once() -> None:
    text = "f(device=device(type='cuda', index=1))\ng(device(type='cuda', index=1))"
    code, line = name_device(text)

    assert "f(device=DEVICE)\ng(DEVICE)" == code
    assert 'DEVICE = torch.device("cuda:1" if torch.cuda.is_available() else "cpu")' == line
    assert 'DEVICE = torch.device("cpu")' == name_device("f(device(type='cpu'))")[1]
    assert ("f(x)", "") == name_device("f(x)")


@pytest.mark.slow
def test_hooks_of_layers_run_once_a_call() -> None:
    model, inputs = models.build(models.HAND)
    seen: list[str] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append("own"))
    tree = build(model)
    tree.prepare(**inputs)
    tree.blocks[0].register_forward_hook(lambda *_: seen.append("new"))
    seen.clear()
    tree(**inputs)

    assert ["new", "own"] == seen


@pytest.mark.slow
def test_recomputation_in_backward_finds_the_code_of_its_forward() -> None:
    model, inputs = models.build("gpt2")
    labels = inputs["input_ids"].clone()
    tree = build(model)
    _, expected = called(tree, True, {**inputs, "labels": labels})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers call it otherwise
        tree.gradient_checkpointing_enable()
    torch.manual_seed(0)
    loss = tree.train()(**inputs, labels=labels).loss
    tree.eval()(**inputs)
    tree.zero_grad()
    loss.backward()

    assert_same(expected, [p.grad for p in tree.parameters()])


@pytest.mark.slow
def test_compiles_as_one_graph_a_variant() -> None:
    model, tree, ids = hand(guards=(Guard("L['ids'].size()[1] <= 64"),))
    tree.eval().prepare(ids)
    compiled = torch.compile(tree, fullgraph=True, dynamic=True, backend="aot_eager")

    assert_same(model(ids), compiled(ids))
    assert_same(model(ids[:, :7].contiguous()), compiled(ids[:, :7].contiguous()))
    with pytest.raises(Exception, match=r"Call prepare\(\*\*inputs\) before compiling"):
        compiled(ids.repeat(1, 6))
