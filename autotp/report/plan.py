"""The printed plan: shards, their cost, the memory per rank, and what is replicated.

Equivalent layers share one row, with a count; no name is truncated, however narrow the page.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.records.display import render_rich, render_text
from autotp.records.plan import BUCKET, Plan
from autotp.records.replication import star_layers
from autotp.report.distinct import (
    PairRow,
    ParameterRow,
    list_other_rows,
    list_pair_rows,
    list_places,
    list_replicated_rows,
)
from autotp.report.dotted import Dotted
from autotp.report.table import make_table
from autotp.report.totals import render_collectives, render_layouts, render_memory
from autotp.report.units import format_bytes, format_count, format_share, format_time


def render_plan(plan: Plan) -> RenderableType:
    """Build what rich prints for `plan`."""
    parts = [
        _render_header(plan),
        _render_pairs(plan),
        _render_others(plan),
        render_collectives(plan),
        _render_phases(plan),
        render_memory(plan),
        render_layouts(plan),
        _render_replicated(plan),
        _list_lines("Ops without a rule (run replicated on every rank)", plan.unruled),
        _list_lines("Rules discovered by running the op", list(_render_discovered(plan))),
        _list_lines("Results that may differ between ranks", list(_render_differing(plan))),
        _list_lines("Warnings", plan.warnings),
    ]
    return Group(*(part for part in parts if part is not None))


def format_plan(plan: Plan, width: int = 100, color: bool = False) -> str:
    """Format the plan as text, in lines of at most `width` columns."""
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        console.print(render_plan(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _render_header(plan: Plan) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in _list_facts(plan):
        grid.add_row(Text(label), Text(value))
    purpose = "training" if plan.training else "inference"
    title = f"{plan.model}: tensor-parallel over {plan.tp} ranks, {purpose}"
    return Group(Text(title, style="bold"), grid)


def _render_phases(plan: Plan) -> RenderableType | None:
    """Build the table of the phases that were planned together, with the cost of each."""
    if not plan.phases:
        return None
    columns = ["phase", "calls", "sizes", "collectives per call", "time per call", "total time"]
    table = make_table("Phases planned together", columns, right=("calls", *columns[-2:]))
    for phase in plan.phases:
        counts = Counter(record.kind.replace("_", "-") for record in phase.collectives)
        table.add_row(
            Text(phase.name),
            Text(format_count(phase.calls)),
            Text(", ".join(f"{name} {format_count(size)}" for name, size in phase.sizes.items())),
            Text(", ".join(f"{format_count(n)} {kind}" for kind, n in counts.items()) or "none"),
            Text(format_time(phase.time_ps)),
            Text(format_time(phase.calls * phase.time_ps)),
        )
    return table


def _list_facts(plan: Plan) -> Iterable[tuple[str, str]]:
    sizes = ", ".join(f"{name} {format_count(size)}" for name, size in plan.sizes.items())
    yield (
        "inputs",
        plan.variant + ("" if plan.dynamic else " (fixed sizes only, see Warnings)"),
    )
    yield "cost estimated at", f"{sizes} on {plan.machine}"
    yield "objective", f"{plan.objective}, {_describe_optimality(plan)}"
    unused = f", {format_share(plan.unused_fraction, 1)} unused" if plan.unused_fraction else ""
    share = format_share(plan.replicated_fraction, 1)
    yield "replication", f"{share} of the parameter bytes are replicated on every rank{unused}"
    if any(record.group != "tp" for record in plan.collectives):
        yield "groups", _list_groups(plan)
    yield "plan hash", plan.hash[:16]


def _list_groups(plan: Plan) -> str:
    """List the ranks of each group: `tp/2:1` pairs every rank with its neighbour."""
    groups = [f"tp is ranks 0 to {plan.tp - 1}"]
    for name in sorted({record.group for record in plan.collectives} - {"tp"}):
        count, stride = map(int, name.removeprefix("tp/").split(":"))
        firsts = [r for r in range(plan.tp) if r // stride % count == 0]
        sets = ("+".join(str(r + k * stride) for k in range(count)) for r in firsts)
        groups.append(f"{name} is {', '.join(sets)}")
    return "; ".join(groups)


def _describe_optimality(plan: Plan) -> str:
    solved = f"{plan.method}, width {plan.width}, {format_count(plan.variables)} variables"
    # the bucket is one collective for many parameters, so no single choice accounts for its latency
    bucket = any(record.where == BUCKET for record in plan.collectives)
    apart = ", excluding the latency of the gradient bucket" if bucket else ""
    if plan.gap == 0:
        return f"proven minimal{apart} (exact {solved})"
    return f"within {format_share(plan.gap, 1)} of the lower bound{apart} ({solved})"


def _render_pairs(plan: Plan) -> RenderableType:
    table = make_table("Pairs", ["×", "pair", "layout", "axis: full -> per rank", "collectives"])
    for row in list_pair_rows(plan):
        pair = row.first
        table.add_row(
            Text(format_count(row.count)),
            Dotted([row.path or "(top level)"], heading=pair.role),
            Text("\n".join(f"{layout}: {', '.join(names)}" for layout, names in row.layouts)),
            Text(_describe_axis(row)),
            Text(_describe_tally(row)),
        )
    return table


def _describe_axis(row: PairRow) -> str:
    pair = row.first
    name = pair.axis.rsplit(".", 1)[-1]
    local = sorted(set(pair.local_sizes), reverse=True)
    sizes = f"{format_count(pair.size)} -> {' or '.join(map(format_count, local))}"
    parts = [f"{name}: {sizes}" if pair.split else f"{name}: {format_count(pair.size)}, unsharded"]
    parts += [f"of {pair.expression}"] if pair.expression not in ("", name) else []
    parts += [pair.note] if pair.note else []
    return "\n".join(parts)


def _describe_tally(row: PairRow) -> str:
    lines = [
        f"{phase}: {format_count(count)} {kind.replace('_', '-')}, "
        f"{format_bytes(payload)}, {format_time(time)}"
        for phase, kind, payload, time, count in row.collectives
    ]
    return "\n".join(lines) or "none"


def _render_others(plan: Plan) -> RenderableType | None:
    rows = list_other_rows(plan)
    if not rows:
        return None
    table = make_table(
        "Sharded outside pairs", ["×", "parameter", "layout", "axis", "shape: full -> per rank"]
    )
    for row in rows:
        record = row.first
        table.add_row(
            Text(format_count(row.count)),
            Dotted([*row.paths, *(f"= {name}" for name in record.tied)]),
            Text(f"{record.layout}, dim {record.dim}"),
            Text((record.axis or "").rsplit(".", 1)[-1]),
            Text(f"{_describe_shape(record.shape)} -> {_describe_shapes(row)}"),
        )
    return table


def _describe_shapes(row: ParameterRow) -> str:
    return " or ".join(dict.fromkeys(_describe_shape(shard.shape) for shard in row.first.shards))


def _describe_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _render_replicated(plan: Plan) -> RenderableType | None:
    rows = list_replicated_rows(plan)
    if not rows:
        return None
    table = make_table("Replicated parameters", ["×", "bytes", "parameters"], right=("bytes",))
    for row in rows:
        reason = row.first.reason if row.count == 1 else star_layers(row.first.reason)
        why = f"{row.first.layout}: {reason}" if reason else row.first.layout
        cells = Text(format_count(row.count)), Text(format_bytes(row.bytes))
        table.add_row(*cells, Dotted(row.paths, heading=why))
    return table


def _render_discovered(plan: Plan) -> Iterable[str]:
    for record in plan.discovered:
        yield f"{len(record.where)} × {record.op} at {list_places(record.where)}: {record.rule}"


def _render_differing(plan: Plan) -> Iterable[str]:
    for record in plan.differing:
        count, at = len(record.where), list_places(record.where)
        yield f"{count} × {record.op}, {record.phase}, at {at}: {record.reason}"


def _list_lines(title: str, lines: Sequence[str]) -> RenderableType | None:
    if not lines:
        return None
    return Group(Text(f"\n{title}", style="bold"), *(Text(f"  {line}") for line in lines))


render_rich.register(Plan, render_plan)
render_text.register(Plan, format_plan)
