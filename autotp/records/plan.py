"""The plan of one model for one tensor-parallel size: plain data, equal on every rank.

It contains no torch object; JSON round-trips exactly; `hash` covers everything that ranks must
agree on, and nothing that only describes how the plan was found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from autotp.algebra.placement import Kind
from autotp.algebra.split import Split
from autotp.errors import PlanError
from autotp.records.display import render_rich, render_text
from autotp.records.document import hash_content, read_document, write_document
from autotp.records.json_record import RecordError

BUCKET: Final = "bucket of replicated parameters"
"""The place of the one all-reduce that sums the gradients of replicated parameters."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of a parameter on one rank.

    `ranges`: the ordered `[start, stop)` intervals of the parameter's `dim` that the rank has;
    empty if it has all.
    """

    shape: tuple[int, ...]
    bytes: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """An `algebra.placement.Placement` whose axis has a readable name."""

    kind: Kind
    dim: int = -1
    axis: str = ""


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter: `layout` is column, row, vocabulary, expert, norm or replicated.

    - `dim`, `axis`: the sharded dim and its axis; None if the parameter is replicated. `axis` is a
      name such as `model.layers.0.self_attn.heads`; `axis_size` its size.
    - `split`: the flat form of the `algebra.split.Split` of `dim`; empty if replicated.
    - `shards`: one entry per rank.
    - `reason`: why it, or some of its segments, are replicated; empty when all is sharded.
    - `gradient_partial`: its gradient is summed over the group in the shared bucket.
    - `tied`: further names of the same tensor.
    """

    name: str
    layout: str
    dim: int | None
    axis: str | None
    axis_size: int | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    split: tuple[int, ...]
    shards: tuple[Shard, ...]
    placement: tuple[PlacementRecord, ...]
    reason: str = ""
    gradient_partial: bool = False
    tied: tuple[str, ...] = ()

    @property
    def replicated_bytes(self) -> int:
        """The bytes that every rank has: all, or those of the segments without the axis."""
        if self.dim is None:
            return self.bytes
        split = Split.decode(self.split)
        return self.bytes * split.count_replicated() // split.length()


