"""One call of a model, from its capture to the graph of a rank: the stages one after the other.

capture → analyse → match → pose → solve → rewrite → account. Calls that are planned together are
posed and solved as one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn

from autotp.capture.cache import stated
from autotp.capture.capture import capture
from autotp.capture.clean import retarget
from autotp.capture.generation_calls import Calls
from autotp.capture.input_length import made_up
from autotp.capture.inputs import example_inputs
from autotp.capture.postconditions import find_program_faults
from autotp.capture.program import Program, tensor_leaves
from autotp.capture.sizes import Pricing, data_sizes
from autotp.capture.source_model import is_meta, skeleton, valueless, whole_of
from autotp.checkpoint.gather import GroupStore
from autotp.checkpoint.quantized import refuse_model
from autotp.cost.machine import Machine, load_machine
from autotp.dtypes import check_sums
from autotp.errors import PlanError
from autotp.further import Answer, Asking, Further
from autotp.lower.check import check
from autotp.lower.node_meta import Kept
from autotp.lower.outline import Outlined, Shorter, outline
from autotp.lower.rewrite import Rewritten, Target, rewrite
from autotp.lower.shared_heads import with_shared_heads
from autotp.lower.unmask import unmasked
from autotp.oprules import rulebook
from autotp.options import Options
from autotp.planner.analysis import Decision
from autotp.planner.constraints import as_overridden, as_planned, followed
from autotp.planner.formulate import Posed, decide, pose
from autotp.planner.formulate_phases import PosedPhase, pose_phases
from autotp.planner.match import match
from autotp.planner.offers import offered
from autotp.planner.postconditions import (
    find_analysis_faults,
    find_matching_faults,
    find_problem_faults,
)
from autotp.planner.propagate import analyse
from autotp.planner.summary.phases import with_phases
from autotp.planner.summary.summarise import Asked, Found, account
from autotp.planner.terms import Constraint, Terms
from autotp.records.plan import CacheRecord, Plan
from autotp.records.replication import much_whole
from autotp.runtime.group.process_group import Group, exists, is_real
from autotp.runtime.model import ShardedModel, add_variant
from autotp.runtime.module_tree import build_tree, refuse_sharded
from autotp.runtime.shards import cut
from autotp.runtime.variant import Signature, key_of, mode_of
from autotp.solver.joint import parted
from autotp.solver.problem import Problem, Solution
from autotp.solver.solve import solve
from autotp.stage_check import Stage, check_stage, is_switched_on

__all__ = ["Made", "Work"]

_LESS_WHOLE = "Choose a smaller tp, or leave strict off to see the plan."


@dataclass(frozen=True, slots=True)
class Made:
    """One variant, planned and rewritten.

    - `problem`, `solution`: what was solved, for all variants that were planned together.
    - `rewrite`: writes the graph of a rank. `later`: the variants planned together with this one.
    """

    program: Program
    plan: Plan
    problem: Problem
    solution: Solution
    decision: Decision
    rewrite: Callable[[int], Rewritten]
    rewritten: Rewritten
    later: "tuple[Made, ...]" = ()
    outlined: dict[object, Outlined] = field(default_factory=dict[object, Outlined])

    def layers(self, device: torch.device, rank: int) -> Outlined:
        """A rank's graph in layers, for `device`; where all parts are even, the same for all."""
        graph_of = rank if self.rewritten.uneven else 0
        key = (device, graph_of)
        if key not in self.outlined:
            graph = (self.rewrite(graph_of) if graph_of else self.rewritten).graph
            retarget(graph, device)
            program, kept = self.program, Kept()
            masked, *others = unmasked(graph, program.inputs, program.lifted)
            shorter = [
                Shorter(u.conditions, self._outlined(u.graph, device, kept))
                for u in reversed(others)
            ]
            most = self._outlined(masked.graph, device, kept)
            self.outlined[key] = replace(most, shorter=tuple(shorter))
        return self.outlined[key]

    def _outlined(self, graph: fx.Graph, device: torch.device, kept: Kept) -> Outlined:
        return outline(graph if self.plan.training else with_shared_heads(graph, device), kept)


