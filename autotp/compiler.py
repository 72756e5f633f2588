"""From a model to the graph of one rank: the one file where the stages meet.

    capture → propagate → match → formulate → solve → interpret → rewrite → check → summarise

A `ModelCompiler` is one call of one model: the stages before `formulate` do not depend on the
number of ranks and run once. Calls that are planned together (a prefill and its decode steps) are
formulated each, and solved as one problem.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autotp.capture.cache import flatten_caches, widen_caches
from autotp.capture.capture import capture
from autotp.capture.clean import retarget_graph
from autotp.capture.generation_calls import GenerationCalls
from autotp.capture.heap import release_memory
from autotp.capture.inputs import choose_inputs, make_example_inputs
from autotp.capture.postconditions import find_program_faults
from autotp.capture.program import Program, list_tensor_leaves
from autotp.capture.sizes import Pricing, read_data_sizes
from autotp.capture.source_model import (
    copy_without_memory,
    copy_without_values,
    find_device,
    is_meta,
    read_source_model,
)
from autotp.checkpoint.gather import GroupStore
from autotp.checkpoint.quantized import refuse_quantised_model
from autotp.dtypes import check_sums
from autotp.errors import PlanError
from autotp.lower.check import check_types
from autotp.lower.node_meta import MetaPool
from autotp.lower.outline import outline
from autotp.lower.rewrite import Rewritten, Target, rewrite
from autotp.lower.shared_heads import share_heads
from autotp.lower.unmask import remove_masks
from autotp.options import Request
from autotp.planner.analysis import Decision
from autotp.planner.constraints import (
    check_followed_plan,
    constrain_to_overrides,
    constrain_to_plan,
)
from autotp.planner.formulate import PlacementProblem, formulate, interpret_solution
from autotp.planner.formulate_phases import PlannedPhase, formulate_phases
from autotp.planner.match import match
from autotp.planner.offers import find_offers
from autotp.planner.postconditions import (
    find_analysis_faults,
    find_matching_faults,
    find_problem_faults,
)
from autotp.planner.propagate import propagate
from autotp.planner.summary.findings import Call, Findings
from autotp.planner.summary.phases import add_phases
from autotp.planner.summary.summarise import summarise
from autotp.planner.terms import Constraint, Terms
from autotp.records.plan import CacheRecord, Plan
from autotp.records.replication import describe_excess_replication
from autotp.runtime.group.process_group import Group, group_exists, is_real
from autotp.runtime.layered_graph import ConditionalGraph, LayeredGraph
from autotp.runtime.model import ShardedModel, add_variant
from autotp.runtime.module_tree import build_tree, refuse_sharded
from autotp.runtime.shards import slice_parameters
from autotp.runtime.variant import Signature, describe_mode, find_key
from autotp.solver.joint import split_solution
from autotp.solver.problem import Problem, Solution
from autotp.solver.solve import solve
from autotp.stage_check import Stage, check_stage, is_switched_on

_LESS_REPLICATED = "Choose a smaller tp, or leave strict off to see the plan."


@dataclass(frozen=True, slots=True)
class CompiledVariant:
    """One call, planned and rewritten.

    - `problem`, `solution`: what was solved, for all calls that were planned together.
    - `rewrite`: gives the graph of a rank; `rewritten`: rank 0's.
    - `later`: the calls planned together with this one.
    """

    program: Program
    plan: Plan
    problem: Problem
    solution: Solution
    decision: Decision
    rewrite: Callable[[int], Rewritten]
    rewritten: Rewritten
    later: "tuple[CompiledVariant, ...]" = ()
    _layered: dict[object, LayeredGraph] = field(default_factory=dict[object, LayeredGraph])

    def layer_graph(self, device: torch.device, rank: int) -> LayeredGraph:
        """Give a rank's graph in layers, for `device`; equal shards have the same for all ranks."""
        graph_of = rank if self.rewritten.uneven else 0
        key = (device, graph_of)
        if key not in self._layered:
            graph = (self.rewrite(graph_of) if graph_of else self.rewritten).graph
            retarget_graph(graph, device)
            kept = MetaPool()
            masked, *others = remove_masks(graph, self.program.inputs, self.program.lifted)
            shorter = [
                ConditionalGraph(u.conditions, self._outline(u.graph, device, kept))
                for u in reversed(others)
            ]
            full = self._outline(masked.graph, device, kept)
            self._layered[key] = replace(full, shorter=tuple(shorter))
        return self._layered[key]

    def _outline(self, graph: fx.Graph, device: torch.device, kept: MetaPool) -> LayeredGraph:
        return outline(graph if self.plan.training else share_heads(graph, device), kept)


