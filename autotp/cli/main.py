"""The command line: `autotp plan`, `dry-run`, `verify`, `rules`, `shard`, `merge`, `generate`.

    autotp plan ./my-model --tp 8
    autotp verify ./my-model --tp 2,4 --training

Exit codes: 0 for success, 1 for a wrong or impossible result, 2 for misuse: an argument is wrong,
or names something that does not exist.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from argparse import Namespace
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from autotp import api
from autotp.capture.inputs import find_longest_input, make_example_inputs
from autotp.cli import shard_merge
from autotp.cli.arguments import parse_arguments
from autotp.cli.generate import GenerationRequest, check_request, generate_text
from autotp.cli.random_weights import materialize
from autotp.errors import AutotpError, PlanError
from autotp.model_source import import_user_module, load_with_inputs
from autotp.oprules import rulebook
from autotp.options import read_request
from autotp.planner.layouts import check_layout
from autotp.records.evidence import Evidence
from autotp.records.json_record import encode
from autotp.records.plan import Plan
from autotp.report.evidence import render_evidence
from autotp.report.plan import format_plan, render_plan
from autotp.report.rules import render_rules, render_verdicts
from autotp.report.terminal import print_to_terminal
from autotp.verification.rules.check import check_rules

_FACTORY = "Let the factory return (module, inputs), a tuple with a mapping of inputs."
_GRACE = 15  # seconds, of the 30 after which torchrun kills
_SHORT = 16  # tokens of a comparison, unless --sequence is given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: those of the process); return its exit code."""
    options = parse_arguments(arguments)

    logger = logging.getLogger("autotp")
    before = logger.level
    if options.debug:
        logger.setLevel(logging.DEBUG)  # shows also what torch logs of a capture
    try:
        return _run_command(options)
    finally:
        logger.setLevel(before)


def _run_command(options: Namespace) -> int:
    try:
        with _report_misuse():
            _check_options(options)
        return _COMMANDS[options.command](options)
    except _MisuseError as error:
        return _report_failure(str(error), options, 2)
    except AutotpError as error:
        return _report_failure(str(error), options)
    except BrokenPipeError:
        # the reader has stopped reading; the rest of the buffer must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  a bug in autotp is one message too
        kind = type(error).__name__
        return _report_failure(f"unexpected {kind}: {error} (--debug shows where)", options)


class _MisuseError(AutotpError):
    """An argument names something that does not exist, or cannot be read or written."""


@contextmanager
def _report_misuse() -> Generator[None]:
    """Turn errors of the block into errors of misuse."""
    try:
        yield
    except AutotpError as error:
        raise _MisuseError(str(error)) from error


def _check_options(options: Namespace) -> None:
    """Check the options before the model is built and captured, which takes minutes."""
    if options.json not in (None, "-"):
        _check_directory(Path(options.json).absolute().parent, "--json")
    read_request(**_select_options(options, "reduce_dtype", "machine"))
    if options.command != "rules":  # which accepts directories too
        read_request(rules=options.rules)
    if options.command in ("rules", "shard", "merge", "generate"):
        return
    for glob, layout in options.override:
        check_layout(glob, layout)
    if options.command == "dry-run":
        output = Path(options.output).absolute()
        there = next(path for path in (output, *output.parents) if path.exists())
        _check_directory(there, "-o")  # the rest of the path is made in it
        if options.rank >= options.tp:
            raise PlanError(
                f"--rank {options.rank}: the ranks of --tp {options.tp} are 0 to {options.tp - 1}."
            )


def _check_directory(directory: Path, option: str) -> None:
    """Raise PlanError for a directory that does not exist, or cannot be written to."""
    if not directory.is_dir():
        raise PlanError(f"{option}: {directory} is not a directory. Choose another.")
    if not os.access(directory, os.W_OK):
        raise PlanError(f"{option}: {directory} cannot be written to. Choose another.")


