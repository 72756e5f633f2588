"""The commands and options of the command line; `cli.main` carries them out."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, NoReturn

from autotp.model_source import list_presets

_COMMANDS = {"plan", "dry-run", "verify", "rules", "shard", "merge", "generate"}
_DEBUG = "show the traceback of an error"
_RULES = "TOML file of rules to merge over autotp's own; may be given several times"
_STRICT = "fail if an op has no rule, or if more than 10 %% of the bytes are replicated"
_RENAMED = {"--ids": "--token-ids"}
"""Options by their former names, which are accepted for one version."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `arguments` (default: those of the process); exit with 2 if they are wrong.

    `command` is the name of the command, and `spelled` the arguments, without former names. Every
    command has `json`, `debug` and `rules`.
    """
    spelled = [_update_name(a) for a in (sys.argv[1:] if arguments is None else arguments)]
    return _build_parser().parse_args(spelled, argparse.Namespace(spelled=spelled))


def _update_name(argument: str) -> str:
    """Replace the former name of an option, with a warning on stderr."""
    name, equals, value = argument.partition("=")
    new = _RENAMED.get(name)
    if new is None:
        return argument
    print(f"autotp: warning: {name} is now called {new}; use {new}.", file=sys.stderr)
    return f"{new}{equals}{value}"


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the option or command that a misspelled one resembles.

    `known`: the options of all commands.
    """

    known: ClassVar[set[str]] = set()

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Add an argument, and remember its name."""
        action = super().add_argument(*names, **how)
        self.known.update(action.option_strings)
        return action

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and the message."""
        said = re.search(r"unrecognized arguments: (\S+)|invalid choice: '(\S+)'", message)
        wrong = (said[1] or said[2]).partition("=")[0] if said else ""
        close = get_close_matches(wrong, self.known | _COMMANDS, 1) if wrong else []
        super().error(f"{message}. Did you mean {close[0]!r}?" if close else message)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="autotp", description="Tensor parallelism for unmodified models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    plan = commands.add_parser("plan", help="print how a model would be sharded")
    _add_model(plan, tp=_parse_ranks, batch=1, sequence="the model's own, at most 4096")

    dry_run = commands.add_parser("dry-run", help="write the plan, graph and problem to files")
    _add_model(dry_run, tp=_parse_ranks, batch=1, sequence="the model's own, at most 4096")
    dry_run.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="directory to write to"
    )
    dry_run.add_argument(
        "--rank", type=_parse_index, default=0, help="rank whose graph to write (default 0)"
    )

    verify = commands.add_parser("verify", help="compare the sharded model with the unsharded one")
    _add_model(verify, tp=_parse_counts, batch=2, sequence="16, or the model's own if less")
    seed = "seed of the random weights and inputs (default 0)"
    verify.add_argument("--seed", type=int, default=0, help=seed)

    rules = commands.add_parser("rules", help="list the rule of each op, or check the rules")
    rules.add_argument("action", nargs="?", choices=["check"], help="run each op on shards")
    rules.add_argument("--op", default="*", metavar="GLOB", help="ops to check (default: all)")
    module = "module to import first, which registers ops; may be given several times"
    rules.add_argument(
        "--import", action="append", default=[], metavar="MODULE", dest="modules", help=module
    )
    sizes = "seed of the random sizes that are checked (default 0)"
    rules.add_argument("--seed", type=int, default=0, help=sizes)

    shard = commands.add_parser("shard", help="split a checkpoint into one file per rank")
    merge = commands.add_parser("merge", help="merge the files of shard into one checkpoint")
    _add_conversion(shard, merge)
    generate = commands.add_parser(
        "generate", help="generate text from a checkpoint, over processes"
    )
    _add_generation(generate)
    for command in (plan, dry_run, verify, rules, shard, merge, generate):
        command.add_argument("--rules", action="append", default=[], metavar="FILE", help=_RULES)
        command.add_argument("--json", metavar="FILE", help="write JSON (-: to standard output)")
        debug = f"{_DEBUG}, and compare the calls of all ranks" if command is generate else _DEBUG
        command.add_argument("--debug", action="store_true", help=debug)
    return parser