class ModelCompiler:
    """One call of one model, captured and analysed once, compiled for any number of ranks.

    - `inputs`: of the call, by name; None takes the request's, or makes them up.
    - `caches`: how earlier calls have laid out the tensors of a cache.
    - `calls`: how often the call comes, when several are planned together; `later`: the others.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        inputs: Mapping[str, Any] | None = None,
        caches: Mapping[str, CacheRecord] | None = None,
        calls: int = 1,
    ) -> None:
        refuse_sharded(model)
        refuse_quantised_model(model)
        self.model, self.request = model, request
        self.caches, self.calls = caches or {}, calls
        self.training = model.training if request.training is None else request.training
        self.later: tuple[ModelCompiler, ...] = ()
        self.longest: Pricing | None = None
        self.source = read_source_model(model)
        check_sums(self.source.parameters, request.reduce_dtype)
        given = inputs if inputs is not None else request.example_inputs
        if given is None:
            given, self.program = choose_inputs(model, self.training, self._capture)
        else:
            self.program = self._capture(given)
        self._check_stage("capture", find_program_faults(self.program, self._tensors()))
        self.inputs = Signature.of(model).add_implied(flatten_caches(given))
        self.analysis = propagate(
            self.program,
            list(self.source.parameters),
            request.rules,
            strict=request.strict,
            gradients=self.training,
        )
        self._check_stage("propagate", find_analysis_faults(self.analysis, request.rules))
        self.matching = match(self.analysis, request.rules)
        self._check_stage("match", find_matching_faults(self.analysis, self.matching))
        self.pricing = Pricing(self.program, list_tensor_leaves(self.inputs), request.reduce_dtype)

    @staticmethod
    def of(model: nn.Module, request: Request) -> "ModelCompiler":
        """Give the compiler of one call, or with `new_tokens` of a prefill and its decode steps."""
        if request.new_tokens:
            return _compile_generation(model, request)
        return ModelCompiler(model, request)

    def compile(self, tp: int, group: str) -> CompiledVariant:
        """Plan the call for `tp` ranks and rewrite it for the group called `group`."""
        compilers = (self, *self.later)
        formulated = [each.formulate(tp) for each in compilers]
        phases, problem = formulate_phases(
            [
                PlannedPhase(c.analysis, p, c.calls)
                for c, p in zip(compilers, formulated, strict=True)
            ]
        )
        solution = solve(problem)
        parts = zip(compilers, formulated, split_solution(phases, solution), strict=True)
        own, *others = [(c, p, part) for c, p, part in parts]
        first = own[0].lower(*own[1:], tp, group)
        later = [c.lower(p, part, tp, group, first.plan) for c, p, part in others]
        plan = add_phases(first.plan, [v.plan for v in later], [c.calls for c in compilers])
        if self.request.strict and (excess := describe_excess_replication(plan.parameters, tp)):
            raise PlanError(f"{self.source.name}: strict=True, but {excess}. {_LESS_REPLICATED}")
        return replace(first, plan=plan, problem=problem, solution=solution, later=tuple(later))

    def formulate(self, tp: int, *, everything: bool = False) -> PlacementProblem:
        """Formulate the placement problem for `tp` ranks; `everything`: with all conversions."""
        terms = Terms(
            tp=tp,
            training=self.training,
            request=self.request,
            priced=self.pricing.count_bytes,
            summed=self.pricing.count_sum_bytes,
            allowed=self._constraints(tp),
            everything=everything,
            offers=find_offers(self.analysis, self.matching, tp),
            caches=self.caches,
        )
        problem = formulate(self.analysis, self.matching, terms)
        self._check_stage("formulate", find_problem_faults(self.analysis, problem))
        return problem

    def lower(
        self,
        formulated: PlacementProblem,
        solution: Solution,
        tp: int,
        group: str,
        prefill: Plan | None = None,
    ) -> CompiledVariant:
        """Rewrite the call as any legal `solution` says, check it and summarise it as a plan.

        `prefill`: the plan of the call that this one was planned together with.
        """
        decision = interpret_solution(formulated, solution)

        def rewrite_for(rank: int) -> Rewritten:
            target = Target(tp, group, self.training, self.request.reduce_dtype, rank)
            rewritten = rewrite(self.analysis, decision, target)
            check_types(
                rewritten.graph,
                rewritten.values,
                rewritten.collectives,
                self.analysis,
                decision,
                training=self.training,
                tp=tp,
            )
            return rewritten

        rewritten = rewrite_for(0)
        findings = Findings(
            self.analysis, self.matching, decision, solution, rewritten.collectives, formulated.ways
        )
        sizes = read_data_sizes(self.program, list_tensor_leaves(self.inputs))
        call = Call(tp, self.training, self.key(), sizes, self.request, self.longest, prefill)
        plan = summarise(self.source, findings, self.pricing, call)
        return CompiledVariant(
            self.program, plan, formulated.problem, solution, decision, rewrite_for, rewritten
        )

    def build(
        self,
        compiled: CompiledVariant,
        group: Group,
        graph_device: torch.device | None = None,
        shards: Mapping[str, torch.Tensor] | None = None,
    ) -> ShardedModel:
        """Build one rank's model.

        - `shards`: its parameters; None takes slices of this model's.
        - `graph_device`: the device named in its graph; None: where the parameters are.
        """
        imagined = shards is None and is_meta(self.model) and not is_real(group)
        device = torch.device("meta") if imagined else group.device
        tree = build_tree(
            self.model,
            shards or dict(slice_parameters(self.source.parameters, compiled.plan, group, device)),
            plan=compiled.plan,
            group=group,
            device=device,
            source=copy_without_memory(self.model),
            capture_variant=partial(_capture_variant, self.request),
            store=GroupStore(group),
            imagined=group.size > 1 and not group_exists(group.name),
            baked=self.program.baked,
        )
        variants = (compiled, *compiled.later)
        for compiler, variant in zip((self, *self.later), variants, strict=True):
            layers = variant.layer_graph(graph_device or device, group.rank)
            add_variant(tree, compiler.key(), compiler.program, layers, variant.plan)
        return tree

    def key(self) -> str:
        """Give the key of the variant that answers these inputs."""
        inputs = Signature.of(self.model).bind((), self.inputs)
        return find_key(type(self.model).__name__, inputs, describe_mode(self.model))

    def _capture(self, given: Mapping[str, Any]) -> Program:
        """Capture the model's graph; of a model on meta the one that it has on the CPU.

        Its weights will be read onto a real device, and code that asks for the device may take
        another branch on meta.
        """
        inputs = Signature.of(self.model).add_implied(flatten_caches(given))
        if is_meta(self.model):
            bare, cpu = copy_without_memory(self.model), torch.device("cpu")
            return capture(bare, copy_without_values(inputs, cpu), gradients=self.training)
        return capture(self.model, inputs, gradients=self.training)

    def _check_stage(self, stage: Stage, faults: Iterator[str]) -> None:
        if self.request.check_stages or is_switched_on():
            check_stage(stage, self.source.name, faults)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Give the parameters and buffers that the graph may read, by name."""
        return dict((*self.model.named_parameters(), *self.model.named_buffers()))

    def _constraints(self, tp: int) -> Mapping[str, Constraint]:
        """Give what a plan to follow, or overrides, leave to each parameter."""
        if self.request.plan is not None:
            plan = check_followed_plan(self.request.plan, self.source, tp, training=self.training)
            return constrain_to_plan(plan, self.analysis)
        return constrain_to_overrides(
            self.request.overrides, self.source, self.analysis, self.matching, tp
        )


