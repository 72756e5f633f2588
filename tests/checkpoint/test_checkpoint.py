"""Checkpoints in one process: what is read, what it is made of, what is written."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel

import autotp
from autotp.checkpoint import save_map
from autotp.checkpoint.atomic_write import METADATA, append_tensor, begin_file
from autotp.checkpoint.directory import Checkpoint
from autotp.checkpoint.empty_model import fill_buffers
from autotp.checkpoint.recipe import Recipes
from autotp.checkpoint.safetensors_format import DTYPES, Entry, encode_header, lay_out_tensors
from autotp.checkpoint.stored_tensor import fill_tensor, make_full_box, measure_box
from autotp.cli import main as cli
from autotp.cli import shard_merge
from autotp.errors import PlanError, WeightsError
from tests.checkpoints import FAULTS, IDS, edited, model, saved


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint that tests only read."""
    directory = tmp_path_factory.mktemp("llama")
    saved("llama", directory)
    return directory


# ── the layout of files ──────────────────────────────────────────────────────────────────────────


def sample() -> dict[str, torch.Tensor]:
    """A tensor of each dtype that torch can make, and odd shapes."""
    torch.manual_seed(0)
    made = {f"t.{name}": torch.zeros(3, 5, dtype=dtype) for name, dtype in DTYPES.items()}
    return {**made, "é": torch.rand(2, 3), "scalar": torch.tensor(1.5), "none": torch.empty(0, 4)}


def test_what_is_written_is_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = sample()
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=METADATA)
    entries = lay_out_tensors((n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    begin_file(tmp_path / "ours.safetensors", entries)
    for entry in entries:
        append_tensor(tmp_path / "ours.safetensors", entry, tensors[entry.name])
    ours, theirs = (tmp_path / f"{who}.safetensors" for who in ("ours", "theirs"))

    assert theirs.read_bytes() == ours.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.int8, torch.float16, torch.int64]))
    count = int(torch.tensor(shape).prod()) if shape else 1
    whole = (torch.arange(count) % 100).to(dtype).view(shape)
    cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = tuple((a, b) for a, b in cuts)
    directory = tmp_path_factory.mktemp("box")
    save_file({"other": torch.ones(3), "x": whole}, directory / "model.safetensors")
    with Checkpoint.open(directory) as checkpoint:
        out = torch.empty(measure_box(box), dtype=torch.float32)
        fill_tensor(out, checkpoint.tensors["x"], box)

    assert torch.equal(whole[tuple(slice(*span) for span in box)].float(), out)


# ── recipes ──────────────────────────────────────────────────────────────────────────────────────


