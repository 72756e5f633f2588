"""Explains a failure of torch.export: the line of the model, the reason, and what to do."""

import io
import logging
import os
import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, redirect_stderr

from torch import nn

from autotp.capture.graph_facts import TORCH

OURS = logging.getLogger("autotp")
SHORT = 200  # characters of torch's reason


@contextmanager
def silence_torch() -> Generator[None]:
    """Suppress what torch logs and prints about a failing export: the exception has the reason.

    With TORCH_LOGS set, or our own logger at DEBUG, nothing is suppressed.
    """
    if os.environ.get("TORCH_LOGS") or OURS.level == logging.DEBUG:
        yield
        return
    # any module of torch may log an error before it raises it
    loggers = [
        logging.getLogger(n) for n in logging.root.manager.loggerDict if _belongs_to_torch(n)
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _belongs_to_torch(logger: str) -> bool:
    return logger.partition(".")[0] == "torch"


def shorten_error(error: Exception) -> str:
    """The reason that torch gives, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    reason = next((line for line in lines if line.startswith("- ")), lines[0])
    sentence = reason.removeprefix("- ").partition(". ")[0].removesuffix(".")
    return f"{type(error).__name__}: {sentence}".removesuffix(": ")[:SHORT]


def explain_failure(model: nn.Module, error: Exception) -> str:
    """The message of the CaptureError for a failed export of `model`."""
    return (
        f"{type(model).__name__}{_find_line(model, error)}: torch.export cannot capture it: "
        f"{shorten_error(error)}. {_advise(model, error)}"
    )


def _advise(model: nn.Module, error: Exception) -> str:
    root = next(_walk_causes(error))
    raised = traceback.extract_tb(root.__traceback__)[-1:]
    if any(frame.filename in _list_files(model) for frame in raised):
        return "The model's own code raises this error: check the inputs."
    if "in output, which is not a known type" in str(error):
        return (
            "A graph can return tensors and numbers, also in tuples, lists and dicts. Make the "
            "model return only those; if it returns a cache, pass use_cache=False."
        )
    return (
        "If the model runs with these inputs, rewrite this line so that no Python branch and no "
        "shape depends on the values of a tensor."
    )


def _find_line(model: nn.Module, error: BaseException) -> str:
    """The line of the model that raised `error`: ` (file:line, in function: code)`."""
    own = _list_files(model)
    frames = [f for e in _walk_causes(error) for f in traceback.extract_tb(e.__traceback__)]
    inside = [f for f in frames if f.filename in own]
    if not inside:
        return ""
    last = inside[-1]
    return f" ({last.filename}:{last.lineno}, in {last.name}: {last.line})"


def _list_files(model: nn.Module) -> set[str]:
    """The source files of the model's modules, except those of torch."""
    modules = {type(m).__module__ for m in model.modules()}
    files = {getattr(sys.modules.get(m), "__file__", None) for m in modules}
    return {f for f in files if f and not f.startswith(TORCH)}


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and its causes, the root cause first."""
    if error is not None:
        yield from _walk_causes(error.__cause__ or error.__context__)
        yield error
