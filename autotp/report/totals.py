"""The sums of a plan: what its collectives send, what a rank holds, by use and by layout."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotp.cost.collectives import memory_bytes
from autotp.records.plan import Plan
from autotp.report.distinct import collective_rows
from autotp.report.dotted import Dotted
from autotp.report.table import titled_table
from autotp.report.units import bytes_text, count_text, share_text, time_text

__all__ = ["collectives", "holdings", "layouts"]


def collectives(plan: Plan) -> RenderableType:
    """The table of distinct collectives, with the sums of each phase."""
    names = ["×", "collective", "at", "payload\neach", "sent\nin all", "time\nin all"]
    table = titled_table("Collectives", names, right=names[3:])
    for row in collective_rows(plan):
        table.add_row(
            Text(count_text(row.count)),
            Text(f"{row.first.phase} {row.first.kind.replace('_', '-')}"),
            Dotted([row.path], heading="" if row.first.group == "tp" else row.first.group),
            Text(bytes_text(row.first.payload_bytes)),
            Text(bytes_text(row.wire_bytes)),
            Text(time_text(row.time_ps)),
        )
    _add_totals(table, plan)
    return table


def holdings(plan: Plan) -> RenderableType:
    """The table of what the largest rank holds, beside the whole model on one device."""
    names = ["memory", "whole model", "largest rank", "share"]
    table = titled_table("What a rank holds", names, right=names[1:])
    whole = _whole_memory(plan)
    held = {name: n for name, n in plan.memory.items() if name != "total"}
    for name, size in [*held.items(), ("total", sum(held.values()))]:
        alone = whole.get(name, size)
        if size or alone:
            cells = (name, bytes_text(alone), bytes_text(size), share_text(size, alone))
            table.add_row(*map(Text, cells), style="bold" if name == "total" else "")
    return table


def layouts(plan: Plan) -> RenderableType:
    """The table of parameter bytes by layout."""
    names = ["layout", "tensors", "whole model", "largest rank", "share"]
    table = titled_table("Parameters by layout", names, right=names[1:])
    for layout in dict.fromkeys(record.layout for record in plan.parameters.values()):
        records = [record for record in plan.parameters.values() if record.layout == layout]
        whole = sum(record.bytes for record in records)
        ranks = (sum(record.shards[rank].bytes for record in records) for rank in range(plan.tp))
        most = max(ranks)
        numbers = (bytes_text(whole), bytes_text(most), share_text(most, whole))
        table.add_row(*map(Text, (layout, count_text(len(records)), *numbers)))
    return table


def _add_totals(table: Table, plan: Plan) -> None:
    table.add_section()
    for phase in ("forward", "backward") if plan.training else ("forward",):
        records = [record for record in plan.collectives if record.phase == phase]
        table.add_row(
            Text(count_text(len(records))),
            Text(f"all {phase}"),
            Text(""),
            Text(bytes_text(sum(record.payload_bytes for record in records))),
            Text(bytes_text(sum(record.wire_bytes for record in records))),
            Text(time_text(sum(record.time_ps for record in records))),
            style="bold",
        )


def _whole_memory(plan: Plan) -> dict[str, int]:
    """What one device alone would hold, by the account that the plan's options ask for."""
    held: dict[str, int] = {}
    for record in plan.parameters.values():
        held[record.dtype] = held.get(record.dtype, 0) + record.bytes
    optimizer, state = plan.options.get("optimizer", "adamw"), plan.options.get("state_dtype")
    state_dtype = None if state is None else str(state)
    memory = memory_bytes(held, str(optimizer), state_dtype, training=plan.training)
    buffers = plan.memory.get("buffers", 0)
    memory = {**memory, "buffers": buffers, "kv_cache": sum(c.bytes for c in plan.caches.values())}
    return {**memory, "total": sum(memory.values())}
