"""Check: the rewritten graph is well-typed, with placements as the types.

This is the postcondition of the rewrite, proven from the graph itself. Each emitted value claims a
placement; the check then proves that

- a parameter has its planned placement, and inputs and constants are replicated,
- a conversion reads a value of its source kind, shards it along the claimed dims, and returns its
  target kind,
- every other node reads its operands in exactly the placements of its strategy,
- the outputs are replicated,
- the graph runs exactly the collectives that the plan counts.
"""

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any, cast

from torch import fx

from autotp.algebra.placement import (
    CONVERSION_OPS,
    CONVERSIONS,
    FUNCTIONAL,
    PARTIAL,
    REPLICATED,
    Kind,
    Placement,
)
from autotp.algebra.split import Peers, Split
from autotp.capture.graph_facts import find_module_path, name_op
from autotp.errors import VerifyError
from autotp.oprules.rule import Operand
from autotp.planner.analysis import (
    Analysis,
    Decision,
    EmittedCollective,
    Use,
    find_differentiated_nodes,
)
from autotp.records.trace import TracedValue

_OPS: dict[str, list[tuple[Kind, Kind]]] = {}
for _kinds, _conversion in CONVERSIONS.items():
    _OPS.setdefault(_conversion.op, []).append(_kinds)
_ROWS = {c.op for kinds, c in CONVERSIONS.items() if "G" in kinds}


def check_types(
    graph: fx.Graph,
    values: dict[str, TracedValue],
    collectives: list[EmittedCollective],
    analysis: Analysis,
    decision: Decision,
    *,
    training: bool,
    tp: int,
) -> None:
    """Raise VerifyError at the first node of `graph` that is ill-typed.

    - `values`: what each emitted value claims to be; `collectives`: what the plan counts.
    """
    checker = _Checker(graph, values, analysis, decision)
    for node in graph.nodes:
        checker.check_node(node)
    checker.check_outputs()
    reached = find_differentiated_nodes(graph, analysis) if training else set[fx.Node]()
    seen = Counter(_list_collectives(graph, reached, analysis, tp))
    expected = Counter((c.kind, c.phase) for c in collectives)
    if seen != expected:
        raise VerifyError(
            f"the graph runs {_format_counts(seen)}, but the plan counts "
            f"{_format_counts(expected)}: the rewriter and the plan disagree; please report "
            "the model"
        )


