"""What autotp does, from end to end; the stages meet in `work`, a call at a time.

`plan` stops at the plan; `parallelize` builds one rank's model; `verify` builds every rank's and
runs them in lockstep beside the whole model.
"""

import gzip
import json
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp.runtime.ops.library as _ops
from autotp.capture.source_model import check_values, device_of
from autotp.compiler import Made, Work
from autotp.errors import PlanError
from autotp.model_source import load
from autotp.options import (
    Keywords,
    Options,
    check_module,
    check_proof,
    check_rank,
    check_ranks,
)
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.records.replication import much_whole
from autotp.records.trace import Trace
from autotp.report.graph_json import graph_json
from autotp.runtime.group.agreement import agree, agree_weights
from autotp.runtime.group.debug_compare import Comparison
from autotp.runtime.group.exchange import as_one
from autotp.runtime.group.failures import waiting
from autotp.runtime.group.process_group import Group, exists, meet, resolve
from autotp.runtime.model import ShardedModel
from autotp.solver.iopddl import solution_json, to_iopddl
from autotp.verification import prove
from autotp.verification.phases import of_all_calls, with_values

_ = _ops  # imported for what it registers: the ops that rewritten graphs hold

__all__ = ["dry_run", "parallelize", "plan", "planned", "verify", "watched"]


def plan(model: object, tp: int, **options: Unpack[Keywords]) -> Plan:
    """The plan of `model` over `tp` ranks: needs no device, no group and no weights.

    - `model`: a module, a transformers configuration, a directory with a config.json, a preset's
      name, or `package.module:factory`; training is off for all but a module.
    - `example_inputs`: a mapping of inputs; their sizes price the plan. Default: see docs.
    - `training`: gradients are wanted; default `model.training`.
    - `machine`: a name of rules/machines/, a path, or a Machine.
    - `optimizer`, `state_dtype`: for the memory account.
    - `overrides`: globs over parameter names to column, row, vocabulary, expert or replicated.
    - `shard_threshold`: parameters smaller than this part of the largest are free to stay whole.
    - `reduce_dtype`: sums over the group are made in it, which holds all that parameters do; the
      plan counts its bytes.
    - `strict`: raise for an op without a rule, or more than 10 % of the bytes whole.
    - `new_tokens`: how many words are generated after the inputs, which are a prompt: the plan is
      solved for the prompt's call and for the calls of one word together, each priced at its sizes.
    - `plan`: a Plan, or the path of one, whose layouts of parameters are to be followed (with the
      overrides that it was asked for, as reasons); what ops do is solved anew under them.

    Raises PlanError, CaptureError, RuleError, UnknownOpError.
    """
    check_ranks(tp)
    chosen = Options.of(**options)
    if not isinstance(model, nn.Module) and chosen.training is None:
        chosen = replace(chosen, training=False)
    return Work.of(load(model), chosen).made(tp, "tp").plan


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
    debug: bool = False,
    **options: Unpack[Keywords],
) -> ShardedModel:
    """One rank's part of `model`, ready to call; the model given is left as it was.

    - `tp`: the number of ranks; None takes the group's size.
    - `mesh`: a DeviceMesh (its "tp" dim); `group`: a process group; `rank`: build that rank's model
      without any group, to look at. Without them: the whole world, initialised under torchrun.
    - `timeout`: seconds after which the group gives up on a rank; None: as it was made.
    - `debug`: each call is compared with the other ranks', and what differs is named.
    - Further keywords: as for `plan`.

    Raises as `plan` does; on every rank PlanError if their plans differ, WeightsError if the
    models' tensors do. GroupError if a rank is gone or late, here and in each call.
    """
    check_module(model, "parallelize")
    check_rank(rank)
    where = resolve(tp, mesh=mesh, group=group, rank=rank, timeout=timeout)
    work, made = planned(where, model, **options)
    held = (*work.whole.parameters.items(), *work.whole.buffers.items())
    agree_weights(where, held, "the whole weights")
    return watched(work.built(made, where), where, debug=debug)


def watched(model: ShardedModel, where: Group, *, debug: bool) -> ShardedModel:
    """The model, whose calls tell of lost ranks; with `debug`, they are compared first."""
    if not isinstance(cast("object", debug), bool):
        raise PlanError(f"debug={debug!r}: must be True or False.")
    state = model.sharded_state
    state.group = where.name
    state.compare = Comparison(where) if debug and exists(where.name) else None
    return model


def planned(where: Group, model: nn.Module, **options: Unpack[Keywords]) -> "tuple[Work, Made]":
    """The work on `model` and the variant made for a group, the same on all of its ranks."""
    with as_one(where, "planning"):  # one that fails would leave the others waiting for its plan
        work = Work.of(model, Options.of(**options))
        made = work.made(where.size, where.name)
    agree(where, made.plan.hash, "the plan")
    with waiting(where.name, "making sub-groups for gradients"):
        meet(where, made.plan)
    if (told := much_whole(made.plan.parameters, where.size)) and (
        where.rank == 0 or not exists(where.name)
    ):
        warnings.warn(f"{work.whole.name}: {told}", stacklevel=3)
    return work, made


def verify(
    model: nn.Module,
    tp: int,
    *,
    gradients: bool | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Unpack[Keywords],
) -> Evidence:
    """The evidence that the sharded model equals the whole one: all ranks run in this process.

    - `gradients`: compare every parameter's gradient; None: as `training`; True plans with
      training.
    - `seed`: of the inputs drawn and of the projection that serves as a loss where there is none.
    - Further keywords: as for `plan`.
    """
    check_ranks(tp)
    check_module(model, "verify")
    check_proof(dtype, seed)
    chosen = Options.of(**options)
    if gradients and chosen.training is False:
        raise PlanError(
            "verify: gradients=True and training=False: a plan without training has no backward "
            "pass to compare. Pass training=True, or leave gradients out."
        )
    if gradients and chosen.training is None:
        chosen = replace(chosen, training=True)
    work = Work.of(model, chosen)
    made = work.made(tp, "tp")
    for name, tensor in work.whole.parameters.items():
        check_values(name, tensor, torch.device("cpu"))
    ranks = [work.built(made, Group("tp", tp, r, device_of(model))) for r in range(tp)]
    wanted = made.plan.training if gradients is None else gradients
    found = [
        prove(
            model,
            ranks,
            with_values(of.inputs, seed),
            variant.plan,
            Trace(variant.rewritten.values),
            program=of.program,
            gradients=wanted,
            seed=seed,
            dtype=dtype,
        )
        for of, variant in zip((work, *work.later), (made, *made.later), strict=True)
    ]
    evidence = of_all_calls(found, [phase.name for phase in made.plan.phases])
    return replace(evidence, notes=(*evidence.notes, *made.plan.warnings))


def dry_run(
    model: nn.Module, tp: int, *, rank: int = 0, **options: Unpack[Keywords]
) -> dict[str, str | bytes]:
    """The files of a dry run by name: plan, rewritten graph, and the placement problem solved."""
    where = resolve(tp, rank=rank)
    work = Work.of(model, Options.of(**options))
    made = work.made(tp, where.name)
    sharded = work.built(made, where, torch.device(work.machine.device))
    problem = to_iopddl(made.problem, made.solution)
    return {
        "plan.json": made.plan.to_json(),
        "graph.py": ShardedModel.code(sharded),
        "graph.json": json.dumps(graph_json(made.rewritten.graph, made.rewritten.values), indent=1)
        + "\n",
        "problem.json.gz": gzip.compress(json.dumps(problem).encode(), mtime=0),
        "solution.json": json.dumps(solution_json(made.problem, made.solution)) + "\n",
    }
