"""What a sharded model refuses to do, in words."""

from typing import NoReturn

from autotp.errors import PlanError

__all__ = ["refuse_gradients", "refuse_to_run"]


def refuse_to_run(model: str, rank: str) -> NoReturn:
    """Refuses to call a model of which this process has one rank's part, and no group to run in."""
    raise PlanError(
        f"{model}: called as {rank}, but it was built with rank= and has no group to run in. Build "
        "it without rank= in each of the processes that torchrun --nproc-per-node "
        f"{rank.rpartition(' ')[2]} your_script.py starts."
    )


def refuse_gradients(model: str, what: str) -> NoReturn:
    """Refuses what needs gradients of a model whose plan has none."""
    raise PlanError(
        f"{model}: {what}, but the plan has no backward pass. Pass training=True when "
        "parallelizing."
    )