class _Checker:
    """One graph being checked."""

    def __init__(
        self,
        graph: fx.Graph,
        values: dict[str, TracedValue],
        analysis: Analysis,
        decision: Decision,
    ) -> None:
        self.graph, self.values = graph, values
        self.analysis, self.decision = analysis, decision
        self.uses = {node.name: use for node, use in analysis.uses.items()}
        self.emitted = {node.name: node for node in graph.nodes}

    def check_node(self, node: fx.Node) -> None:
        """Check one node of the rewritten graph."""
        namespace, op = _split_op_name(node)
        if namespace == "autotp" and op in _OPS:
            self._check_conversion(node, _OPS[op])
        elif namespace == "_c10d_functional" and op in FUNCTIONAL:
            self._check_functional(node, op)
        elif node.op == "get_attr" and node.target in self.decision.parameters:
            self._check_parameter(node)
        elif node.op == "call_function" and node.name in self.uses:
            self._check_use(node, self.uses[node.name])

    def check_outputs(self) -> None:
        """Check that every output has its planned placement: replicated, unless it is a cache's."""
        outputs = cast("tuple[object, ...]", self.graph.output_node().args[0])
        for number, node in enumerate(outputs):
            if not isinstance(node, fx.Node):
                continue
            claimed = self._find_placement(node)
            if claimed != self.decision.caches.get(number, REPLICATED):
                raise VerifyError(
                    f"{_locate(node)}: is an output placed {claimed}, but outputs must be R on "
                    "every rank: a reduction or gather is missing before it"
                )

    def _find_placement(self, node: fx.Node) -> Placement:
        traced = self.values.get(node.name)
        return traced.placement if traced else REPLICATED

    def _check_parameter(self, node: fx.Node) -> None:
        wanted = self.decision.parameters[str(node.target)]
        traced = self.values.get(node.name)
        if traced is not None and traced.placement != wanted:
            raise VerifyError(
                f"{_locate(node)}: parameter {node.target} is laid out {wanted}, but "
                f"the graph reads it as {traced.placement}"
            )

    def _check_conversion(self, node: fx.Node, kinds: list[tuple[Kind, Kind]]) -> None:
        read = cast(fx.Node, node.args[0])
        claimed = self._find_placement(read)
        targets = [target for source, target in kinds if source == claimed.kind]
        if not targets:
            sources = " or ".join(dict.fromkeys(source for source, _ in kinds))
            raise VerifyError(
                f"{_locate(node)}: converts {sources} to {kinds[0][1]}, but {read.name} is "
                f"{claimed}"
            )
        made = self.values.get(node.name)
        if made is not None and made.placement.kind not in targets:
            wanted = " or ".join(targets)
            raise VerifyError(
                f"{_locate(node)}: returns {wanted}, but is recorded as {made.placement}"
            )
        self._check_splits(node, read, made)
        self._check_rows(node, claimed, made)

    def _check_splits(self, node: fx.Node, read: fx.Node, made: TracedValue | None) -> None:
        """Check the dims and splits written into a conversion against its two placements."""
        before = self.values.get(read.name)
        wanted: list[Any] = []
        for traced in (before, made):
            if traced is not None and traced.placement.is_split:
                wanted += [traced.placement.dim, list(traced.split or ())]
        written = [] if _split_op_name(node)[1] in _ROWS else list(node.args[1:-1])
        if written and (before is not None or made is not None) and wanted and written != wanted:
            raise VerifyError(
                f"{_locate(node)}: shards by (dim, outer, segments …) {written}, but its "
                f"placements require {wanted}: a wrong slice"
            )

    def _check_rows(self, node: fx.Node, claimed: Placement, made: TracedValue | None) -> None:
        """Check that a conversion moves rows by the bounds of their own axis."""
        both = (claimed, made.placement if made else claimed)
        for placement in (p for p in both if p.is_grouped):
            groups = self.analysis.forest.find_row_groups(placement.partition)
            wanted = (groups and groups.bounds, placement.dim)
            bounds, dim = cast("tuple[fx.Node, int]", node.args[1:3])
            traced = self.values.get(bounds.name)
            if (traced.origin if traced else bounds.name, dim) != wanted:
                raise VerifyError(
                    f"{_locate(node)}: moves rows along dim {dim}, grouped by {bounds.name}, but "
                    f"they are grouped along dim {wanted[1]} by {wanted[0]}: the wrong rows move"
                )

    def _check_functional(self, node: fx.Node, op: str) -> None:
        claimed = self._find_placement(_skip_casts(cast(fx.Node, node.args[0]), self.values))
        wanted = "P" if op == "all_reduce" else "S"
        if claimed.kind != wanted:
            raise VerifyError(f"{_locate(node)}: {op} of a value that is {claimed}, not {wanted}")

    def _check_use(self, node: fx.Node, use: Use) -> None:
        strategy = self.decision.strategies[use.node]
        for k, operand in enumerate(use.operands):
            found = _find_argument(node, operand)
            if not isinstance(found, fx.Node) or found.name not in self.emitted:
                continue
            wanted = strategy.operands[k]
            claimed = self._find_operand_placement(found, operand, wanted)
            if claimed != wanted:
                raise VerifyError(
                    f"{_locate(node)}: operand {k} ({found.name}) is {claimed}, but strategy "
                    f"{strategy.label} of {use.node.target} reads it as {wanted}: "
                    f"{_describe_cause(claimed, wanted)}"
                )

    def _find_operand_placement(
        self, found: fx.Node, operand: Operand, wanted: Placement
    ) -> Placement:
        """The placement of an operand; that of a sliced constant is read from its conversion."""
        if found.name in self.values:
            return self.values[found.name].placement
        namespace, op = _split_op_name(found)
        if namespace == "autotp" and op in ("scatter", "scatter_copies"):
            return self._find_constant_placement(found, operand, wanted)
        if namespace == "autotp" and op == "own_rows" and wanted.is_grouped:
            return wanted if found.args[2] == wanted.dim else REPLICATED
        return PARTIAL if (namespace, op) == ("autotp", "keep_first") else REPLICATED

    def _find_constant_placement(
        self, found: fx.Node, operand: Operand, wanted: Placement
    ) -> Placement:
        """`wanted` if a constant is sliced so, dim by dim; else R."""
        written: dict[int, tuple[int, ...]] = {}
        while _split_op_name(found) in (("autotp", "scatter"), ("autotp", "scatter_copies")):
            written[cast(int, found.args[1])] = tuple(cast("list[int]", found.args[2]))
            found = cast(fx.Node, found.args[0])
        forest = self.analysis.forest
        cuts = {d: forest.split(dim, wanted.partition) for d, dim in enumerate(operand.dims)}
        required = {d: cut.encode() for d, cut in cuts.items() if cut and written.get(d)}
        return (
            wanted
            if wanted.is_split and wanted.dim in required and required == written
            else REPLICATED
        )


