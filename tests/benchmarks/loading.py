"""What loading costs a rank in memory, and all ranks in bytes read: a checkpoint made for it.

    python tests/benchmarks/loading.py --tp 2 4
    python tests/benchmarks/loading.py --tp 4 --batch 2 --no-mask    # a graph more is captured
    python tests/benchmarks/loading.py --tp 4 --new-tokens 8         # two graphs more

A random model of 620 MiB is written to a temporary directory, then loaded by processes over gloo.
Each first warms up: classes imported, one tiny model loaded from disk and called. From there on
everything counts that is resident and not shared: anonymous pages, and pages of mapped files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

MB = 1 << 20
LARGE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 10,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}


def write(directory: Path, sizes: dict[str, int], dtype: torch.dtype) -> int:
    """Writes a random model of these sizes; the bytes of its weights' file."""
    config = LlamaConfig(**sizes, max_position_embeddings=512, tie_word_embeddings=False)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
    return (directory / "model.safetensors").stat().st_size


def resident() -> dict[str, int]:
    """Bytes that are resident: of this process alone, and of files that it has mapped."""
    fields = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {row.split(":")[0]: int(row.split()[1]) * 1024 for row in fields}
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(row.split()[1]) * 1024 for row in status if row.startswith("VmHWM"))
    return {"anonymous": found["Anonymous"], "all": found["Rss"], "peak": peak}


def bytes_read() -> int:
    """Bytes that this process has read from files so far, by system calls."""
    rows = Path("/proc/self/io").read_text().splitlines()
    return int(next(row.split()[1] for row in rows if row.startswith("rchar")))


def rank_figures(
    directory: Path, warm: Path, tp: int, *, batch: int = 1, mask: bool = True, words: int = 0
) -> dict[str, Any]:
    """What one rank measured of itself, after a forward, and generating `words` words."""
    torch.set_num_threads(1)
    ids = torch.arange(16 * batch).view(batch, 16)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    autotp.from_pretrained(warm, tp)(**inputs)
    if not mask:
        del inputs["attention_mask"]
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start, read, began = resident(), bytes_read(), time.monotonic()
    model = autotp.from_pretrained(directory, tp)
    read, took = bytes_read() - read, time.monotonic() - began
    logits = model(**inputs).logits
    if words:
        model.generate(**inputs, max_new_tokens=words, do_sample=False, pad_token_id=0)
    end = resident()
    shards = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "rank": dist.get_rank(),
        "shards": shards,
        "read": read,
        "seconds": took,
        "sum": float(logits.double().sum()),
        **{name: end[name] - start["all" if name == "peak" else name] for name in end},
    }


def figures(
    directory: Path, warm: Path, tp: int, *more: str, timeout: float = 500
) -> list[dict[str, Any]]:
    """What each of `tp` ranks measured, each in a process of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    arguments = ["--directory", str(directory), "--warm", str(warm), "--tp", str(tp), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as found:
        done = subprocess.run(
            [*command, str(tp), str(Path(__file__).resolve()), *arguments, "--figures", found],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=environment,
        )
        rows = [json.loads(path.read_text()) for path in sorted(Path(found).iterdir())]
    if len(rows) != tp:
        raise RuntimeError(f"{len(rows)} of {tp} ranks answered:\n{done.stderr[-4000:]}")
    return rows


def table(rows: list[dict[str, Any]], size: int) -> str:
    """The figures as text, a line a rank."""
    lines = [
        f"rank {row['rank']} of {len(rows)}: shards {row['shards'] / MB:.1f} MiB; grew by "
        f"{row['all'] / MB:.1f} MiB ({row['all'] / row['shards']:.3f} x), anonymous "
        f"{row['anonymous'] / MB:.1f}, peak {row['peak'] / MB:.1f} "
        f"({row['peak'] / row['shards']:.3f} x); read {row['read'] / MB:.1f} MiB in "
        f"{row['seconds']:.1f} s"
        for row in rows
    ]
    read = sum(row["read"] for row in rows)
    lines.append(f"all ranks read {read / MB:.1f} MiB: {read / size:.3f} x the file")
    return "\n".join(lines)


def main() -> None:
    """Either the whole benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--no-mask", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--warm", type=Path)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    if options.directory:
        row = rank_figures(
            options.directory,
            options.warm,
            options.tp[0],
            batch=options.batch,
            mask=not options.no_mask,
            words=options.new_tokens,
        )
        (options.figures / f"{row['rank']}.json").write_text(json.dumps(row))
        return
    with tempfile.TemporaryDirectory(prefix="autotp-loading-") as folder:
        large, warm = Path(folder, "large"), Path(folder, "warm")
        size = write(large, LARGE, getattr(torch, options.dtype))
        write(warm, TINY, getattr(torch, options.dtype))
        print(f"the file has {size / MB:.1f} MiB")
        more = ["--batch", str(options.batch), "--new-tokens", str(options.new_tokens)]
        more += ["--no-mask"] if options.no_mask else []
        for tp in options.tp:
            print(table(figures(large, warm, tp, *more, timeout=1500), size), flush=True)


if __name__ == "__main__":
    main()
