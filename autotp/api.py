"""What autotp does, from end to end; the stages meet in `compiler`, one call at a time.

`plan` stops at the plan; `parallelize` builds one rank's model; `verify` builds every rank's and
compares them, in lockstep, with the unsharded model.
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
from autotp.capture.source_model import check_values, find_device
from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.errors import PlanError
from autotp.model_source import load_model
from autotp.options import (
    Keywords,
    Request,
    check_comparison,
    check_module,
    check_rank,
    check_ranks,
    read_request,
)
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.records.replication import describe_excess_replication
from autotp.records.trace import Trace
from autotp.report.graph_json import graph_to_json
from autotp.runtime.group.agreement import require_agreement, require_equal_weights
from autotp.runtime.group.debug_compare import Comparison
from autotp.runtime.group.exchange import fail_together
from autotp.runtime.group.failures import note_wait
from autotp.runtime.group.process_group import Group, group_exists, make_subgroups, resolve_group
from autotp.runtime.model import ShardedModel
from autotp.solver.iopddl import solution_to_json, to_iopddl
from autotp.verification import compare_ranks
from autotp.verification.phases import fill_inputs, merge_evidence
from autotp.verification.rules.check import require_valid_rules

_ = _ops  # imported for what it registers: the ops that rewritten graphs hold


def plan(model: object, tp: int, **options: Unpack[Keywords]) -> Plan:
    """Plan how `model` would run over `tp` ranks; needs no device, process group or weights.

        print(autotp.plan("llama-3.1-8b", tp=8))
        autotp.plan(model, tp=4, training=True).parameters["lm_head.weight"].layout

    - `model`: a module, a Transformers configuration, a directory with a config.json, the name of a
      preset, or `package.module:factory`. For all but a module, training is off by default.
    - `tp`: the number of ranks.
    - `example_inputs`: a mapping of names to tensors, such as `input_ids` of shape (batch,
      sequence). Costs are estimated at their sizes. Default: batch 1, and as long a sequence as the
      model takes, at most 4,096 tokens.
    - `training`: plan the backward pass too; default `model.training`.
    - `machine`: the name of a file in rules/machines/, the path of one, or a Machine. Default
      "h100".
    - `optimizer`, `state_dtype`: what the memory estimate counts per parameter.
    - `overrides`: globs over parameter names to "column", "row", "vocabulary", "expert" or
      "replicated"; later globs win.
    - `shard_threshold`: parameters of fewer bytes than this fraction of the largest may stay
      replicated where that costs less communication.
    - `reduce_dtype`: the dtype in which values are summed over the group, at least as wide as the
      parameters'; the plan counts its bytes.
    - `strict`: raise if an op has no rule, or if more than 10 % of the parameter bytes are
      replicated.
    - `new_tokens`: how many tokens are generated after the inputs, which are a prompt. Prefill and
      decode steps are then planned together, each at its own sizes.
    - `plan`: a Plan, or the path of one, whose parameter layouts are followed; what ops do is
      solved anew under them.
    - `rules`: the path of a TOML file of rules, or a list of paths, merged over autotp's own. Each
      of their rows is verified by running its samples.

    Sizes in the plan are in bytes, times in picoseconds.

    Raises PlanError for options that cannot be met, CaptureError if torch.export cannot capture the
    model, RuleError for rules that are malformed or wrong, UnknownOpError with `strict`.
    """
    check_ranks(tp)
    request = _read_verified(**options)
    if not isinstance(model, nn.Module) and request.training is None:
        request = replace(request, training=False)
    return ModelCompiler.of(load_model(model), request).compile(tp, "tp").plan


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
    """Build this rank's shard of `model`, ready to call; `model` itself is left unchanged.

        # in each process that `torchrun --nproc-per-node 8 script.py` starts
        sharded = autotp.parallelize(model, tp=8)
        logits = sharded(input_ids=ids).logits  # (batch, sequence, vocabulary), on every rank

    The sharded model takes and returns what the model does, of the same shapes and dtypes.

    - `tp`: the number of ranks; None takes the size of the group.
    - `mesh`: a DeviceMesh, of which the "tp" dim is used; `group`: a process group. Without either,
      all processes that torchrun started are one group.
    - `rank`: build that rank's model without any group, to inspect it; it cannot be called.
    - `timeout`: seconds (or a timedelta) after which the group gives up on a rank; None leaves the
      group's own.
    - `debug`: compare each call with those of the other ranks and name what differs; check the
      result of every stage.
    - All other keywords: as for `plan`.

    Raises what `plan` raises; on every rank PlanError if the ranks' plans differ, and WeightsError
    if their weights do; GroupError if a rank is gone or late, now or in a later call.
    """
    check_module(model, "parallelize")
    check_rank(rank)
    own = resolve_group(tp, mesh=mesh, group=group, rank=rank, timeout=timeout)
    compiler, compiled = compile_on_all_ranks(own, model, debug=debug, **options)
    tensors = (*compiler.source.parameters.items(), *compiler.source.buffers.items())
    require_equal_weights(own, tensors, "the unsharded weights")
    return attach_group_monitor(compiler.build(compiled, own), debug=debug)


def attach_group_monitor(model: ShardedModel, *, debug: bool) -> ShardedModel:
    """Make calls of `model` report lost ranks; with `debug`, compare calls between ranks first."""
    if not isinstance(cast("object", debug), bool):
        raise PlanError(f"debug={debug!r}: must be True or False.")
    state = model.sharded_state
    state.watched = True
    state.compare = Comparison(state.group) if debug and group_exists(state.group.name) else None
    return model


def compile_on_all_ranks(
    group: Group, model: nn.Module, *, debug: bool = False, **options: Unpack[Keywords]
) -> tuple[ModelCompiler, CompiledVariant]:
    """Compile `model` for a group; every rank must call it, and all have the same plan.

    `debug`: check what each stage makes.
    """
    with fail_together(group, "planning"):  # a rank that fails would leave the others waiting
        request = replace(_read_verified(**options), check_stages=debug)
        compiler = ModelCompiler.of(model, request)
        compiled = compiler.compile(group.size, group.name)
    require_agreement(group, compiled.plan.hash, "the plan")
    with note_wait(group.name, "making sub-groups for gradients"):
        make_subgroups(group, compiled.plan)
    excess = describe_excess_replication(compiled.plan.parameters, group.size)
    if excess and (group.rank == 0 or not group_exists(group.name)):
        warnings.warn(f"{compiler.source.name}: {excess}", stacklevel=3)
    return compiler, compiled


def verify(
    model: nn.Module,
    tp: int,
    *,
    gradients: bool | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Unpack[Keywords],
) -> Evidence:
    """Compare the sharded model with the unsharded one; all ranks run in this process.

        evidence = autotp.verify(model, tp=4, training=True)
        assert evidence.ok, evidence.first_divergence

    Every output, the loss and every parameter's gradient are compared, each with a tolerance that
    is derived from the rounding of the unsharded model.

    - `gradients`: compare the gradient of every parameter; None: if the plan has a backward pass;
      True plans with training.
    - `dtype`: in which both models are run.
    - `seed`: of the random inputs, and of the random projection that serves as the loss of a model
      that returns none.
    - All other keywords: as for `plan`.

    Raises what `plan` raises, and WeightsError for a model without weights. A model that is wrong
    does not raise: `ok` is False, and `first_divergence` names the first wrong node.
    """
    check_ranks(tp)
    check_module(model, "verify")
    check_comparison(dtype, seed)
    request = _read_verified(**options)
    if gradients and request.training is False:
        raise PlanError(
            "verify: gradients=True and training=False: a plan without training has no backward "
            "pass to compare. Pass training=True, or leave gradients out."
        )
    if gradients and request.training is None:
        request = replace(request, training=True)
    compiler = ModelCompiler.of(model, request)
    compiled = compiler.compile(tp, "tp")
    for name, tensor in compiler.source.parameters.items():
        check_values(name, tensor, torch.device("cpu"))
    ranks = [compiler.build(compiled, Group("tp", tp, r, find_device(model))) for r in range(tp)]
    found = [
        compare_ranks(
            model,
            ranks,
            fill_inputs(call.inputs, seed),
            variant.plan,
            Trace(variant.rewritten.values),
            program=call.program,
            gradients=compiled.plan.training if gradients is None else gradients,
            seed=seed,
            dtype=dtype,
        )
        for call, variant in zip(
            (compiler, *compiler.later), (compiled, *compiled.later), strict=True
        )
    ]
    evidence = merge_evidence(found, [phase.name for phase in compiled.plan.phases])
    return replace(evidence, notes=(*evidence.notes, *compiled.plan.warnings))


def dry_run(
    model: nn.Module, tp: int, *, rank: int = 0, **options: Unpack[Keywords]
) -> dict[str, str | bytes]:
    """Give the files of a dry run by name: plan, rewritten graph, problem and solution."""
    group = resolve_group(tp, rank=rank)
    compiler = ModelCompiler.of(model, _read_verified(**options))
    compiled = compiler.compile(tp, group.name)
    sharded = compiler.build(compiled, group, torch.device(compiler.request.machine.device))
    problem = to_iopddl(compiled.problem, compiled.solution)
    rewritten = compiled.rewritten
    return {
        "plan.json": compiled.plan.to_json(),
        "graph.py": ShardedModel.code(sharded),
        "graph.json": json.dumps(graph_to_json(rewritten.graph, rewritten.values), indent=1) + "\n",
        "problem.json.gz": gzip.compress(json.dumps(problem).encode(), mtime=0),
        "solution.json": json.dumps(solution_to_json(compiled.problem, compiled.solution)) + "\n",
    }


def _read_verified(**options: Unpack[Keywords]) -> Request:
    """Read a caller's options; rules of the caller's are verified by running them."""
    request = read_request(**options)
    require_valid_rules(request.rules)
    return request
