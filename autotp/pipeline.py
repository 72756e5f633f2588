"""The one place where the stages meet: capture → analyse → match → pose → solve → rewrite → account.

`plan` stops at the plan; `parallelize` builds one rank's model; `verify` builds every rank's and runs
them in lockstep beside the whole model.
"""

import copy
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autotp.run.conjugates  # noqa: F401  registers the ops that rewritten graphs hold
from autotp import rulebook
from autotp.analysis import Analysis, Decision, Matching
from autotp.core.evidence import Evidence
from autotp.core.iopddl import solution_json, to_iopddl
from autotp.core.machine import Machine, load_machine
from autotp.core.placement import Placement
from autotp.core.plan import Plan
from autotp.core.problem import Solution
from autotp.core.split import Split
from autotp.core.trace import Trace
from autotp.errors import PlanError
from autotp.layouts import LAYOUTS, Layouts, overridden
from autotp.options import Keywords, Options
from autotp.passes.account import Asked, Found, Whole, account, fingerprint
from autotp.passes.analyse import analyse
from autotp.passes.capture import capture
from autotp.passes.capture_inputs import example_inputs
from autotp.passes.check import check
from autotp.passes.clean import retarget
from autotp.passes.match import match
from autotp.passes.outline import Outlined, outline
from autotp.passes.pose import Posed, Terms, decide, pose
from autotp.passes.rewrite import Rewritten, Target, rewrite
from autotp.passes.solve import solve
from autotp.program import Program, named_leaves
from autotp.proof import prove
from autotp.run.blocks import take
from autotp.run.group import Group, agree, resolve
from autotp.run.model import ShardedModel
from autotp.run.tree import build_tree
from autotp.run.variant import Signature, key_of
from autotp.sizes import Pricing

__all__ = ["dry_run", "parallelize", "plan", "verify"]


def plan(model: nn.Module, tp: int, **options: Unpack[Keywords]) -> Plan:
    """The plan of `model` over `tp` ranks: needs no device, no group and no weights.

    - `example_inputs`: a mapping of inputs; their sizes price the plan. Default: see docs.
    - `training`: gradients are wanted; default `model.training`.
    - `machine`: a name of rules/machines/, a path, or a Machine.
    - `optimizer`, `state_dtype`: for the memory account.
    - `overrides`: globs over parameter names to column, row, vocabulary, expert or replicated.
    - `shard_threshold`: parameters smaller than this part of the largest are free to stay whole.
    - `reduce_dtype`: sums over the group are made in it.
    - `strict`: raise for an op without a rule, or more than 10 % of the bytes whole.
    - `plan`: a Plan, or the path of one, to follow instead of solving.

    Raises PlanError, CaptureError, RuleError, UnknownOpError.
    """
    _check_tp(tp)
    return _Work(model, Options(**options)).made(tp, "tp").plan


