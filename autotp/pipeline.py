"""The one place where the stages meet: capture → analyse → match → pose → solve → rewrite →
account.

`plan` stops at the plan; `parallelize` builds one rank's model; `verify` builds every rank's and
runs them in lockstep beside the whole model.
"""

import gzip
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp.run.conjugates as _ops
from autotp import rulebook
from autotp.analysis import Decision
from autotp.cache import stated
from autotp.checkpoint.store import GroupStore
from autotp.constraints import as_overridden, as_planned, followed
from autotp.core.evidence import Evidence
from autotp.core.held import much_whole
from autotp.core.iopddl import solution_json, to_iopddl
from autotp.core.machine import Machine, load_machine
from autotp.core.plan import CacheRecord, Plan
from autotp.core.problem import Solution
from autotp.core.trace import Trace
from autotp.dump import graph_json
from autotp.errors import PlanError
from autotp.further import Answer, Asking, Further
from autotp.models import load
from autotp.offers import offered
from autotp.options import (
    Keywords,
    Options,
    check_module,
    check_proof,
    check_rank,
    check_ranks,
)
from autotp.passes.account import Asked, Found, account
from autotp.passes.analyse import analyse
from autotp.passes.capture import capture
from autotp.passes.capture_inputs import example_inputs
from autotp.passes.check import check
from autotp.passes.clean import retarget
from autotp.passes.match import match
from autotp.passes.outline import Outlined, outline
from autotp.passes.pose import Posed, decide, pose
from autotp.passes.rewrite import Rewritten, Target, rewrite
from autotp.passes.solve import solve
from autotp.program import Program, tensor_leaves
from autotp.proof import prove
from autotp.run.group import Group, agree, exists, is_real, meet, resolve, together
from autotp.run.model import ShardedModel, add_variant
from autotp.run.shards import cut
from autotp.run.tree import build_tree, refuse_sharded
from autotp.run.variant import Signature, key_of, mode_of
from autotp.sizes import Pricing, data_sizes
from autotp.terms import Constraint, Terms
from autotp.whole import check_values, device_of, is_meta, skeleton, valueless, whole_of

_ = _ops  # imported for what it registers: the ops that rewritten graphs hold

_LESS_WHOLE = "Choose a smaller tp, or leave strict off to see the plan."