def makers(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors made in all the ways that converters make them, from four of shape (6, 4)."""
    experts = torch.stack([x["a"], x["b"]], dim=0)  # (2, 6, 4)
    both = torch.cat([experts, torch.stack([x["c"], x["d"]])], dim=1)  # (2, 12, 4)
    return [
        both,
        both.transpose(1, 2).contiguous(),
        *[part.squeeze(0) for part in torch.chunk(both, 2, dim=0)],
        *torch.split(both, [5, 7], dim=1),
        *both.unbind(1)[:2],
        both[1],
        both[:, -3:],
        both.permute(2, 0, 1)[1:3, :, ::2].contiguous(),
        both.unsqueeze(1),
        x["a"].t(),
        both.reshape(2, 2, 2, 3, 4).transpose(1, 2).reshape(2, 12, 4),
        (both.reshape(-1, 2, 3, 4, 2, 2) * x["d"][:3, :2][:, None, :, None]).reshape(2, 12, 4),
        (both.to(torch.float64) - x["c"][0]).view(8, 12),  # dims that no group of dims makes
        both.view(3, 32).abs() * x["b"][0, 0],
        both.flip(1),  # no rule: run on full tensors
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_box_of_what_is_made_needs_boxes_of_its_parts(data: st.DataObject) -> None:
    torch.manual_seed(0)
    parts = {name: torch.rand(6, 4) for name in "abcd"}
    recipes = Recipes()
    hollow = {name: recipes.make_leaf(name, (6, 4), torch.float32) for name in parts}
    with recipes, torch.no_grad():
        made = makers(hollow)
    for expected, tensor in zip(makers(parts), made, strict=True):
        spans = [
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape
        ]
        box = tuple((a, b) for a, b in spans)
        found = recipes.read(tensor, box, lambda n, b: parts[n][tuple(slice(*s) for s in b)])
        recipes.forget()

        assert torch.equal(expected[tuple(slice(*span) for span in box)], found)


@pytest.mark.parametrize("how", ["writes", "takes a table"])
def test_what_cannot_be_read_back_is_reported(how: str) -> None:
    recipes = Recipes()
    leaf = recipes.make_leaf("a", (6, 4), torch.float32)
    outer = torch.empty(6, 4, device="meta")  # it has values, which the recipe does not know
    with recipes, torch.no_grad():
        assert "" == recipes.untraced
        if how == "writes":
            torch.empty(6, 4, device="meta").copy_(leaf)
        else:
            leaf * outer

    assert "aten" in recipes.untraced


def test_only_the_experts_asked_for_are_read() -> None:
    recipes = Recipes()
    hollow = {name: recipes.make_leaf(name, (6, 4), torch.float32) for name in "abcd"}
    with recipes, torch.no_grad():
        both = makers(hollow)[0]
    asked: list[tuple[str, Any]] = []

    def leaf(name: str, box: Any) -> torch.Tensor:
        asked.append((name, box))
        return torch.zeros(measure_box(box))

    recipes.read(both, ((1, 2), (4, 8), (0, 4)), leaf)

    assert ["a", "b", "c", "d"] == recipes.list_leaves(both)
    assert [("b", ((4, 6), (0, 4))), ("d", ((0, 2), (0, 4)))] == asked


# ── what a directory may hold ────────────────────────────────────────────────────────────────────


def alone(directory: Path, **options: Any) -> Any:
    return autotp.from_pretrained(directory, 1, **options)


@pytest.mark.slow
def test_a_rank_reads_its_slices_and_no_more(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (llama / "model.safetensors").stat().st_size
    read = 0
    preadv = __import__("os").preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        read += (got := preadv(*arguments))
        return got

    monkeypatch.setattr("os.preadv", counted)
    for rank in range(4):
        autotp.from_pretrained(llama, 4, rank=rank)

    assert size * 0.9 < read < size * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
def test_a_pickled_checkpoint_is_read_without_running_it(archive: bool, tmp_path: Path) -> None:
    """Also in the form that torch.save had before its files were archives."""
    whole: Any = saved("tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save(whole.state_dict(), path, _use_new_zipfile_serialization=archive)
    found = alone(tmp_path)

    assert torch.equal(whole(input_ids=IDS).logits, found(input_ids=IDS).logits)
    assert found.lm_head.weight is found.model.embed_tokens.weight

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Path("evil")}, 2))
    with pytest.raises(WeightsError, match="pytorch_model.bin: cannot be read as plain weights"):
        alone(tmp_path)


@pytest.mark.slow
def test_tied_weights_that_differ_on_disk_are_not_tied(tmp_path: Path) -> None:
    """As in Transformers, what is stored counts more than what the configuration says."""
    saved("tied", tmp_path)
    edited(
        tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.ones(64, 32)})
    )
    whole: Any = type(model("tied")).from_pretrained(tmp_path)
    found = alone(tmp_path)

    assert torch.equal(whole(input_ids=IDS).logits, found(input_ids=IDS).logits)
    assert found.lm_head.weight is not found.model.embed_tokens.weight


@pytest.mark.slow
def test_a_tie_is_known_by_either_name(tmp_path: Path) -> None:
    saved("tied", tmp_path)
    name = "model.embed_tokens.weight"
    edited(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": t.pop(name)}))
    whole: Any = type(model("tied")).from_pretrained(tmp_path)

    assert torch.equal(whole(input_ids=IDS).logits, alone(tmp_path)(input_ids=IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float16"])
def test_the_dtype_is_the_one_asked_for(dtype: Any, llama: Path) -> None:
    found = alone(llama, dtype=dtype)
    expected = torch.float32 if dtype is None else getattr(torch, str(dtype).split(".")[-1])
    stored = load_file(llama / "model.safetensors")

    assert found.config.dtype == expected
    assert all(torch.equal(stored[n].to(expected), p) for n, p in found.named_parameters())
    assert found.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.slow
def test_extra_tensors_can_be_left_unread(tmp_path: Path) -> None:
    whole: Any = saved("llama", tmp_path)
    FAULTS["extra"][0](tmp_path)
    found = alone(tmp_path, allow_extra=True)

    assert torch.equal(whole(input_ids=IDS).logits, found(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "dtype='int8': weights cannot be of it"),
        ({"overrides": {"*.none": "row"}}, "none"),
        ({"trust_remotecode": True}, "option 'trust_remotecode': is unknown"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], said: str, llama: Path) -> None:
    with pytest.raises(PlanError, match=said):
        alone(llama, **options)


@pytest.mark.slow
def test_code_of_others_is_run_only_when_trusted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "nobodys", "architectures": ["Nobodys"]})
    )
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        PlanError, match="Pass trust_remote_code=True if the directory has its own code"
    ):
        alone(tmp_path)


class Careless(BertModel):
    """A model with a table that no initialisation fills."""

    def __init__(self, config: BertConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.ones(4, dtype=dtype), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_a_buffer_without_values_is_named(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        careless = Careless(BertConfig(num_hidden_layers=1, hidden_size=24, vocab_size=8), dtype)
    with pytest.raises(WeightsError, match=r"buffer table \[4\] of Careless: none of its values"):
        fill_buffers(careless, {})


class Careful(Careless):
    """The same, whose initialisation fills it with zeros."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.get_buffer("table").zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_a_buffer_of_zeros_has_values(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        careful = Careful(BertConfig(num_hidden_layers=1, hidden_size=24, vocab_size=8), dtype)
    fill_buffers(careful, {})

    assert careful.get_buffer("table").tolist() == [0] * 4


class Coded(nn.Module):
    """Weights as integers with their scale, as parameters that cannot be trained."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-9, 9, (8, 16), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes.to(x.dtype) * self.scale).t()


def test_a_parameter_of_integers_stays_one() -> None:
    torch.manual_seed(0)
    coded, x = Coded(), torch.rand(2, 3, 16)
    part = autotp.parallelize(coded, 2, rank=0, example_inputs={"x": x}, training=True)

    assert torch.int8 == part.codes.dtype
    assert not part.codes.requires_grad
    assert autotp.verify(coded, 2, example_inputs={"x": x}).ok


# ── shard and merge ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_checkpoint_that_is_sharded_and_merged_is_the_same(tmp_path: Path) -> None:
    source, parts, whole = (tmp_path / name for name in ("source", "parts", "whole"))
    saved("mixtral", source)
    (source / "tokenizer.json").write_text("{}")

    assert 0 == cli.main(["shard", str(source), str(parts), "--tp", "3"])
    assert 0 == cli.main(["merge", str(parts), str(whole)])
    assert {p.name: p.read_bytes() for p in source.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }

    for rank in range(3):
        mine = autotp.from_pretrained(parts, 3, rank=rank)
        theirs = autotp.from_pretrained(source, 3, rank=rank)
        assert theirs.plan.hash == mine.plan.hash
        assert all(
            torch.equal(p, mine.get_parameter(name)) for name, p in theirs.named_parameters()
        )

    with pytest.raises(
        PlanError, match="was written for tp 3, but tp is 2. Merge it first, with autotp mer"
    ):
        autotp.from_pretrained(parts, 2, rank=0)
    with pytest.raises(
        PlanError, match="was sharded by the plan in it, but overrides= requests anot"
    ):
        autotp.from_pretrained(parts, 3, rank=0, overrides={"*": "replicated"})


class Killed(BaseException):
    """Ends a conversion."""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["shard", "merge"])
def test_files_appear_when_all_are_complete(
    command: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    runs = {
        "shard": (parts, shard_merge, lambda: shard_merge.shard_checkpoint(llama, parts, 2)),
        "merge": (whole, save_map, lambda: shard_merge.merge_checkpoint(parts, whole)),
    }
    if command == "merge":
        runs["shard"][2]()
    target, module, run = runs[command]
    written = 0

    def killed(path: Path, entry: Entry, tensor: torch.Tensor) -> None:
        nonlocal written
        written += 1
        if written == 20:
            raise Killed
        append_tensor(path, entry, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(module, "append_tensor", killed)
        with pytest.raises(Killed):
            run()
    assert not target.exists()

    left = target / ".saving-by-a-process-that-was-killed"
    left.mkdir(parents=True)
    run()
    assert not left.exists()
    with pytest.raises(PlanError, match=r"has \d files of weights already"):
        run()


@pytest.mark.slow
def test_a_file_that_is_truncated_or_missing_is_refused(llama: Path, tmp_path: Path) -> None:
    shard_merge.shard_checkpoint(llama, tmp_path / "parts", 2)
    file = tmp_path / "parts" / "rank-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"rank-00001-of-00002.safetensors: has \d+ bytes, but"):
        autotp.from_pretrained(tmp_path / "parts", 2, rank=1)
    with pytest.raises(WeightsError, match=r"rank-00001-of-00002.safetensors: has \d+ bytes, but"):
        shard_merge.merge_checkpoint(tmp_path / "parts", tmp_path / "whole")
    file.unlink()
    with pytest.raises(WeightsError, match="does not exist, but has the shards of rank 1"):
        autotp.from_pretrained(tmp_path / "parts", 2, rank=1)


def test_a_header_is_padded_as_the_library_does() -> None:
    header = encode_header(lay_out_tensors([("x", torch.float32, (2,))]), METADATA)

    assert 0 == len(header) % 8
    assert len(header) == 8 + int.from_bytes(header[:8], "little")
    assert make_full_box((2, 3)) == ((0, 2), (0, 3))