def _report_failure(message: str, options: Namespace, code: int = 1) -> int:
    if options.debug:
        traceback.print_exc()
    print(f"autotp: error: {message}", file=sys.stderr)
    return code


def _run_plan(options: Namespace) -> int:
    model, given = _load_model(options)
    keywords = _collect_options(model, given, options)
    with _show_progress(f"planning {options.model} over {options.tp} ranks"):
        plan: Plan = api.plan(model, tp=options.tp, **keywords)
    if options.json != "-":
        print_to_terminal(render_plan(plan))
    _write_json(options.json, plan.to_json())
    return 0


def _run_dry_run(options: Namespace) -> int:
    model, given = _load_model(options)
    keywords = _collect_options(model, given, options)
    with _show_progress(f"rewriting {options.model} for rank {options.rank} of {options.tp}"):
        files: Mapping[str, str | bytes] = api.dry_run(
            model, tp=options.tp, rank=options.rank, **keywords
        )
    plan = Plan.from_json(str(files["plan.json"]))
    written = _write_files({**files, "plan.txt": format_plan(plan)}, Path(options.output))
    if options.json != "-":
        print_to_terminal(written)
    _write_json(options.json, plan.to_json())
    return 0


def _run_verify(options: Namespace) -> int:
    model, given = _load_model(options)
    # the unsharded model and the shards of all ranks; in training the gradients of both
    model = materialize(model, options.seed, copies=4 if options.training else 2)
    if options.sequence is None:
        options.sequence = min(_SHORT, find_longest_input(model) or _SHORT)
    keywords = _collect_options(model, given, options)
    found: list[Evidence] = []
    for tp in options.tp:
        with _show_progress(f"verifying {options.model} over {tp} ranks"):
            found.append(api.verify(model, tp=tp, seed=options.seed, **keywords))
        if options.json != "-":
            if len(found) > 1:
                print_to_terminal("")
            print_to_terminal(render_evidence(found[-1]))
    _write_json(options.json, json.dumps(encode(found), indent=1) + "\n")
    return 0 if all(evidence.ok for evidence in found) else 1


def _run_rules(options: Namespace) -> int:
    with _report_misuse():
        for name in options.modules:
            _import_module(name)
        book = rulebook.load_rulebook(*map(Path, options.rules))
    if options.action == "check":
        return _run_rules_check(book, options)
    if options.json != "-":
        print_to_terminal(render_rules(book.rows.values()))
    listed = {op: {**encode(row), "signature": str(row.signature)} for op, row in book.rows.items()}
    # sets of operands become sorted lists
    _write_json(options.json, json.dumps(listed, indent=1, default=sorted) + "\n")
    return 0


def _import_module(name: str) -> None:
    try:
        import_user_module(name)
    except (ImportError, ValueError) as error:
        raise PlanError(
            f"--import {name}: {error}. Give a module, such as mypackage.ops."
        ) from error


def _run_rules_check(book: rulebook.Rulebook, options: Namespace) -> int:
    with _show_progress(f"running {len(book.rows)} ops on shards"):
        verdicts = list(check_rules(book, ops=options.op, seed=options.seed))
    if options.json != "-":
        print_to_terminal(render_verdicts(verdicts))
    _write_json(options.json, json.dumps(encode(verdicts), indent=1) + "\n")
    # a plan refuses rules of the user's own that are untested
    refused = {v.op for v in verdicts if v.verdict == "untested"} & book.extended
    return 1 if refused or any(v.verdict == "wrong" for v in verdicts) else 0


def _run_shard(options: Namespace) -> int:
    plan: Plan = shard_merge.shard_checkpoint(
        options.directory,
        options.output,
        options.tp,
        overrides=dict(options.override),
        **_select_options(options, "dtype", "trust_remote_code", "rules"),
    )
    if options.json != "-":
        print_to_terminal(f"split {options.directory} into {plan.tp} files in {options.output}")
    _write_json(options.json, plan.to_json())
    return 0