__all__ = ["dry_run", "parallelize", "plan", "planned", "verify"]


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
    - `reduce_dtype`: sums over the group are made in it.
    - `strict`: raise for an op without a rule, or more than 10 % of the bytes whole.
    - `plan`: a Plan, or the path of one, whose layouts of parameters are to be followed (with the
      overrides that it was asked for, as reasons); what ops do is solved anew under them.

    Raises PlanError, CaptureError, RuleError, UnknownOpError.
    """
    check_ranks(tp)
    chosen = Options.of(**options)
    if not isinstance(model, nn.Module) and chosen.training is None:
        chosen = replace(chosen, training=False)
    return _Work(load(model), chosen).made(tp, "tp").plan


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    **options: Unpack[Keywords],
) -> ShardedModel:
    """One rank's part of `model`, ready to call; the model given is left as it was.

    - `tp`: the number of ranks; None takes the group's size.
    - `mesh`: a DeviceMesh (its "tp" dim); `group`: a process group; `rank`: build that rank's model
      without any group, to look at. Without them: the whole world, initialised under torchrun.
    - Further keywords: as for `plan`.

    Raises as `plan` does, and PlanError on every rank if their plans differ.
    """
    check_module(model, "parallelize")
    check_rank(rank)
    where = resolve(tp, mesh=mesh, group=group, rank=rank)
    work, made = planned(where, model, **options)
    return work.built(made, where)


def planned(where: Group, model: nn.Module, **options: Unpack[Keywords]) -> "tuple[_Work, Made]":
    """The work on `model` and the variant made for a group, the same on all of its ranks."""
    with together(where):
        work = _Work(model, Options.of(**options))
        made = work.made(where.size, where.name)
    agree(where, made.plan.hash, "the plan")
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
    work = _Work(model, chosen)
    made = work.made(tp, "tp")
    for name, tensor in work.whole.parameters.items():
        check_values(name, tensor, torch.device("cpu"))
    ranks = [work.built(made, Group("tp", tp, r, device_of(model))) for r in range(tp)]
    wanted = made.plan.training if gradients is None else gradients
    evidence = prove(
        model,
        ranks,
        work.inputs,
        made.plan,
        Trace(made.rewritten.values),
        program=work.program,
        gradients=wanted,
        seed=seed,
        dtype=dtype,
    )
    return replace(evidence, notes=(*evidence.notes, *made.plan.warnings))


def dry_run(
    model: nn.Module, tp: int, *, rank: int = 0, **options: Unpack[Keywords]
) -> dict[str, str | bytes]:
    """The files of a dry run by name: plan, rewritten graph, and the placement problem solved."""
    where = resolve(tp, rank=rank)
    work = _Work(model, Options.of(**options))
    made = work.made(tp, where.name)
    sharded = work.built(made, where, torch.device(work.machine.device))
    problem = to_iopddl(made.posed.problem, made.solution)
    return {
        "plan.json": made.plan.to_json(),
        "graph.py": ShardedModel.code(sharded),
        "graph.json": json.dumps(graph_json(made.rewritten.graph, made.rewritten.values), indent=1)
        + "\n",
        "problem.json.gz": gzip.compress(json.dumps(problem).encode(), mtime=0),
        "solution.json": json.dumps(solution_json(made.posed.problem, made.solution)) + "\n",
    }


@dataclass(frozen=True, slots=True)
class Made:
    """One variant, planned and rewritten.

    - `rewrite`: writes the graph of a rank.
    """

    plan: Plan
    posed: Posed
    solution: Solution
    decision: Decision
    rewrite: Callable[[int], Rewritten]
    rewritten: Rewritten
    outlined: dict[object, Outlined] = field(default_factory=dict[object, Outlined])

    def layers(self, device: torch.device, rank: int) -> Outlined:
        """A rank's graph in layers, for `device`; where all parts are even, the same for all."""
        graph_of = rank if self.rewritten.uneven else 0
        key = (device, graph_of)
        if key not in self.outlined:
            graph = (self.rewrite(graph_of) if graph_of else self.rewritten).graph
            retarget(graph, device)
            self.outlined[key] = outline(graph)
        return self.outlined[key]