def parallelize(
    model: nn.Module,
    tp: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    **options: Unpack[Keywords],
) -> ShardedModel:
    """This rank's part of `model`, ready to call; the model given is left as it was.

    - `tp`: the number of ranks; None takes the group's size.
    - `mesh`: a DeviceMesh (its "tp" dim); `group`: a process group; `rank`: build that rank's model
      without any group, to look at. Without them: the whole world, initialised under torchrun.
    - Further keywords: as for `plan`.

    Raises as `plan` does, and PlanError on every rank if their plans differ.
    """
    where = resolve(tp, mesh=mesh, group=group, rank=rank)
    work = _Work(model, Options(**options))
    made = work.made(where.size, where.name)
    agree(where, made.plan.hash, "the plan")
    return work.built(made, where)


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

    - `gradients`: compare every parameter's gradient; None: as `training`; True plans with training.
    - `seed`: of the inputs drawn and of the projection that serves as a loss where there is none.
    - Further keywords: as for `plan`.
    """
    _check_tp(tp)
    chosen = Options(**options)
    if gradients and chosen.training is None:
        chosen = replace(chosen, training=True)
    work = _Work(model, chosen)
    made = work.made(tp, "tp")
    ranks = [work.built(made, Group("tp", tp, r, _device(model))) for r in range(tp)]
    wanted = made.plan.training if gradients is None else gradients
    return prove(
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


def dry_run(
    model: nn.Module, tp: int, *, rank: int = 0, **options: Unpack[Keywords]
) -> dict[str, str | bytes]:
    """The files of a dry run by name: plan, rewritten graph, and the placement problem solved."""
    where = resolve(tp, rank=rank)
    work = _Work(model, Options(**options))
    made = work.made(tp, where.name)
    sharded = work.built(made, replace(where, device=torch.device("meta")))
    problem = to_iopddl(made.posed.problem, made.solution)
    return {
        "plan.json": made.plan.to_json(),
        "graph.py": sharded.code(),
        "graph.json": json.dumps(_graph_json(made.rewritten), indent=1) + "\n",
        "problem.json.gz": gzip.compress(json.dumps(problem).encode(), mtime=0),
        "solution.json": json.dumps(solution_json(made.posed.problem, made.solution)) + "\n",
    }


@dataclass(frozen=True, slots=True)
class Made:
    """One variant, planned and rewritten."""

    plan: Plan
    posed: Posed
    solution: Solution
    decision: Decision
    rewritten: Rewritten
    outlined: dict[torch.device, Outlined] = field(default_factory=dict[torch.device, Outlined])

    def layers(self, device: torch.device) -> Outlined:
        """The rewritten graph in layers, for `device`; made once, the same for every rank."""
        if device not in self.outlined:
            retarget(self.rewritten.graph, device)
            self.outlined[device] = outline(self.rewritten.graph)
        return self.outlined[device]


class _Work:
    """One model under one set of options: what is captured once and used for several tp."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.options = model, options
        self.training = model.training if options.training is None else options.training
        given = inputs if inputs is not None else options.example_inputs
        if given is None:
            given = example_inputs(model, self.training)
        self.inputs = Signature.of(type(model)).spelled(given)
        self.rules = rulebook.load()
        machine = options.machine
        self.machine = (
            machine if isinstance(machine, Machine) else load_machine(machine, rulebook.root())
        )
        self.whole = _whole(model)
        self.program = capture(model, self.inputs)
        names = list(self.whole.parameters)
        self.analysis = analyse(self.program, names, self.rules, strict=options.strict)
        self.matching = match(self.analysis, self.rules)
        self.pricing = Pricing(self.program, _tensors(self.inputs))

    def made(self, tp: int, group: str) -> Made:
        """The variant planned for `tp` ranks and rewritten for the group called `group`."""
        posed = self.posed(tp)
        made = self.made_of(posed, solve(posed.problem), tp, group)
        self._refuse_whole(made.plan)
        return made

    def posed(self, tp: int, *, everything: bool = False) -> Posed:
        """The placement problem for `tp` ranks; `everything`: with all conversions of the table."""
        terms = Terms(
            tp,
            self.training,
            self.machine,
            self.pricing.bytes,
            self.options.shard_threshold,
            self._allowed(tp, self._given(tp)),
            everything,
        )
        return pose(self.analysis, self.matching, terms)

    def made_of(self, posed: Posed, solution: Solution, tp: int, group: str) -> Made:
        """The variant rewritten as any legal `solution` says, checked."""
        decision = decide(posed, solution)
        target = Target(tp, group, self.training, self.options.reduce())
        rewritten = rewrite(self.analysis, decision, target)
        found = Found(self.analysis, self.matching, decision, solution, rewritten.collectives)
        drawn = account(self.whole, found, self.pricing, self._asked(tp))
        check(
            rewritten.graph,
            rewritten.values,
            rewritten.collectives,
            self.analysis,
            decision,
            training=self.training,
        )
        return Made(drawn, posed, solution, decision, rewritten)

    def built(self, made: Made, where: Group) -> ShardedModel:
        """One rank's model around its shards."""
        device = torch.device("meta") if _is_meta(self.model) and not _real(where) else where.device
        tree = build_tree(
            self.model,
            dict(self._shards(made.plan, where, device)),
            plan=made.plan,
            rank=where.rank,
            device=device,
            make_variant=self._maker(where, made.plan, device),
        )
        tree.add_variant(self._key(), self.program, made.layers(device), made.plan)
        return tree

    def _shards(
        self, drawn: Plan, where: Group, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, whole in self.whole.parameters.items():
            record = drawn.parameters[name]
            local = whole.detach()
            if record.dim is not None:
                split = Split.decode(record.split)
                local = take(local, record.dim, split, where.rank, where.size)
            yield name, local.to(device, copy=True).contiguous()

    def _maker(
        self, where: Group, first: Plan, device: torch.device
    ) -> Callable[[ShardedModel, Mapping[str, Any]], None]:
        """What captures a further variant: from a meta copy, with the parameters' layouts kept."""
        skeleton = _skeleton(self.model)
        options = replace(self.options, plan=first, training=first.training)

        def make(sharded: ShardedModel, inputs: Mapping[str, Any]) -> None:
            skeleton.train(sharded.training)
            work = _Work(skeleton, options, _on_meta(inputs))
            made = work.made(where.size, where.name)
            sharded.add_variant(work._key(), work.program, made.layers(device), made.plan)

        return make

    def _key(self) -> str:
        inputs = Signature.of(type(self.model)).bind((), self.inputs)
        return key_of(type(self.model).__name__, inputs, self.model.training)

    def _asked(self, tp: int) -> Asked:
        options = self.options
        reduced = options.reduce()
        return Asked(
            tp=tp,
            training=self.training,
            variant=self._key(),
            machine=self.machine,
            sizes=_sizes(self.program, _tensors(self.inputs)),
            optimizer=options.optimizer,
            state_dtype=options.state_dtype,
            shard_threshold=options.shard_threshold,
            overrides=options.overrides,
            reduce_dtype=str(reduced).removeprefix("torch.") if reduced else None,
        )

    # ── overrides and given plans ────────────────────────────────────────────────────────────

    def _given(self, tp: int) -> Plan | None:
        given = self.options.plan
        if given is None:
            return None
        drawn = given if isinstance(given, Plan) else Plan.from_json(Path(given))
        where = f"plan= (for {drawn.model}, tp {drawn.tp})"
        if drawn.tp != tp:
            raise PlanError(f"{where}: tp is {tp} here. Give a plan for tp {tp}, or tp={drawn.tp}.")
        if drawn.fingerprint != fingerprint(self.whole):
            raise PlanError(
                f"{where}: its {len(drawn.parameters)} parameters are not the "
                f"{len(self.whole.parameters)} of {self.whole.name}{_difference(drawn, self.whole)}. "
                "Give the plan of this very model, or none."
            )
        if drawn.training != self.training:
            raise PlanError(
                f"{where}: was made with training={drawn.training}, asked for is "
                f"training={self.training}. Pass training={drawn.training}, or make another plan."
            )
        return drawn

    def _allowed(
        self, tp: int, followed: Plan | None
    ) -> dict[str, Callable[[Placement], bool]]:
        if followed is not None:
            return {n: self._as_planned(followed, n) for n in self.analysis.parameters}
        allowed: dict[str, Callable[[Placement], bool]] = {}
        layouts = Layouts(self.analysis, self.matching)
        for glob, layout in self.options.overrides.items():
            for name in self._chosen(glob, layout):
                allowed[name] = _having(layouts, name, layout)
        return allowed

    def _as_planned(self, followed: Plan, name: str) -> Callable[[Placement], bool]:
        record = followed.parameters[name]
        node = self.analysis.parameters[name]
        dims = self.analysis.dims[(node, 0)]

        def same(placement: Placement) -> bool:
            if placement.kind != "S":
                return record.dim is None and placement.kind == record.placement[0].kind
            if placement.dim != record.dim:
                return False
            forest = self.analysis.forest
            atom = forest.find(forest.atoms[int(placement.axis[1:])])
            split = forest.split(dims[placement.dim], atom)
            return split is not None and split.encode() == record.split

        return same

    def _chosen(self, glob: str, layout: str) -> list[str]:
        if layout not in LAYOUTS:
            close = get_close_matches(layout, LAYOUTS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise PlanError(
                f"overrides: {glob!r} asks for layout {layout!r}; layouts are "
                f"{', '.join(LAYOUTS)}.{hint}"
            )
        names = [n for n in self.analysis.parameters if overridden(n, glob)]
        if not names:
            every = list(self.whole.parameters)
            close = get_close_matches(glob, every, 3, 0.3) or every[:3]
            raise PlanError(
                f"overrides: {glob!r} matches none of the {len(every)} parameters of "
                f"{self.whole.name}. Names are such as {', '.join(close)}."
            )
        return names

    def _refuse_whole(self, drawn: Plan) -> None:
        if self.options.strict and drawn.tp > 1 and drawn.replicated_fraction > 0.1:
            raise PlanError(
                f"{self.whole.name}: strict=True, and every rank holds "
                f"{drawn.replicated_fraction:.1%} of the parameter bytes whole (more than 10 %). "
                "Choose a tp that divides more axes, or leave strict off to see the plan."
            )


def _having(layouts: Layouts, name: str, layout: str) -> Callable[[Placement], bool]:
    def has(placement: Placement) -> bool:
        found = layouts.of(name, placement)
        return found == layout or (layout == "replicated" and placement.kind != "S")

    return has


def _check_tp(tp: object) -> None:
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise PlanError(f"tp={tp!r}: must be a whole number of ranks, 1 or more, such as tp=8.")


def _whole(model: nn.Module) -> Whole:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            parameters[name] = tensor
    return Whole(type(model).__name__, parameters, dict(model.named_buffers()), tied)


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model on meta: its structure without any values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _on_meta(inputs: Mapping[str, Any]) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    return {k: torch.utils._pytree.tree_map(moved, v) for k, v in inputs.items()}


def _tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaves = named_leaves(inputs)
    return {k: v for k, v in leaves.items() if isinstance(v, torch.Tensor)}


def _sizes(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Batch and sequence of the inputs that the plan is priced for."""
    sizes: dict[str, int] = {}
    for name in program.inputs:
        dims = program.data_dims.get(name, ())
        for dim, word in zip(dims, ("batch", "sequence"), strict=False):
            size = inputs[name].shape[dim]
            if sizes.setdefault(word, size) != size:
                sizes[f"{name} {word}"] = size
    return sizes


def _difference(drawn: Plan, whole: Whole) -> str:
    for name, record in drawn.parameters.items():
        tensor = whole.parameters.get(name)
        if tensor is None:
            return f" (the model has no {name})"
        if tuple(tensor.shape) != record.shape:
            return f" ({name} is {list(record.shape)} in the plan, {list(tensor.shape)} in the model)"
    return ""


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _real(where: Group) -> bool:
    return dist.is_initialized() and where.name != "tp"


def _graph_json(rewritten: Rewritten) -> list[dict[str, Any]]:
    """The flat rewritten graph, a node an entry, with each value's placement."""
    entries: list[dict[str, Any]] = []
    for node in rewritten.graph.nodes:
        traced = rewritten.values.get(node.name)
        val = node.meta.get("val")
        entries.append(
            {
                "name": node.name,
                "op": node.op,
                "target": str(node.target),
                "args": [str(a) for a in node.args],
                "kwargs": {k: str(v) for k, v in node.kwargs.items()},
                "module": next((e[0] for e in reversed((node.meta.get("nn_module_stack") or {}).values())), ""),
                "shape": [str(s) for s in val.shape] if isinstance(val, torch.Tensor) else None,
                "placement": str(traced.placement) if traced else None,
                "origin": traced.origin if traced else None,
            }
        )
    return entries