def _compile_generation(model: nn.Module, request: Request) -> ModelCompiler:
    """Give the compiler of a prefill, with that of a decode step, priced at the middle token."""
    tokens, given = request.new_tokens, request.example_inputs
    if given is None:
        given = make_example_inputs(model, training=False, room=tokens)
        given.pop("attention_mask", None)  # all ones: `generate` leaves it out
    calls, alone = (
        GenerationCalls.build(model, given),
        replace(request, new_tokens=0, training=False),
    )
    prefill = ModelCompiler(model, alone, calls.record_prefill())
    dynamic = prefill.program.dynamic

    def step(after: int) -> dict[str, Any]:
        longer = calls.lengthen(after) if dynamic else calls
        return longer.record_decode(prefill.program, longer.record_prefill())

    decode = ModelCompiler(model, alone, step(tokens // 2), calls=tokens)
    decode.longest = Pricing(decode.program, list_tensor_leaves(flatten_caches(step(tokens - 1))))
    prefill.later = (decode,)
    return prefill


def _capture_variant(request: Request, sharded: ShardedModel, inputs: Mapping[str, Any]) -> None:
    """Add the graph that answers `inputs` in the present mode of `sharded`, layouts kept."""
    state = sharded.sharded_state
    modes = {path: module.training for path, module in sharded.named_modules()}
    for path, module in state.source.named_modules():
        module.training = modes.get(path, sharded.training)
    given = copy_without_values(widen_caches(inputs, state.caches), find_device(state.source))
    request = replace(
        request, plan=state.plan, training=state.plan.training, overrides={}, new_tokens=0
    )
    compiler = ModelCompiler(state.source, request, given, state.caches)
    compiled = compiler.compile(state.group.size, state.group.name)
    # nothing is known of a tensor that was empty: another class of cache may fill that path
    for path, record in compiled.plan.caches.items():
        if record.bytes:
            state.caches.setdefault(path, record)
    layers = compiled.layer_graph(state.device, state.group.rank)
    add_variant(sharded, compiler.key(), compiler.program, layers, compiled.plan)
    del compiler, compiled, layers
    release_memory()