class _Work:
    """One model under one set of options: what is captured once and used for several tp."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        inputs: Mapping[str, Any] | None = None,
        caches: Mapping[str, CacheRecord] | None = None,
    ) -> None:
        refuse_sharded(model)
        self.caches = caches or {}
        self.model, self.options = model, options
        self.training = model.training if options.training is None else options.training
        given = inputs if inputs is not None else options.example_inputs
        if given is None:
            given = example_inputs(model, self.training)
        self.inputs = Signature.of(model).spelled(stated(given))
        self.rules = rulebook.load()
        machine = options.machine
        self.machine = (
            machine if isinstance(machine, Machine) else load_machine(machine, rulebook.root())
        )
        self.whole = whole_of(model)
        self.program = _captured(model, self.inputs, gradients=self.training)
        names, strict, grad = list(self.whole.parameters), options.strict, self.training
        self.analysis = analyse(self.program, names, self.rules, strict=strict, gradients=grad)
        self.matching = match(self.analysis, self.rules)
        self.pricing = Pricing(self.program, tensor_leaves(self.inputs))

    def made(self, tp: int, group: str) -> Made:
        """The variant planned for `tp` ranks and rewritten for the group called `group`."""
        posed = self.posed(tp)
        made = self.made_of(posed, solve(posed.problem), tp, group)
        if self.options.strict and (told := much_whole(made.plan.parameters, tp)):
            raise PlanError(f"{self.whole.name}: strict=True, and {told}. {_LESS_WHOLE}")
        return made

    def posed(self, tp: int, *, everything: bool = False) -> Posed:
        """The placement problem for `tp` ranks; `everything`: with all conversions of the table."""
        terms = Terms(
            tp,
            self.training,
            self.machine,
            self.pricing.bytes,
            self.options.shard_threshold,
            self._allowed(tp),
            everything,
            offered(self.analysis, self.matching, tp),
            self.caches,
        )
        return pose(self.analysis, self.matching, terms)

    def made_of(self, posed: Posed, solution: Solution, tp: int, group: str) -> Made:
        """The variant rewritten as any legal `solution` says, checked."""
        decision = decide(posed, solution)

        def rewrite_for(rank: int) -> Rewritten:
            reduced = self.options.reduce()
            target = Target(tp, group, self.training, reduced, rank)
            return self._checked(rewrite(self.analysis, decision, target), decision, tp)

        rewritten = rewrite_for(0)
        emitted, ways = rewritten.collectives, posed.ways
        found = Found(self.analysis, self.matching, decision, solution, emitted, ways)
        drawn = account(self.whole, found, self.pricing, self._asked(tp))
        return Made(drawn, posed, solution, decision, rewrite_for, rewritten)

    def _checked(self, rewritten: Rewritten, decision: Decision, tp: int) -> Rewritten:
        check(
            rewritten.graph,
            rewritten.values,
            rewritten.collectives,
            self.analysis,
            decision,
            training=self.training,
            tp=tp,
        )
        return rewritten

    def built(
        self,
        made: Made,
        where: Group,
        named: torch.device | None = None,
        shards: Mapping[str, torch.Tensor] | None = None,
    ) -> ShardedModel:
        """One rank's model around `shards` (None: the whole's), its graph on `named`, if given."""
        lost = shards is None and is_meta(self.model) and not is_real(where)
        device = torch.device("meta") if lost else where.device
        tree = build_tree(
            self.model,
            shards or dict(cut(self.whole.parameters, made.plan, where, device)),
            plan=made.plan,
            rank=where.rank,
            device=device,
            more=Further(skeleton(self.model), self.options, made.plan, where, device, _answer),
            store=GroupStore(where),
            imagined=where.size > 1 and not exists(where.name),
            baked=self.program.baked,
        )
        add_variant(
            tree, self.key(), self.program, made.layers(named or device, where.rank), made.plan
        )
        return tree

    def key(self) -> str:
        """What the variant for these inputs answers to."""
        inputs = Signature.of(self.model).bind((), self.inputs)
        return key_of(type(self.model).__name__, inputs, mode_of(self.model))

    def _asked(self, tp: int) -> Asked:
        options = self.options
        reduced = options.reduce()
        followed = options.plan.options if isinstance(options.plan, Plan) else {}
        return Asked(
            tp=tp,
            training=self.training,
            variant=self.key(),
            machine=self.machine,
            sizes=data_sizes(self.program, tensor_leaves(self.inputs)),
            optimizer=options.optimizer,
            state_dtype=options.state(),
            # a plan followed keeps the reasons for which it is as it is
            shard_threshold=cast("float", followed.get("shard_threshold", options.shard_threshold)),
            overrides=cast("Mapping[str, str]", followed.get("overrides", options.overrides)),
            reduce_dtype=str(reduced).removeprefix("torch.") if reduced else None,
        )

    def _allowed(self, tp: int) -> Mapping[str, Constraint]:
        """What a plan to follow, or overrides, leave to each parameter."""
        if isinstance(self.options.plan, Plan):
            plan = followed(self.options.plan, self.whole, tp, training=self.training)
            return as_planned(plan, self.analysis)
        asked = self.options.overrides
        return as_overridden(asked, self.whole, self.analysis, self.matching, tp)


def _answer(asked: Asking) -> Answer:
    """What a sharded model needs to answer a call that it has no graph for."""
    work = _Work(asked.model, asked.options, asked.inputs, asked.caches)
    made = work.made(asked.where.size, asked.where.name)
    layers = made.layers(asked.device, asked.where.rank)
    return Answer(work.key(), work.program, layers, made.plan)


def _captured(model: nn.Module, inputs: Mapping[str, Any], *, gradients: bool) -> Program:
    """The model's graph; of a model on meta the one that it has on the CPU, where it will be read.

    Code that asks for the device takes another way on meta, and plans would differ by that.
    """
    if is_meta(model):
        return capture(skeleton(model), valueless(inputs, torch.device("cpu")), gradients=gradients)
    return capture(model, inputs, gradients=gradients)