def _find_argument(node: fx.Node, operand: Operand) -> object:
    at = operand.argument
    if isinstance(at, int):
        given = node.args[at] if at < len(node.args) else None
    else:
        given = node.kwargs.get(at)
    if operand.item < 0:
        return given
    return given[operand.item] if isinstance(given, list | tuple) else None


def _list_collectives(
    graph: fx.Graph, reached: Set[fx.Node], analysis: Analysis, tp: int
) -> Iterator[tuple[str, str]]:
    """(kind, phase) of every collective that one call, and its backward pass, runs."""
    for node in graph.nodes:
        namespace, op = _split_op_name(node)
        if namespace == "_c10d_functional" and op in FUNCTIONAL:
            yield FUNCTIONAL[op], "forward"
        elif namespace == "autotp" and op in _OPS:
            forward, backward = CONVERSION_OPS[op].forward, CONVERSION_OPS[op].backward
            if forward.collective:
                yield forward.collective, "forward"
            if backward.collective and node in reached:
                yield backward.collective, "backward"
        elif namespace == "autotp" and op == "share_gradients" and node in reached:
            for _ in _list_buckets(node, analysis, tp):
                yield "all_reduce", "backward"


def _list_buckets(node: fx.Node, analysis: Analysis, tp: int) -> Set[object]:
    """The dtypes and sub-groups in which one `share_gradients` sums."""
    found: set[object] = set()
    parameters = cast("list[fx.Node]", node.args[0])
    for parameter, cut in zip(parameters, cast("list[list[int]]", node.args[1]), strict=True):
        meta = analysis.metas[(analysis.parameters[str(parameter.target)], 0)]
        if meta.requires_grad:
            dtype = node.kwargs.get("dtype") or meta.dtype
            everyone = {Peers(0, tp, 1): 0}
            copied = Split.decode(cut[1:]).count_shared(tp) if cut else everyone
            found |= {(dtype, peers) for peers in copied}
    return found


def _split_op_name(node: fx.Node) -> tuple[str, str]:
    namespace, _, name = name_op(node.target).partition("::")
    return namespace, name


def _skip_casts(node: fx.Node, values: dict[str, TracedValue]) -> fx.Node:
    while node.name not in values and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _describe_cause(claimed: Placement, wanted: Placement) -> str:
    if claimed.kind == "P":
        return "a reduction is missing"
    if (claimed.kind, wanted.kind) == ("R", "R~"):
        return "its gradient would not be summed over the ranks"
    if (claimed.kind, wanted.kind) == ("R", "P"):
        return "every rank would add it"
    return "a conversion is missing or wrong"


def _format_counts(counts: Counter[tuple[str, str]]) -> str:
    found = sorted((f"{n} {kind} {phase}" for (kind, phase), n in counts.items()))
    return ", ".join(found) or "no collective"


def _locate(node: fx.Node) -> str:
    path = find_module_path(node)
    return f"node {node.name}" + (f" in {path}" if path else "")
