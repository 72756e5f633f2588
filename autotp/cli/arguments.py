"""What the command line understands; it only parses, `cli` acts."""

import argparse
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, NoReturn

from autotp.model_source import list_presets

__all__ = ["parse_arguments"]

_COMMANDS = {"plan", "dry-run", "verify", "rules", "shard", "merge", "generate"}
_DEBUG = "show where an error arose; generate: compare all ranks' calls"
_RULES = "TOML file of rules to merge over autotp's own; may be given several times"
_STRICT = "an op without a rule, or more than 10 %% of the bytes whole, is an error"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options that `arguments` (default: the process's own) spell; exits with 2 if they don't.

    Constraints: `command` is the command's name; every command has `json` and `debug`.
    """
    return _build_parser().parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """A parser that says which option or command a misspelled one was probably meant to be.

    `known`: the options of all commands.
    """

    known: ClassVar[set[str]] = set()

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Adds an argument, and remembers its name."""
        action = super().add_argument(*names, **how)
        self.known.update(action.option_strings)
        return action

    def error(self, message: str) -> NoReturn:
        """Exits with 2 and the message."""
        said = re.search(r"unrecognized arguments: (\S+)|invalid choice: '(\S+)'", message)
        wrong = (said[1] or said[2]).partition("=")[0] if said else ""
        close = get_close_matches(wrong, self.known | _COMMANDS, 1) if wrong else []
        super().error(f"{message}. Did you mean {close[0]!r}?" if close else message)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="autotp", description="Tensor-parallel, and proven so.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    plan = commands.add_parser("plan", help="print how a model would be split")
    _add_model(plan, tp=_parse_ranks, batch=1, sequence="the model's own, at most 4096")

    dry_run = commands.add_parser("dry-run", help="write plan, graph and problem to files")
    _add_model(dry_run, tp=_parse_ranks, batch=1, sequence="the model's own, at most 4096")
    dry_run.add_argument("-o", "--output", required=True, metavar="DIR", help="where to write")
    dry_run.add_argument(
        "--rank", type=_parse_index, default=0, help="whose graph to write (default 0)"
    )

    verify = commands.add_parser("verify", help="compare all ranks with the whole model")
    _add_model(verify, tp=_parse_counts, batch=2, sequence="16, or the model's own if less")
    verify.add_argument("--seed", type=int, default=0, help="of random weights and inputs")

    rules = commands.add_parser("rules", help="list what is known of each op, or check it")
    rules.add_argument("action", nargs="?", choices=["check"], help="run each op on shards")
    rules.add_argument("--op", default="*", metavar="GLOB", help="the ops to check (default: all)")
    rules.add_argument("--seed", type=int, default=0, help="of the sizes that check makes up")

    shard = commands.add_parser("shard", help="cut a checkpoint into a file a rank")
    merge = commands.add_parser("merge", help="join what shard wrote into one checkpoint")
    _add_conversion(shard, merge)
    generate = commands.add_parser("generate", help="text from a checkpoint, cut over processes")
    _add_generation(generate)
    for command in (plan, dry_run, verify, rules, shard, merge, generate):
        command.add_argument("--rules", action="append", default=[], metavar="FILE", help=_RULES)
        command.add_argument("--json", metavar="FILE", help="write JSON; - for standard output")
        command.add_argument("--debug", action="store_true", help=_DEBUG)
    return parser


def _add_conversion(shard: argparse.ArgumentParser, merge: argparse.ArgumentParser) -> None:
    """Adds what `shard` and `merge` take."""
    for command, read in ((shard, "the checkpoint"), (merge, "what shard wrote")):
        command.add_argument("directory", metavar="DIR", help=f"{read} to read")
        command.add_argument("output", metavar="OUT", help="the directory to write")
        command.add_argument("--trust-remote-code", action="store_true", help="run code in DIR")
    shard.add_argument(
        "--tp", type=_parse_ranks, required=True, metavar="N", help="number of ranks"
    )
    shard.add_argument("--dtype", metavar="NAME", help="of the parameters (default: as stored)")
    _add_override(shard)
    size = "largest size of a file (default 50GB)"
    merge.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help=size)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    """Adds what `generate` takes."""
    parser.add_argument("directory", metavar="DIR", help="the checkpoint to read")
    parser.add_argument(
        "--tp", type=_parse_ranks, required=True, metavar="N", help="number of ranks"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="what to go on from")
    asked.add_argument(
        "--ids", type=_parse_token_ids, metavar="N,N", help="the same as numbers of words"
    )
    most = "most new tokens (default 64)"
    parser.add_argument("--max-new-tokens", type=_parse_count, default=64, metavar="N", help=most)
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn")
    drawn = "draw words at this temperature (default 0: the likeliest)"
    parser.add_argument(
        "--temperature", type=_parse_temperature, default=0.0, metavar="T", help=drawn
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--dtype", metavar="NAME", help="of the parameters (default: as stored)")
    _add_reduce_dtype(parser)
    late = "give up on a rank after so long (default: 1800 over gloo, 600 over NCCL)"
    parser.add_argument("--timeout", type=_parse_seconds, metavar="SECONDS", help=late)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code in DIR")


def _add_reduce_dtype(parser: argparse.ArgumentParser) -> None:
    what = "dtype that ranks' parts are summed in, such as float32 (default: the values' own)"
    parser.add_argument("--reduce-dtype", metavar="NAME", help=what)


def _add_override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--override",
        type=_parse_override,
        action="append",
        default=[],
        metavar="GLOB=LAYOUT",
        help="fix the layout of parameters: column, row, vocabulary, expert, replicated",
    )


def _add_model(
    parser: argparse.ArgumentParser,
    *,
    tp: Callable[[str], object],
    batch: int,
    sequence: str,
) -> None:
    """Adds what every command about a model takes; `batch` and `sequence` tell the defaults."""
    models = f"directory with config.json, package.module:factory, or {', '.join(list_presets())}"
    ranks = "number of ranks" if tp is _parse_ranks else "numbers of ranks, e.g. 2,3,4"
    parser.add_argument("model", metavar="MODEL", help=models)
    parser.add_argument("--tp", type=tp, required=True, metavar="N", help=ranks)
    parser.add_argument("--training", action="store_true", help="with the backward pass")
    parser.add_argument("--machine", default="h100", help="name or .toml file (default h100)")
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
        help=f"length (default: {sequence})",
    )
    words = "plan a prompt's call together with those of N words generated after it"
    parser.add_argument("--new-tokens", type=_parse_index, default=0, metavar="N", help=words)
    _add_override(parser)
    _add_reduce_dtype(parser)
    parser.add_argument("--strict", action="store_true", help=_STRICT)


def _parse_count(text: str) -> int:
    return _parse_integer(1, text)


def _parse_ranks(text: str) -> int:
    if "," in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; only verify takes several"
        )
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
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; give seconds above 0")
    return number


def _parse_temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no temperature; give 0 or a number above 0")
    return number


def _parse_integer(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small, the least is {least}")
    return number


def _parse_override(text: str) -> tuple[str, str]:
    glob, _, layout = text.rpartition("=")
    if not (glob and layout):
        raise argparse.ArgumentTypeError(f"{text!r} is not GLOB=LAYOUT, e.g. '*.down_proj=row'")
    return glob, layout