@dataclass(frozen=True, slots=True)
class Pair:
    """Openers (column-parallel) and closers (row-parallel) that share one pairable axis.

    - `role`: attention, mlp, experts, vocabulary, or "pair".
    - `axis`, `size`, `local_sizes` (one entry per rank; all are `size` if the axis is not split).
    - `openers`, `closers`: parameter names. A vocabulary pair may have no closers.
    - `expression`: the opener's output dim in the notation of docs, e.g. `kv*g*d`.
    - `module`: the longest common module path of its parameters.
    - `note`: why the axis is not split, with the sizes that would split it; empty when split.
    """

    role: str
    axis: str
    size: int
    local_sizes: tuple[int, ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    expression: str
    module: str
    split: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective of a call (forward), or of a forward and backward pass.

    - `kind`: all_reduce, all_gather, reduce_scatter or all_to_all; `phase`: forward or backward.
    - `where`: module path of the value, e.g. `model.layers.0.self_attn.o_proj`, and its op in
      brackets where the module has others in modules of its own; or `BUCKET`.
    - `payload_bytes`: the largest tensor on a rank (all-gather: its result; reduce-scatter: its
      input), `wire_bytes`: what each rank sends in a ring; both at the plan's `sizes`.
    - `time_ps`: estimated for the plan's machine, in picoseconds.
    - `group`: "tp", or a sub-group.
    - `axis`: the pairable axis whose split requires it, if any; the report lists the collective
      with that pair, or else with the pair whose parameters `where` names.
    """

    kind: str
    phase: str
    where: str
    payload_bytes: int
    wire_bytes: int
    time_ps: int
    group: str = "tp"
    axis: str = ""


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """One tensor of a cache: every call takes and returns it with the same sharding.

    - `name`: its path in the cache, e.g. `layers.0.keys`.
    - `dim`, `axis`: the sharded dim and its axis; None if it is replicated. `size`: the full size
      of that dim; 0 if there is none. `split`: the flat form of its `algebra.split.Split`.
    - `bytes`: of the full tensor, at the greatest length that the plan covers.
    """

    name: str
    dim: int | None = None
    axis: str | None = None
    size: int = 0
    split: tuple[int, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One kind of call that was planned together with others.

    - `name`: prefill or decode. `calls`: the number of such calls.
    - `variant`, `sizes`, `collectives`: of one such call, as in a plan; `time_ps`: the time of its
      collectives, in picoseconds.
    """

    name: str
    calls: int
    variant: str
    sizes: Mapping[str, int]
    collectives: tuple[CollectiveRecord, ...]
    time_ps: int


@dataclass(frozen=True, slots=True)
class DiscoveredRecord:
    """An op without a row: the `rule` discovered by running it, and the modules that use it."""

    op: str
    rule: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DifferingRecord:
    """An op that all ranks run on the same values, and whose result may differ between ranks.

    - `phase`: forward or backward; `reason`: how results may differ; `where`: the modules.
    """

    op: str
    phase: str
    reason: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The layouts of all parameters, the collectives they require, and their cost.

    - `model`: a printable name (class name).
    - `fingerprint`: hash over parameter names, shapes, dtypes.
    - `variant`: printable inputs present and mode, e.g. "attention_mask, input_ids · eval".
    - `sizes`: the sizes for which costs were estimated, e.g. {"batch": 1, "sequence": 4096}.
    - `cost`: level name to integer (solver.problem.LEVELS); `bound` the same; `gap` relative, 0.0
      when proven optimal; `method`, `width`, `variables` describe how it was solved.
    - `memory`: bytes of the largest rank under "parameters", "gradients", "optimizer", "buffers",
      and under "kv_cache", at its greatest length, where calls take or return a cache.
    - `replicated_fraction`: replicated bytes over all parameter bytes; tied parameters count once.
    - `unused_fraction`: the share of all parameter bytes that the captured graph does not read:
      towers of inputs that were not given.
    - `unruled`: ops without a rule, as "op at module path: reason"; they run replicated.
    - `discovered`: rules discovered by running ops without one. `differing`: ops on replicated
      values whose results may differ between ranks.
    - `caches`: tensors of the cache that calls take or return, by path; empty without one.
    - `phases`: the calls planned together, this plan's own first; empty for a call planned alone.
    - `options`: what was requested (overrides, shard_threshold, optimizer, state_dtype,
      reduce_dtype).
    - `choices`: node name to the label of the strategy chosen, for readers of the graph.

    Constraints:
    - The values of `options` are JSON values, with tuples for lists; `gap` is finite.
    """

    model: str
    fingerprint: str
    tp: int
    training: bool
    variant: str
    objective: str
    machine: str
    sizes: Mapping[str, int]
    pairs: tuple[Pair, ...]
    parameters: Mapping[str, ParameterRecord]
    collectives: tuple[CollectiveRecord, ...]
    cost: Mapping[str, int]
    bound: Mapping[str, int]
    gap: float
    method: str
    width: int
    variables: int
    memory: Mapping[str, int]
    replicated_fraction: float
    unruled: tuple[str, ...]
    warnings: tuple[str, ...]
    dynamic: bool
    options: Mapping[str, object]
    choices: Mapping[str, str]
    unused_fraction: float = 0.0
    discovered: tuple[DiscoveredRecord, ...] = ()
    differing: tuple[DifferingRecord, ...] = ()
    caches: Mapping[str, CacheRecord] = field(default_factory=dict[str, CacheRecord])
    phases: tuple[PhaseRecord, ...] = ()

    @property
    def hash(self) -> str:
        """The SHA-256, in hexadecimal, of the layouts and their cost; equal on all ranks.

        How the plan was found (cost levels, bound, method) is excluded: a plan made with `plan=`
        has the hash of the plan that it follows.
        """
        return hash_content(self, _SEARCH)

    def to_json(self) -> str:
        """Write the plan as JSON text, with `format`, `version` and `hash` before its own keys."""
        return write_document(self, _FORMAT, _VERSION, _SEARCH)

    @classmethod
    def from_json(cls, text_or_path: str | Path) -> "Plan":
        """Read a plan from JSON text, or from the path of a JSON file.

        Raises PlanError if the text is truncated, has another version, lacks or misspells a key,
        has a value of a wrong type, contradicts itself, or was changed after it was written.
        """
        given = cast(object, text_or_path)  # whatever a caller without types passed
        if not isinstance(given, str | Path):
            raise PlanError(
                f"plan: it is of type {type(given).__name__}. Give JSON text or the path of a file."
            )
        if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
            return _read_plan(given, "plan text")
        where = f"plan file {given if len(str(given)) < 300 else str(given)[:50] + ' …'}"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise PlanError(f"{where}: does not exist. {_ADVICE}") from error
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise PlanError(f"{where}: cannot be read: {reason}. {_ADVICE}") from error
        return _read_plan(text, where)

    def __str__(self) -> str:
        """The printed plan."""
        return render_text(self)

    def __rich__(self) -> object:
        """The printed plan, for rich consoles."""
        return render_rich(self)


_FORMAT: Final = "autotp plan"
_VERSION: Final = 1
_SEARCH: Final = ("cost", "bound", "gap", "method", "width", "variables")
"""Fields that describe the search for the plan, not the plan; its cost is in `collectives`."""
_ADVICE: Final = (
    "Write it (again): autotp plan MODEL --tp N --json FILE, with --training if it is to train."
)


def _read_plan(text: str, where: str) -> Plan:
    try:
        plan = read_document(Plan, text, _FORMAT, _VERSION, _SEARCH)
    except RecordError as error:
        raise PlanError(f"{where}: {error}. {_ADVICE}") from error
    if reason := next(_find_contradictions(plan), ""):
        raise PlanError(f"{where}: {reason}. {_ADVICE}")
    return plan


def _find_contradictions(plan: Plan) -> Iterator[str]:
    if plan.tp < 1:
        yield f"tp is {plan.tp}, it must be at least 1"
    for name, record in plan.parameters.items():
        if record.name != name:
            yield f"parameters.{name} has the name {record.name!r}"
        if len(record.shards) != plan.tp:
            yield f"parameters.{name} has {len(record.shards)} shards for tp {plan.tp}"
    known = set(plan.parameters).union(*(r.tied for r in plan.parameters.values()))
    for pair in plan.pairs:
        if len(pair.local_sizes) != plan.tp:
            yield f"pair {pair.axis} has {len(pair.local_sizes)} local sizes for tp {plan.tp}"
        unknown = [name for name in pair.openers + pair.closers if name not in known]
        yield from (
            f"pair {pair.axis} names {name!r}, which is not a parameter" for name in unknown
        )
