"""One frame as plain text, for pipes and for people without a terminal; and as a report, for programs."""

from collections.abc import Sequence
from typing import TypeVar

from poolmeter.exporter.top import header
from poolmeter.exporter.top.columns import Column, heading, line, place
from poolmeter.exporter.top.panes import (
    CardLine,
    card_columns,
    framework_of,
    process_columns,
    sort_processes,
    tenant_columns,
    user_of,
    where_of,
)
from poolmeter.exporter.top.rows import Frame, PartRow
from poolmeter.report import Report

R = TypeVar("R")


def card_lines(frame: Frame, slices: bool = True) -> list[CardLine]:
    """Cards, the parts and slices of each below it (unless without), and what is on the bus alone."""
    lines: list[CardLine] = []
    for card in frame.cards:
        lines.append(card)
        if slices:
            lines += [*card.parts, *card.slices]
    return [*lines, *frame.functions]


def as_text(frame: Frame, width: int, sort: str = "use") -> str:
    """The whole frame in `width` columns, every row of every pane, no colours."""
    out = ["".join(piece for piece, _ in cells).rstrip() for cells in header.lines(frame, width, 1000)]
    many = len(frame.nodes) > 1
    for title, rows in (
        ("no card", _table(card_columns(many), card_lines(frame), width)),
        ("no tenant", _table(tenant_columns(), frame.tenants, width)),
        ("no process", _table(process_columns(many), sort_processes(frame.processes, sort, False), width)),
    ):
        out += ["", *(rows or [f"({title})"])]
    return "\n".join(out) + "\n"


def _table(columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> list[str]:
    if not rows:
        return []
    placed = place(columns, rows, width)
    lines = [heading(placed), *(line(placed, row) for row in rows)]
    return ["".join(piece for piece, _ in pieces).rstrip() for pieces in lines]


COLUMNS = (
    "kind",
    "node",
    "index",
    "device_uuid",
    "part",
    "name",
    "state",
    "stale",
    "allocation",
    "tenant",
    "mode",
    "pid",
    "user",
    "hooked",
    "where",
    "command",
    "framework",
    "use_ppm",
    "limit_ppm",
    "promise_ppm",
    "throttled_ppm",
    "memory_used_bytes",
    "memory_limit_bytes",
    "memory_peak_bytes",
    "denied_allocations",
    "temperature_celsius",
    "power_mw",
    "host_cpu_ppm",
    "host_rss_bytes",
    "processes",
)


def _part_row(part: PartRow, card: str | None) -> dict[str, object]:
    return {
        "kind": "function" if part.card is None else "part",
        "node": part.node,
        "index": part.card,
        "device_uuid": card,
        "part": part.id,
        "name": part.name,
        "state": part.state or None,
        "stale": part.stale,
        "mode": part.kind,
        "use_ppm": part.use_ppm,
        "memory_used_bytes": part.memory_used_bytes,
        "memory_limit_bytes": part.memory_total_bytes,
        "processes": part.processes,
    }


def as_report(frame: Frame) -> Report:
    """One row each of every card, part, slice, function on the bus alone, tenant and process; `kind` says which. What is not known or does not apply is left out."""
    rows: list[dict[str, object]] = []
    for card in frame.cards:
        device = card.device
        rows.append(
            {
                "kind": "card",
                "node": card.node,
                "index": device.index,
                "device_uuid": device.uuid,
                "name": device.model,
                "state": card.state,
                "stale": card.stale,
                "mode": card.modes,
                "use_ppm": card.use_ppm,
                "promise_ppm": device.allocated_ppm,
                "memory_used_bytes": device.memory_used_bytes,
                "memory_limit_bytes": device.memory_total_bytes,
                "temperature_celsius": device.temperature_celsius,
                "power_mw": device.power_mw,
            }
        )
        rows += [_part_row(part, device.uuid) for part in card.parts]
        for part in card.slices:
            rows.append(
                {
                    "kind": "slice",
                    "node": part.node,
                    "index": part.card,
                    "device_uuid": part.slice.device_uuid,
                    "state": part.state,
                    "stale": part.stale,
                    "allocation": part.slice.allocation_id,
                    "tenant": part.slice.tenant,
                    "mode": part.slice.mode,
                    "use_ppm": part.obtained_ppm,
                    "limit_ppm": part.slice.compute_limit_ppm,
                    "promise_ppm": part.slice.promise_ppm,
                    "throttled_ppm": part.throttled_ppm,
                    "memory_used_bytes": part.slice.memory_used_bytes,
                    "memory_limit_bytes": part.slice.memory_limit_bytes,
                    "memory_peak_bytes": part.slice.memory_peak_bytes,
                    "denied_allocations": part.slice.denied_allocations_total,
                    "processes": part.slice.processes,
                }
            )
    rows += [_part_row(part, None) for part in frame.functions]
    for tenant in frame.tenants:
        rows.append(
            {
                "kind": "tenant",
                "tenant": tenant.tenant,
                "stale": tenant.stale,
                "use_ppm": tenant.use_ppm,
                "promise_ppm": tenant.promise_ppm,
                "throttled_ppm": tenant.throttled_ppm,
                "memory_used_bytes": tenant.memory_used_bytes,
                "memory_limit_bytes": tenant.memory_limit_bytes,
                "denied_allocations": tenant.denied,
                "processes": tenant.processes,
            }
        )
    for row in frame.processes:
        process, host = row.process, row.host
        rows.append(
            {
                "kind": "process",
                "node": row.node,
                "index": row.card if row.card >= 0 else None,
                "device_uuid": process.device_uuid,
                "stale": row.stale,
                "allocation": process.allocation_id,
                "tenant": process.tenant,
                "pid": process.pid,
                "user": user_of(row) or None,
                "hooked": process.hooked,
                "where": where_of(row) or None,
                "command": (host.command_line if host else None) or process.command,
                "framework": framework_of(row) or None,
                "use_ppm": row.use_ppm,
                "memory_used_bytes": process.memory_used_bytes,
                "host_cpu_ppm": host.cpu_ppm if host else None,
                "host_rss_bytes": host.rss_bytes if host else None,
            }
        )
    warnings = ["".join(piece for piece, _ in cells).strip(" !") for cells in header.lines(frame, 10_000, 1000)[1:]]
    nodes = [
        {"node": node.name, "driver": node.driver, "simulated": node.simulated, "age_us": node.age_us, "stale": node.stale}
        for node in frame.nodes
    ]
    return Report("top", COLUMNS, tuple(rows), warnings=tuple(warnings), extra={"nodes": nodes})