class Work:
    """One model under one set of options: what is captured once and used for several tp.

    - `later`: the calls that are planned together with this one, and each of them comes `often`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        inputs: Mapping[str, Any] | None = None,
        caches: Mapping[str, CacheRecord] | None = None,
        often: int = 1,
    ) -> None:
        refuse_sharded(model)
        refuse_model(model)
        self.caches, self.often = caches or {}, often
        self.later: tuple[Work, ...] = ()
        self.longest: Pricing | None = None
        self.model, self.options = model, options
        self.training = model.training if options.training is None else options.training
        self.whole = whole_of(model)
        check_sums(self.whole.parameters, options.reduce())
        given = inputs if inputs is not None else options.example_inputs
        if given is None:
            given, self.program = made_up(model, self.training, self._captured)
        else:
            self.program = self._captured(given)
        self._check_stage("capture", find_program_faults(self.program, self._tensors()))
        self.inputs = Signature.of(model).spelled(stated(given))
        self.rules = rulebook.load()
        machine = options.machine
        self.machine = (
            machine if isinstance(machine, Machine) else load_machine(machine, rulebook.root())
        )
        names, strict, grad = list(self.whole.parameters), options.strict, self.training
        self.analysis = analyse(self.program, names, self.rules, strict=strict, gradients=grad)
        self._check_stage("propagate", find_analysis_faults(self.analysis, self.rules))
        self.matching = match(self.analysis, self.rules)
        self._check_stage("match", find_matching_faults(self.analysis, self.matching))
        self.pricing = Pricing(self.program, tensor_leaves(self.inputs), options.reduce())

    def _check_stage(self, stage: Stage, faults: Iterator[str]) -> None:
        if self.options.check_stages or is_switched_on():
            check_stage(stage, self.whole.name, faults)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the graph may read, by name."""
        named = self.model.named_parameters(), self.model.named_buffers()
        return {name: tensor for every in named for name, tensor in every}

    def _captured(self, given: Mapping[str, Any]) -> Program:
        inputs = Signature.of(self.model).spelled(stated(given))
        return _captured(self.model, inputs, gradients=self.training)

    @staticmethod
    def of(model: nn.Module, options: Options) -> "Work":
        """The work on one call, or, with `new_tokens`, on those that generating makes, the first of
        which has the others as its `later` ones.
        """
        return _generating(model, options) if options.new_tokens else Work(model, options)

    def made(self, tp: int, group: str) -> Made:
        """The variant planned for `tp` ranks and rewritten for the group called `group`."""
        works = (self, *self.later)
        posed = [work.posed(tp) for work in works]
        every = [PosedPhase(w.analysis, p, w.often) for w, p in zip(works, posed, strict=True)]
        phases, problem = pose_phases(every)
        solution = solve(problem)
        parts = zip(works, posed, parted(phases, solution), strict=True)
        own, *others = [(w, p, part) for w, p, part in parts]
        first = own[0].made_of(*own[1:], tp, group)
        later = [w.made_of(p, part, tp, group, first.plan) for w, p, part in others]
        plan = with_phases(first.plan, [m.plan for m in later], [w.often for w in works])
        if self.options.strict and (told := much_whole(plan.parameters, tp)):
            raise PlanError(f"{self.whole.name}: strict=True, and {told}. {_LESS_WHOLE}")
        found = {"plan": plan, "problem": problem, "solution": solution}
        return replace(first, **found, later=tuple(later))

    def posed(self, tp: int, *, everything: bool = False) -> Posed:
        """The placement problem for `tp` ranks; `everything`: with all conversions of the table."""
        terms = Terms(
            tp,
            self.training,
            self.machine,
            self.pricing.bytes,
            self.pricing.summed,
            self.options.shard_threshold,
            self._allowed(tp),
            everything,
            offered(self.analysis, self.matching, tp),
            self.caches,
        )
        problem = pose(self.analysis, self.matching, terms)
        self._check_stage("formulate", find_problem_faults(self.analysis, problem))
        return problem

    def made_of(
        self,
        posed: Posed,
        solution: Solution,
        tp: int,
        group: str,
        beside: Plan | None = None,
    ) -> Made:
        """The variant rewritten as any legal `solution` says, checked; `beside` has its weights."""
        decision = decide(posed, solution)

        def rewrite_for(rank: int) -> Rewritten:
            reduced = self.options.reduce()
            target = Target(tp, group, self.training, reduced, rank)
            return self._checked(rewrite(self.analysis, decision, target), decision, tp)

        rewritten = rewrite_for(0)
        emitted, ways = rewritten.collectives, posed.ways
        found = Found(self.analysis, self.matching, decision, solution, emitted, ways)
        drawn = account(self.whole, found, self.pricing, self._asked(tp, beside))
        return Made(self.program, drawn, posed.problem, solution, decision, rewrite_for, rewritten)

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
        for work, variant in zip((self, *self.later), (made, *made.later), strict=True):
            layers = variant.layers(named or device, where.rank)
            add_variant(tree, work.key(), work.program, layers, variant.plan)
        return tree

    def key(self) -> str:
        """What the variant for these inputs answers to."""
        inputs = Signature.of(self.model).bind((), self.inputs)
        return key_of(type(self.model).__name__, inputs, mode_of(self.model))

    def _asked(self, tp: int, beside: Plan | None) -> Asked:
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
            longest=self.longest,
            beside=beside,
        )

    def _allowed(self, tp: int) -> Mapping[str, Constraint]:
        """What a plan to follow, or overrides, leave to each parameter."""
        if isinstance(self.options.plan, Plan):
            plan = followed(self.options.plan, self.whole, tp, training=self.training)
            return as_planned(plan, self.analysis)
        asked = self.options.overrides
        return as_overridden(asked, self.whole, self.analysis, self.matching, tp)


def _generating(model: nn.Module, options: Options) -> Work:
    """The work on a prompt's call, with that on a new word's; priced halfway to the last word."""
    words = options.new_tokens
    given = options.example_inputs
    if given is None:
        given = example_inputs(model, training=False, room=words)
        given.pop("attention_mask", None)  # of ones: `generate` leaves it out
    calls, alone = Calls.of(model, given), replace(options, new_tokens=0, training=False)
    work = Work(model, alone, calls.first())
    free = work.program.dynamic

    def after(more: int) -> dict[str, Any]:
        longer = calls.longer(more) if free else calls
        return longer.next(work.program, longer.first())

    decode = Work(model, alone, after(words // 2), often=words)
    decode.longest = Pricing(decode.program, tensor_leaves(stated(after(words - 1))))
    work.later = (decode,)
    return work


def _answer(asked: Asking) -> Answer:
    """What a sharded model needs to answer a call that it has no graph for."""
    work = Work(asked.model, asked.options, asked.inputs, asked.caches)
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
