"""The sums of a plan: what its collectives send, what a rank holds, by use and by layout."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotp.cost.collectives import estimate_memory_bytes
from autotp.records.plan import Plan
from autotp.report.distinct import list_collective_rows
from autotp.report.dotted import Dotted
from autotp.report.table import make_table
from autotp.report.units import format_bytes, format_count, format_share, format_time

__all__ = ["render_collectives", "render_memory", "render_layouts"]


def render_collectives(plan: Plan) -> RenderableType:
    """The table of distinct collectives, with the sums of each phase."""
    names = ["×", "collective", "at", "payload\neach", "sent\nin all", "time\nin all"]
    table = make_table("Collectives", names, right=names[3:])
    for row in list_collective_rows(plan):
        table.add_row(
            Text(format_count(row.count)),
            Text(f"{row.first.phase} {row.first.kind.replace('_', '-')}"),
            Dotted([row.path], heading="" if row.first.group == "tp" else row.first.group),
            Text(format_bytes(row.first.payload_bytes)),
            Text(format_bytes(row.wire_bytes)),
            Text(format_time(row.time_ps)),
        )
    _add_totals(table, plan)
    return table


def render_memory(plan: Plan) -> RenderableType:
    """The table of what the largest rank holds, beside the whole model on one device."""
    names = ["memory", "whole model", "largest rank", "share"]
    table = make_table("What a rank holds", names, right=names[1:])
    whole = _sum_full_memory(plan)
    held = {name: n for name, n in plan.memory.items() if name != "total"}
    for name, size in [*held.items(), ("total", sum(held.values()))]:
        alone = whole.get(name, size)
        if size or alone:
            cells = (name, format_bytes(alone), format_bytes(size), format_share(size, alone))
            table.add_row(*map(Text, cells), style="bold" if name == "total" else "")
    return table


def render_layouts(plan: Plan) -> RenderableType:
    """The table of parameter bytes by layout."""
    names = ["layout", "tensors", "whole model", "largest rank", "share"]
    table = make_table("Parameters by layout", names, right=names[1:])
    for layout in dict.fromkeys(record.layout for record in plan.parameters.values()):
        records = [record for record in plan.parameters.values() if record.layout == layout]
        whole = sum(record.bytes for record in records)
        ranks = (sum(record.shards[rank].bytes for record in records) for rank in range(plan.tp))
        most = max(ranks)
        numbers = (format_bytes(whole), format_bytes(most), format_share(most, whole))
        table.add_row(*map(Text, (layout, format_count(len(records)), *numbers)))
    return table


def _add_totals(table: Table, plan: Plan) -> None:
    table.add_section()
    for phase in ("forward", "backward") if plan.training else ("forward",):
        records = [record for record in plan.collectives if record.phase == phase]
        table.add_row(
            Text(format_count(len(records))),
            Text(f"all {phase}"),
            Text(""),
            Text(format_bytes(sum(record.payload_bytes for record in records))),
            Text(format_bytes(sum(record.wire_bytes for record in records))),
            Text(format_time(sum(record.time_ps for record in records))),
            style="bold",
        )


def _sum_full_memory(plan: Plan) -> dict[str, int]:
    """What one device alone would hold, by the account that the plan's options ask for."""
    held: dict[str, int] = {}
    for record in plan.parameters.values():
        held[record.dtype] = held.get(record.dtype, 0) + record.bytes
    optimizer, state = plan.options.get("optimizer", "adamw"), plan.options.get("state_dtype")
    state_dtype = None if state is None else str(state)
    memory = estimate_memory_bytes(held, str(optimizer), state_dtype, training=plan.training)
    buffers = plan.memory.get("buffers", 0)
    memory = {**memory, "buffers": buffers, "kv_cache": sum(c.bytes for c in plan.caches.values())}
    return {**memory, "total": sum(memory.values())}