def _run_merge(options: Namespace) -> int:
    shard_merge.merge_checkpoint(
        options.directory,
        options.output,
        max_shard_size=options.max_shard_size,
        trust_remote_code=options.trust_remote_code,
    )
    if options.json != "-":
        print_to_terminal(f"merged {options.directory} into {options.output}")
    _write_json(options.json, json.dumps({"output": options.output}) + "\n")
    return 0


def _run_generate(options: Namespace) -> int:
    request = GenerationRequest(
        directory=options.directory,
        prompt=options.prompt or "",
        token_ids=options.token_ids or (),
        new_tokens=options.max_new_tokens,
        chat=options.chat,
        temperature=options.temperature,
        seed=options.seed,
        loading=_select_options(
            options, "dtype", "reduce_dtype", "rules", "timeout", "debug", "trust_remote_code"
        ),
    )
    with _report_misuse():
        check_request(request)
    if options.tp > 1 and "RANK" not in os.environ:
        return _start_processes(options)
    if options.tp > 1:
        _delay_termination()
    tokens, pace, rank = generate_text(request, options.tp)
    if rank == 0:
        if options.token_ids and options.json != "-":
            print(",".join(map(str, tokens)), flush=True)  # one line: ids are not wrapped
        print(f"autotp: {pace}", file=sys.stderr)
        _write_json(options.json, json.dumps({"ids": tokens, "pace": encode(pace)}) + "\n")
    return 0


def _delay_termination() -> None:
    """Delay SIGTERM, so that a process that torchrun stops can still report why it failed."""
    signal.signal(signal.SIGTERM, _set_exit_alarm)


def _set_exit_alarm(number: int, frame: object) -> None:
    signal.alarm(_GRACE)


def _start_processes(options: Namespace) -> int:
    """Run the same command in `tp` processes of this machine, which torchrun starts."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={options.tp}", "-m", "autotp", *options.spelled]
    # one thread per process by default, as torchrun would choose, but without its warning
    return subprocess.run(run, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False).returncode


def _load_model(options: Namespace) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Load the requested model, with the example inputs of its factory, if any."""
    with _show_progress(f"building {options.model}"), _report_misuse():
        return load_with_inputs(options.model)


def _collect_options(
    model: nn.Module, given: Mapping[str, Any] | None, options: Namespace
) -> dict[str, Any]:
    """Collect the keyword arguments that `plan`, `dry_run` and `verify` share."""
    if given is None:
        sizes = {"batch": options.batch, "sequence": options.sequence, "room": options.new_tokens}
        with _report_misuse():
            given = make_example_inputs(model, options.training, **sizes, advice=_FACTORY)
    names = ("training", "machine", "strict", "new_tokens", "reduce_dtype", "rules")
    return {
        "example_inputs": given,
        "overrides": dict(options.override),
        **_select_options(options, *names),
    }


def _select_options(options: Namespace, *names: str) -> dict[str, Any]:
    """Select those of the options `names` that the command has."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


@contextmanager
def _show_progress(what: str) -> Generator[None]:
    """Show a spinner on stderr while the block runs, if stderr is a terminal."""
    with Console(stderr=True).status(what):
        yield


def _write_files(files: Mapping[str, str | bytes], directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (directory / name).write_bytes(data)
    except OSError as error:
        raise _MisuseError(
            f"{directory}: cannot be written: {error}. Choose another -o."
        ) from error
    return f"wrote {', '.join(sorted(files))} to {directory}"


def _write_json(target: str | None, content: str) -> None:
    if target == "-":
        sys.stdout.write(content)
    elif target:
        try:
            Path(target).write_text(content, encoding="utf-8")
        except OSError as error:
            raise _MisuseError(f"{target}: cannot be written: {error}. Choose another.") from error


_COMMANDS = {
    "plan": _run_plan,
    "dry-run": _run_dry_run,
    "verify": _run_verify,
    "rules": _run_rules,
    "shard": _run_shard,
    "merge": _run_merge,
    "generate": _run_generate,
}