def _add_conversion(shard: argparse.ArgumentParser, merge: argparse.ArgumentParser) -> None:
    """Add the arguments of `shard` and `merge`."""
    for command, read in ((shard, "checkpoint to read"), (merge, "directory that shard wrote")):
        command.add_argument("directory", metavar="DIR", help=read)
        command.add_argument("output", metavar="OUT", help="directory to write")
        command.add_argument("--trust-remote-code", action="store_true", help="run code in DIR")
    shard.add_argument(
        "--tp", type=_parse_ranks, required=True, metavar="N", help="number of ranks"
    )
    _add_dtype(shard)
    _add_override(shard)
    size = "largest size of a file (default 50GB)"
    merge.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help=size)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.add_argument("directory", metavar="DIR", help="checkpoint to read")
    parser.add_argument(
        "--tp", type=_parse_ranks, required=True, metavar="N", help="number of ranks"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="prompt, as text")
    ids = "prompt, as token ids"
    prompt.add_argument("--token-ids", type=_parse_token_ids, metavar="ID,ID", help=ids)
    most = "largest number of new tokens (default 64)"
    parser.add_argument("--max-new-tokens", type=_parse_count, default=64, metavar="N", help=most)
    parser.add_argument(
        "--chat", action="store_true", help="use the chat template; the prompt is a user's turn"
    )
    temperature = "sampling temperature (default 0: greedy)"
    parser.add_argument(
        "--temperature", type=_parse_temperature, default=0.0, metavar="T", help=temperature
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling (default 0)")
    _add_dtype(parser)
    _add_reduce_dtype(parser)
    late = "wait this long for another rank (default: 1800 over gloo, 600 over NCCL)"
    parser.add_argument("--timeout", type=_parse_seconds, metavar="SECONDS", help=late)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code in DIR")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    what = "dtype of the parameters (default: as stored)"
    parser.add_argument("--dtype", metavar="NAME", help=what)


def _add_reduce_dtype(parser: argparse.ArgumentParser) -> None:
    what = "dtype of sums over ranks, such as float32 (default: that of the values)"
    parser.add_argument("--reduce-dtype", metavar="NAME", help=what)


def _add_override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--override",
        type=_parse_override,
        action="append",
        default=[],
        metavar="GLOB=LAYOUT",
        help="set the layout of parameters: column, row, vocabulary, expert or replicated",
    )


def _add_model(
    parser: argparse.ArgumentParser,
    *,
    tp: Callable[[str], object],
    batch: int,
    sequence: str,
) -> None:
    """Add the arguments of every command about a model; `batch`, `sequence`: the defaults."""
    models = f"directory with config.json, package.module:factory, or {', '.join(list_presets())}"
    ranks = "number of ranks" if tp is _parse_ranks else "numbers of ranks, e.g. 2,3,4"
    parser.add_argument("model", metavar="MODEL", help=models)
    parser.add_argument("--tp", type=tp, required=True, metavar="N", help=ranks)
    parser.add_argument("--training", action="store_true", help="include the backward pass")
    machine = "name or TOML file of the machine (default h100)"
    parser.add_argument("--machine", default="h100", help=machine)
    parser.add_argument(
        "--batch",
        type=_parse_count,
        default=batch,
        metavar="N",
        help=f"batch size (default {batch})",
    )
    parser.add_argument(
        "--sequence",
        "--prompt-length",
        type=_parse_count,
        metavar="N",
        help=f"sequence length (default: {sequence})",
    )
    tokens = "plan the prefill together with N decode steps (default 0: one call)"
    parser.add_argument("--new-tokens", type=_parse_index, default=0, metavar="N", help=tokens)
    _add_override(parser)
    _add_reduce_dtype(parser)
    parser.add_argument("--strict", action="store_true", help=_STRICT)


def _parse_count(text: str) -> int:
    return _parse_integer(1, text)


def _parse_ranks(text: str) -> int:
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer; only verify takes several")
    return _parse_count(text)


def _parse_token_ids(text: str) -> list[int]:
    return [_parse_integer(0, part) for part in text.split(",")]


def _parse_index(text: str) -> int:
    return _parse_integer(0, text)


def _parse_counts(text: str) -> list[int]:
    return [_parse_count(part) for part in text.split(",")]


def _parse_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} s is not a timeout; give more than 0 seconds")
    return number


def _parse_temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a temperature; give 0 or more")
    return number


def _parse_integer(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from error
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small; the minimum is {least}")
    return number


def _parse_override(text: str) -> tuple[str, str]:
    glob, _, layout = text.rpartition("=")
    if not (glob and layout):
        raise argparse.ArgumentTypeError(f"{text!r} is not GLOB=LAYOUT, e.g. '*.down_proj=row'")
    return glob, layout
