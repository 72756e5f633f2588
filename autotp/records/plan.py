"""The whole decision for one model and one tensor-parallel size: plain data, equal on every rank.

No torch object is in it; JSON round-trips exactly; `hash` covers everything that ranks must agree
on, and nothing that only tells how it was found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from autotp.algebra.placement import Kind
from autotp.algebra.split import Split
from autotp.errors import PlanError
from autotp.records import display as describe
from autotp.records.document import hash_content, read_document, write_document
from autotp.records.json_record import RecordError

__all__ = [
    "BUCKET",
    "CacheRecord",
    "CollectiveRecord",
    "DifferingRecord",
    "DiscoveredRecord",
    "Pair",
    "ParameterRecord",
    "PhaseRecord",
    "PlacementRecord",
    "Plan",
    "Shard",
]

BUCKET: Final = "bucket of replicated parameters"
"""Where the one all-reduce stands that sums the gradients of parameters whole on every rank."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a parameter.

    `ranges`: the ordered `[start, stop)` intervals of the parameter's `dim` held; empty if it holds
    all.
    """

    shape: tuple[int, ...]
    bytes: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """An `algebra.placement.Placement` whose axis is called as people read it."""

    kind: Kind
    dim: int = -1
    axis: str = ""


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter: `layout` is column, row, vocabulary, expert, norm or replicated.

    - `dim`, `axis`: what is cut along what; None when every rank holds it whole. `axis` is a name
      such as `model.layers.0.self_attn.heads`; `axis_size` its size.
    - `split`: the flat form of the `algebra.split.Split` of `dim`; empty when whole.
    - `shards`: one entry a rank.
    - `reason`: why every rank holds it whole, or some of its segments; empty when all is split.
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
    def whole_bytes(self) -> int:
        """The bytes that every rank holds: all, or those of segments without the axis."""
        if self.dim is None:
            return self.bytes
        split = Split.decode(self.split)
        return self.bytes * split.whole() // split.length()


@dataclass(frozen=True, slots=True)
class Pair:
    """Openers (column-parallel) and closers (row-parallel) that share one pairable axis.

    - `role`: attention, mlp, experts, vocabulary, or "pair".
    - `axis`, `size`, `local_sizes` (one entry a rank; all `size` when the axis stays whole).
    - `openers`, `closers`: parameter names. A vocabulary pair may have no closers.
    - `expression`: the opener's output dim in the notation of docs, e.g. `kv*g*d`.
    - `module`: the longest common module path of its parameters.
    - `note`: why it stays whole, with the sizes that would split it; empty when split.
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
    """One run of a collective in one call (forward) or one forward + backward.

    - `kind`: all_reduce, all_gather, reduce_scatter or all_to_all; `phase`: forward or backward.
    - `where`: module path of the value, e.g. `model.layers.0.self_attn.o_proj`, and its op in
      brackets where the module has others in modules of its own; or `BUCKET`.
    - `payload_bytes`: the largest tensor on a rank (all-gather: its result; reduce-scatter: its
      input), `wire_bytes`: what a ring sends a rank; both at the plan's `sizes`.
    - `time_ps`: by the plan's machine.
    - `group`: "tp", or a sub-group.
    - `axis`: the pairable axis whose split makes it necessary, where one does; the report files the
      collective under that pair, and without it under the pair whose parameters `where` names.
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
    """One tensor of a cache: every call takes it and gives it back cut in the same way.

    - `name`: its path in the cache, e.g. `layers.0.keys`.
    - `dim`, `axis`: what is cut along what; None when every rank holds it whole. `size`: of that
      dim as a whole; 0 without one. `split`: the flat form of its `algebra.split.Split`.
    - `bytes`: of the whole tensor, at the longest that the plan was priced for.
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

    - `name`: prefill or decode. `calls`: how often it comes.
    - `variant`, `sizes`, `collectives`: of one such call, as in a plan. `time_ps`: their time.
    """

    name: str
    calls: int
    variant: str
    sizes: Mapping[str, int]
    collectives: tuple[CollectiveRecord, ...]
    time_ps: int


@dataclass(frozen=True, slots=True)
class DiscoveredRecord:
    """An op without a row, its `rule` found by running it, and `where`: the modules that use it."""

    op: str
    rule: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DifferingRecord:
    """An op that all ranks do on the same values, and that may give each another result.

    - `phase`: forward or backward; `reason`: how results may differ; `where`: the modules.
    """

    op: str
    phase: str
    reason: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision, its price and its proof.

    - `model`: a printable name (class name).
    - `fingerprint`: hash over parameter names, shapes, dtypes.
    - `variant`: printable inputs present and mode, e.g. "attention_mask, input_ids · eval".
    - `sizes`: the sizes it was priced for, e.g. {"batch": 1, "sequence": 4096}.
    - `cost`: level name to integer (solver.problem.LEVELS); `bound` the same; `gap` relative, 0.0
      when proven optimal; `method`, `width`, `variables` say how it was solved.
    - `memory`: bytes of the largest rank under "parameters", "gradients", "optimizer", "buffers",
      and under "kv_cache" where calls take or give a cache: at its longest.
    - `replicated_fraction`: bytes that every rank holds whole over all parameter bytes, tied once.
    - `unused_fraction`: the part of them that the captured graph does not read: towers of inputs
      that were not given, over all parameter bytes.
    - `unruled`: ops without a rule, as "op at module path: reason"; they act whole.
    - `discovered`: rules found by running an op that has none. `differing`: ops on whole values
      whose results ranks may disagree on.
    - `caches`: tensors of the cache that calls take or give, by path; empty without one.
    - `phases`: the calls planned together, this plan's own first; empty for a call planned alone.
    - `options`: what was asked (overrides, shard_threshold, optimizer, state_dtype, reduce_dtype).
    - `choices`: node name to the label of the strategy chosen, for readers of the graph.

    Constraints:
    - `options` holds JSON values with tuples for lists; `gap` is finite.
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
        """The SHA-256, in hexadecimal, of what is decided and what it costs; equal on all ranks.

        How the decision was found (cost levels, bound, method) is left out: a plan followed has the
        hash of the plan that it follows.
        """
        return hash_content(self, _SEARCH)

    def to_json(self) -> str:
        """The plan as JSON text, with `format`, `version` and `hash` before its own keys."""
        return write_document(self, _FORMAT, _VERSION, _SEARCH)

    @classmethod
    def from_json(cls, text_or_path: str | Path) -> "Plan":
        """The plan that `text_or_path` holds: JSON text, or the path of a file of it.

        Constraints: raises PlanError when the text is cut off, of another version, lacks or
        misspells a key, holds a value of a wrong type, contradicts itself, or was changed after it
        was written.
        """
        given = cast(object, text_or_path)  # whatever a caller without types passed
        if not isinstance(given, str | Path):
            raise PlanError(
                f"plan: is of type {type(given).__name__}. Give JSON text, or the path of a file."
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
        return describe.render_text(self)

    def __rich__(self) -> object:
        """The printed plan, for rich consoles."""
        return describe.render_rich(self)


_FORMAT: Final = "autotp plan"
_VERSION: Final = 1
_SEARCH: Final = ("cost", "bound", "gap", "method", "width", "variables")
"""What tells of the search for the decision, not of the decision; its price is in `collectives`."""
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
            yield f"parameters.{name} calls itself {record.name!r}"
        if len(record.shards) != plan.tp:
            yield f"parameters.{name} has {len(record.shards)} shards for tp {plan.tp}"
    known = set(plan.parameters).union(*(r.tied for r in plan.parameters.values()))
    for pair in plan.pairs:
        if len(pair.local_sizes) != plan.tp:
            yield f"pair {pair.axis} has {len(pair.local_sizes)} local sizes for tp {plan.tp}"
        strangers = [name for name in pair.openers + pair.closers if name not in known]
        yield from (f"pair {pair.axis} names {name!r}, which is no parameter" for name in strangers)
