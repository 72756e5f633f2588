"""The totals of a plan: communication, memory per rank by use, and parameters by layout."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotp.cost.collectives import estimate_memory_bytes
from autotp.records.plan import Plan
from autotp.report.distinct import list_collective_rows
from autotp.report.dotted import Dotted
from autotp.report.table import make_table
from autotp.report.units import format_bytes, format_count, format_share, format_time


def render_collectives(plan: Plan) -> RenderableType:
    """Build the table of distinct collectives, with the totals of each phase."""
    names = ["×", "collective", "module", "payload\neach", "sent\nin total", "time\nin total"]
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
    """Build the table of the largest rank's memory, compared with the full model on one device."""
    names = ["memory", "full model", "largest rank", "share"]
    table = make_table("Memory per rank", names, right=names[1:])
    full = _sum_full_memory(plan)
    local = {name: n for name, n in plan.memory.items() if name != "total"}
    for name, size in [*local.items(), ("total", sum(local.values()))]:
        alone = full.get(name, size)
        if size or alone:
            cells = (name, format_bytes(alone), format_bytes(size), format_share(size, alone))
            table.add_row(*map(Text, cells), style="bold" if name == "total" else "")
    return table


def render_layouts(plan: Plan) -> RenderableType:
    """Build the table of parameter bytes by layout."""
    names = ["layout", "tensors", "full model", "largest rank", "share"]
    table = make_table("Parameters by layout", names, right=names[1:])
    for layout in dict.fromkeys(record.layout for record in plan.parameters.values()):
        records = [record for record in plan.parameters.values() if record.layout == layout]
        full = sum(record.bytes for record in records)
        ranks = (sum(record.shards[rank].bytes for record in records) for rank in range(plan.tp))
        most = max(ranks)
        numbers = (format_bytes(full), format_bytes(most), format_share(most, full))
        table.add_row(*map(Text, (layout, format_count(len(records)), *numbers)))
    return table


def _add_totals(table: Table, plan: Plan) -> None:
    table.add_section()
    for phase in ("forward", "backward") if plan.training else ("forward",):
        records = [record for record in plan.collectives if record.phase == phase]
        table.add_row(
            Text(format_count(len(records))),
            Text(f"total {phase}"),
            Text(""),
            Text(format_bytes(sum(record.payload_bytes for record in records))),
            Text(format_bytes(sum(record.wire_bytes for record in records))),
            Text(format_time(sum(record.time_ps for record in records))),
            style="bold",
        )


def _sum_full_memory(plan: Plan) -> dict[str, int]:
    """Sum the memory of the full model on one device, with the optimizer of the plan's options."""
    parameters: dict[str, int] = {}
    for record in plan.parameters.values():
        parameters[record.dtype] = parameters.get(record.dtype, 0) + record.bytes
    optimizer, state = plan.options.get("optimizer", "adamw"), plan.options.get("state_dtype")
    state_dtype = None if state is None else str(state)
    memory = estimate_memory_bytes(parameters, str(optimizer), state_dtype, training=plan.training)
    buffers = plan.memory.get("buffers", 0)
    memory = {**memory, "buffers": buffers, "kv_cache": sum(c.bytes for c in plan.caches.values())}
    return {**memory, "total": sum(memory.values())}
