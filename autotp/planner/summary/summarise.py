"""Summarise: a decision as a Plan, in plain data.

The plan names axes and layouts, lists each rank's shards and the collectives with their payloads,
estimates memory, and says why replicated parameters are not sharded.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil, prod

import torch

from autotp.algebra.axis import Atom, Dim
from autotp.algebra.partition import UNCUT, Part, Partition
from autotp.algebra.placement import REPLICATED, SUMS, Placement
from autotp.algebra.split import Extent, Split
from autotp.capture.program import Program
from autotp.capture.sizes import Pricing
from autotp.capture.source_model import SourceModel, compute_fingerprint
from autotp.cost.collectives import count_wire_bytes, estimate_memory_bytes, estimate_time_ps
from autotp.cost.conversions import count_moved_bytes
from autotp.dtypes import dtype_name
from autotp.options import Request
from autotp.planner.analysis import AxisPair, EmittedCollective
from autotp.planner.layouts import Layouts
from autotp.planner.strategy import Strategy
from autotp.planner.summary.caches import count_cache_bytes, summarise_caches
from autotp.planner.summary.findings import Call, Findings
from autotp.planner.summary.ops import list_differing_ops, list_discovered_rules, list_unruled_ops
from autotp.planner.summary.reasons import Reasons
from autotp.records.plan import (
    CacheRecord,
    CollectiveRecord,
    Pair,
    ParameterRecord,
    PlacementRecord,
    Plan,
    Shard,
)
from autotp.records.replication import describe_excess_replication
from autotp.solver.problem import LEVELS, Solution


def summarise(model: SourceModel, findings: Findings, pricing: Pricing, call: Call) -> Plan:
    """The plan of a decision."""
    return _Summary(model, findings, pricing, call).build_plan()


class _Summary:
    """Builds one plan."""

    def __init__(
        self, model: SourceModel, findings: Findings, pricing: Pricing, call: Call
    ) -> None:
        self.model, self.found, self.pricing, self.call = model, findings, pricing, call
        self.analysis, self.forest = findings.analysis, findings.analysis.forest
        self.layouts = Layouts(findings.analysis, findings.matching)
        self.aliases: dict[str, list[str]] = defaultdict(list)
        for alias, name in model.tied.items():
            self.aliases[name].append(alias)
        self.names: dict[str, str] = {}
        for pair in findings.matching.pairs:
            self.names |= self._name_pair_axes(pair)
        for name, axis in findings.matching.experts.items():
            module = _find_common_module((name,))
            self.names.setdefault(axis.name, f"{module}.experts" if module else "experts")
        through = self._find_residual_axis()
        if through is not None:
            self.names.setdefault(through, "hidden")
        self._name_other_axes()
        self.reasons = Reasons(model, findings, pricing, call, self.layouts, self.names)
        self.pair_axis = self._map_axes_to_pairs()

    def build_plan(self) -> Plan:
        """The plan."""
        call, solution = self.call, self.found.solution
        parameters = self._summarise_parameters()
        total = sum(p.bytes for p in parameters.values())
        held = sum(p.replicated_bytes for p in parameters.values())
        fraction = held / total if total else 0.0
        read = self.analysis.parameters
        unused = sum(p.bytes for n, p in parameters.items() if n not in read) / max(total, 1)
        unused = call.prefill.unused_fraction if call.prefill else unused
        without = list_unruled_ops(self.analysis)
        program = self.analysis.program
        return Plan(
            model=self.model.name,
            fingerprint=compute_fingerprint(self.model),
            tp=call.tp,
            training=call.training,
            variant=call.variant,
            objective="communication",
            machine=call.request.machine.name,
            sizes=dict(call.sizes),
            pairs=tuple(self._summarise_pair(p) for p in self.found.matching.pairs),
            parameters=parameters,
            collectives=self._summarise_collectives(),
            cost=dict(zip(LEVELS, solution.cost, strict=True)),
            bound=dict(zip(LEVELS, solution.bound, strict=True)),
            gap=_find_gap(solution),
            method=solution.method,
            width=solution.width,
            variables=len(solution.choice),
            memory=self._estimate_memory(parameters),
            replicated_fraction=fraction,
            unruled=without,
            warnings=tuple(self._list_warnings(parameters, unused, without, program.reason)),
            dynamic=program.dynamic,
            options={
                "overrides": dict(call.overrides),
                "shard_threshold": call.shard_threshold,
                "optimizer": call.request.optimizer,
                "state_dtype": call.request.state_dtype,
                "reduce_dtype": _dtype_name(call.request.reduce_dtype),
                **_describe_rules(call.request),
            },
            choices={
                n.name: self._label_strategy(s) for n, s in self.found.decision.strategies.items()
            },
            unused_fraction=unused,
            discovered=list_discovered_rules(self.analysis),
            differing=list_differing_ops(self.found, tp=call.tp, training=call.training),
            caches=self._summarise_caches(),
        )

    # ── axes and pairs ───────────────────────────────────────────────────────────────────────

    def _find_residual_axis(self) -> str | None:
        """The axis outside every pair that most parameters have: the residual stream's."""
        count: dict[str, int] = defaultdict(int)
        for node in self.analysis.parameters.values():
            leaves = {a for d in self.analysis.dims[(node, 0)] for a in self.forest.list_leaves(d)}
            for atom in leaves:
                count[atom.name] += atom.name not in self.names
        return max(count, key=lambda name: count[name], default=None)

    def _name_pair_axes(self, pair: AxisPair) -> dict[str, str]:
        module = _find_common_module((*pair.openers, *pair.closers))
        return {a: f"{module}.{w}" if module else w for a, w in pair.names.items()}

    def _name_other_axes(self) -> None:
        """Name axes in no pair by the first parameter's dim that has them, and its size."""
        for name, node in self.analysis.parameters.items():
            for number, dim in enumerate(self.analysis.dims[(node, 0)]):
                leaves = list(self.forest.list_leaves(dim))
                for axis in leaves:
                    of = "" if len(leaves) == 1 else "part of "
                    label = f"{of}dim {number} ({axis.size})"
                    self.names.setdefault(axis.name, f"{_find_common_module((name,))}.{label}")

    def _summarise_pair(self, pair: AxisPair) -> Pair:
        cut = self._find_pair_partition(pair)
        tp, module = self.call.tp, _find_common_module((*pair.openers, *pair.closers))
        axes = [self.forest.find_axis(p.axis) for p in cut.parts] or [pair.axes[0]]
        several = {*self.found.matching.experts.values()}
        names = {a: "hidden" for a in axes if a not in pair.axes}
        named_axes = [*pair.axes, *(a for a in axes if a in several)]
        names |= {a: self.names[a.name].rpartition(".")[2] for a in named_axes}
        carrying = axes if cut.parts else pair.axes
        partition = cut if cut.parts else Partition((Part(axes[0].name, 1),))
        named = self.names.get(axes[0].name, f"{module}.hidden" if module else "hidden")
        return Pair(
            role=pair.role.name,
            axis=self._name_partition(cut) if len(cut.parts) > 1 else named,
            size=prod(a.units for a in axes),
            local_sizes=tuple(self._count_local_units(partition, r) for r in range(tp)),
            openers=pair.openers,
            closers=pair.closers,
            expression=self.forest.format(self._find_dim(pair, carrying), names),
            module=module,
            split=bool(cut.parts),
            note=self._describe_copies(cut) or self._describe_split_experts(pair)
            if cut.parts
            else self.reasons.explain_pair(pair),
        )

    def _find_dim(self, pair: AxisPair, axes: Sequence[Atom]) -> Dim:
        """The first dim of its parameters with one of `axes`, if any: a weight may be computed."""
        nodes = (self.analysis.parameters[n] for n in (*pair.openers, *pair.closers))
        dims = (d for node in nodes for d in self.analysis.dims[(node, 0)])
        found = (d for d in dims if any(self.forest.contains(d, a) for a in axes))
        return next(found, (axes[0],))

    def _count_local_units(self, cut: Partition, rank: int) -> int:
        """The units of all its axes that a rank has."""
        tp = self.call.tp
        sizes = [(self.forest.find_axis(p.axis).size.coefficient, p) for p in cut.parts]
        return prod(Extent(n, p.parts, p.stride).part(rank, tp)[1] for n, p in sizes)

    def _describe_copies(self, cut: Partition) -> str:
        """How a factored group shards its axes, as text."""
        factored = [p for p in cut.parts if p.parts]
        return "; ".join(
            f"{self.names[p.axis].rpartition('.')[2]} in {p.parts} shards, each on "
            f"{self.call.tp // p.parts} ranks"
            for p in factored
        )

    def _describe_split_experts(self, pair: AxisPair) -> str:
        """Why each expert is sharded: there are fewer experts than ranks."""
        several, tp = self.found.matching.experts, self.call.tp
        named = (several[n].units for n in pair.openers if n in several)
        few = next((n for n in named if n < tp), 0)
        return f"experts ({few}): too few for tp {tp}, so each is sharded" if few else ""

    def _find_pair_partition(self, pair: AxisPair) -> Partition:
        """The partition of most of the pair's bytes; empty if none are sharded.

        An embedding may be sharded along its other axis; otherwise only the pair's own axes and
        that of its experts count.
        """
        opener = self.analysis.parameters[pair.openers[0]]
        dims = self.analysis.dims[(opener, 0)] if pair.vocabulary else ()
        several = self.found.matching.experts
        experts = [several[n] for n in (*pair.openers, *pair.closers) if n in several]
        others = (a for d in dims for a in self.forest.list_leaves(d))
        axes = {a.name for a in (*pair.axes, *experts, *others)}
        weight: dict[Partition, int] = defaultdict(int)
        for name in (*pair.openers, *pair.closers):
            cut = self._find_placement(name).partition.among(axes)
            if cut.parts:
                weight[cut] += self.model.parameters[name].numel()
        return max(weight, key=lambda c: weight[c], default=UNCUT)

    def _name_partition(self, partition: Partition) -> str:
        """The printed name of a partition: `model.layers.0.self_attn.kv_heads*heads_per_kv`."""
        names = [self.names.get(axis, axis) for axis in partition.axes]
        joint = "*" if any(p.parts for p in partition.parts) else "+"
        return joint.join([names[0], *(n.rpartition(".")[2] for n in names[1:])])

    # ── parameters ───────────────────────────────────────────────────────────────────────────

    def _find_placement(self, name: str) -> Placement:
        return self.found.decision.parameters.get(name, REPLICATED)

    def _summarise_parameters(self) -> Mapping[str, ParameterRecord]:
        if self.call.prefill is not None:
            return self.call.prefill.parameters
        return {n: self._summarise_parameter(n, t) for n, t in self.model.parameters.items()}

    def _summarise_parameter(self, name: str, tensor: torch.Tensor) -> ParameterRecord:
        placement = self._find_placement(name)
        split = self._find_split(name, placement)
        layout = self.layouts.name_layout(name, placement)
        axis = self._name_partition(placement.partition) if split else None
        return ParameterRecord(
            name=name,
            layout=layout,
            dim=placement.dim if split else None,
            axis=axis,
            axis_size=self._count_units(placement.partition) if split else None,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            bytes=tensor.nbytes,
            split=split.encode() if split else (),
            shards=tuple(
                self._describe_shard(tensor, placement, split, r) for r in range(self.call.tp)
            ),
            placement=(PlacementRecord(placement.kind, placement.dim, axis or ""),),
            reason=self.reasons.explain_segments(split, placement.dim, axis or "")
            if split
            else self.reasons.explain_parameter(name, layout),
            gradient_partial=placement.kind in ("R~", "S~"),
            tied=tuple(self.aliases.get(name, ())),
        )

    def _count_units(self, partition: Partition) -> int:
        sizes = [self.forest.find_axis(axis).size.coefficient for axis in partition.axes]
        return prod(sizes) if any(p.parts for p in partition.parts) else sum(sizes)

    def _find_split(self, name: str, placement: Placement) -> Split | None:
        node = self.analysis.parameters.get(name)
        return self.analysis.split((node, 0), placement) if node else None

    def _describe_shard(
        self, tensor: torch.Tensor, placement: Placement, split: Split | None, rank: int
    ) -> Shard:
        if split is None:
            return Shard(tuple(tensor.shape), tensor.nbytes, ())
        shape = list(tensor.shape)
        shape[placement.dim] = split.local_length(rank, self.call.tp)
        size = tensor.nbytes // tensor.shape[placement.dim] * shape[placement.dim]
        return Shard(tuple(shape), size, tuple(split.ranges(rank, self.call.tp)))

    # ── collectives, memory, warnings ────────────────────────────────────────────────────────

    def _map_axes_to_pairs(self) -> dict[str, str]:
        """For each sharded axis of a pair, the printed name of that pair's axis."""
        split = [(p, self._summarise_pair(p)) for p in self.found.matching.pairs]
        own = {a.name: r.axis for p, r in reversed(split) for a in p.axes if r.split}
        cuts = {a: r.axis for p, r in reversed(split) for a in self._find_pair_partition(p).axes}
        return cuts | own

    def _summarise_collectives(self) -> tuple[CollectiveRecord, ...]:
        forward = [c for c in self.found.collectives if c.phase == "forward"]
        backward = [c for c in self.found.collectives if c.phase == "backward"]
        return tuple(self._summarise_collective(c) for c in [*forward, *reversed(backward)])

    def _summarise_collective(self, run: EmittedCollective) -> CollectiveRecord:
        ranks = run.ranks or self.call.tp
        shares = run.shares or (Fraction(1),) * len(run.metas)
        size = self.pricing.count_sum_bytes if run.kind in SUMS else self.pricing.count_bytes
        payload = sum(
            count_moved_bytes(run.kind, size(m), ranks, share)
            if run.kind != "all_reduce"
            else ceil(size(m) * share)
            for m, share in zip(run.metas, shares, strict=True)
        )
        return CollectiveRecord(
            kind=run.kind,
            phase=run.phase,
            where=run.where,
            payload_bytes=payload,
            wire_bytes=count_wire_bytes(run.kind, payload, ranks),
            time_ps=estimate_time_ps(run.kind, payload, ranks, self.call.request.machine),
            axis=next((self.pair_axis[a] for a in run.axes if a in self.pair_axis), ""),
            group="tp" if not run.ranks else f"tp/{run.ranks}:{run.stride}",
        )

    def _estimate_memory(self, parameters: Mapping[str, ParameterRecord]) -> dict[str, int]:
        by_dtype: dict[str, int] = defaultdict(int)
        for record in parameters.values():
            by_dtype[record.dtype] += max(s.bytes for s in record.shards)
        call = self.call
        memory = estimate_memory_bytes(
            by_dtype, call.request.optimizer, call.request.state_dtype, training=call.training
        )
        memory = {**memory, "buffers": sum(b.nbytes for b in self.model.buffers.values())}
        if self.analysis.program.carried:
            memory["kv_cache"] = count_cache_bytes(self._summarise_caches().values(), call.tp)
        return memory

    def _summarise_caches(self) -> dict[str, CacheRecord]:
        return summarise_caches(self.found, self._name_partition, self.call.longest or self.pricing)

    def _list_warnings(
        self,
        parameters: Mapping[str, ParameterRecord],
        unused: float,
        unruled: Sequence[str],
        reason: str,
    ) -> Iterable[str]:
        excess = "" if self.call.prefill else describe_excess_replication(parameters, self.call.tp)
        if excess:
            yield excess
            if unused:
                yield (
                    f"{100 * unused:.3g} % of the parameter bytes are in parameters that these "
                    "inputs do not use: pass example_inputs that do"
                )
        if unruled:
            yield (
                f"{len(unruled)} nodes have no rule and run on replicated operands: "
                f"{', '.join(unruled[:4])}"
            )
        if reason:
            fixed = _list_fixed_sizes(self.analysis.program)
            sizes = (
                ", ".join(f"{name} {size}" for name, size in fixed.items()) or "those of the inputs"
            )
            yield (
                f"the graph is valid for these sizes only: {sizes}; other sizes are captured when "
                f"they occur. With dynamic sizes, torch.export fails: {reason}"
            )

    def _label_strategy(self, strategy: Strategy) -> str:
        if not strategy.partition.parts:
            return strategy.label
        return f"{strategy.label.partition(':')[0]}:{self._name_partition(strategy.partition)}"


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def _describe_rules(request: Request) -> dict[str, object]:
    """The contents of the rule files that were passed; empty without any."""
    return {"rules": request.rules.extensions} if request.rules.extensions else {}


def _find_gap(solution: Solution) -> float:
    for cost, bound in zip(solution.cost, solution.bound, strict=True):
        if cost != bound:
            return (cost - bound) / max(abs(bound), 1)
    return 0.0


def _list_fixed_sizes(program: Program) -> dict[str, int]:
    """The sizes of data that the capture had to fix, by what they are of."""
    found: dict[str, int] = {}
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    for name, node in zip(program.inputs, values, strict=True):
        for kind, dim in zip(("batch", "sequence"), program.data_dims[name], strict=False):
            size = values[node].shape[dim]
            if type(size) is int and found.setdefault(kind, size) != size:
                found[f"{name} {kind}"] = size
    return found


def _find_common_module(names: Sequence[str]) -> str:
    """The longest module path that all parameters share."""
    paths = [n.split(".")[:-1] for n in names]
    shared = 0
    while all(len(p) > shared and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return ".".join(paths[0][:shared])
