"""Raise the faults that the postcondition of a stage finds, as the error of that stage.

The postconditions are in the rooms of their stages (`capture.postconditions`,
`planner.postconditions`). They are checked with `debug=True`, and in every process with
AUTOTP_CHECK_STAGES=1 in its environment.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, Literal, TypeAlias

from autotp.errors import AutotpError, CaptureError, PlanError, RuleError

SWITCH: Final = "AUTOTP_CHECK_STAGES"
"""The environment variable that turns the check of every stage on if it is 1."""
Stage: TypeAlias = Literal["capture", "propagate", "match", "formulate"]

_SHOWN = 5  # faults in one message
_ERRORS: Mapping[Stage, tuple[type[AutotpError], str]] = {
    "capture": (CaptureError, "the captured graph is not what later stages rely on"),
    "propagate": (RuleError, "dims or rules contradict the graph"),
    "match": (PlanError, "pairs of parameters contradict the rules of the ops that read them"),
    "formulate": (PlanError, "the placement problem does not fit the graph"),
}


def is_switched_on() -> bool:
    """Whether the environment turns the checks on."""
    return os.environ.get(SWITCH) == "1"


def check_stage(stage: Stage, model: str, faults: Iterator[str]) -> None:
    """Raise the error of `stage` if there are `faults` in its result for the model `model`."""
    shown = list(islice(faults, _SHOWN))
    if not shown:
        return
    more = sum(1 for _ in faults)
    error, what = _ERRORS[stage]
    listed = "".join(f"\n- {fault}" for fault in shown)
    rest = f"\n- and {more} more" if more else ""
    raise error(
        f"{model}: after the stage {stage}, {what}:{listed}{rest}\n"
        "This is a fault of autotp or of one of its rules, not of the model. Please report it with "
        "this message and the model's configuration."
    )
