"""Everything of one row, as names and values: what enter shows."""

from poolmeter.exporter.top.panes import command_of, framework_of, user_of, where_of
from poolmeter.exporter.top.rows import CardRow, PartRow, ProcessRow, SliceRow, TenantRow
from poolmeter.exporter.top.words import UNKNOWN, cards, duration, percent, size

Row = CardRow | PartRow | SliceRow | TenantRow | ProcessRow


def details(row: Row) -> list[tuple[str, str]]:
    """Names and values of a row of any pane."""
    if isinstance(row, CardRow):
        return card_details(row)
    if isinstance(row, SliceRow):
        return slice_details(row)
    if isinstance(row, PartRow):
        return part_details(row)
    return tenant_details(row) if isinstance(row, TenantRow) else process_details(row)


def slice_details(row: SliceRow) -> list[tuple[str, str]]:
    """Everything of a slice, as names and values."""
    part = row.slice
    limit = "none" if part.compute_limit_ppm is None else percent(part.compute_limit_ppm)
    return [
        ("allocation", part.allocation_id),
        ("tenant", part.tenant),
        *[(name, value) for name in ("project", "user", "workload", "environment", "pool") if (value := getattr(part, name)) is not None],
        *([("class", part.workload_class)] if part.workload_class else []),
        ("node, card", f"{row.node}, {row.card} ({part.device_uuid})"),
        ("state", part.state),
        ("mode", f"{part.mode}, {part.enforcement}; used by: {part.used_basis}"),
        ("device time", f"{percent(row.obtained_ppm)} of the card, limit {limit}, promised {percent(part.promise_ppm)}"),
        ("used in all", duration(part.busy_us_total)),
        ("throttled", f"{duration(part.throttled_us_total)} in all, {percent(row.throttled_ppm)} of the last seconds"),
        ("memory", f"{size(part.memory_used_bytes)} used, {size(part.memory_peak_bytes)} at most, limit {size(part.memory_limit_bytes)}"),
        ("denied allocations", UNKNOWN if part.denied_allocations_total is None else str(part.denied_allocations_total)),
        ("launches", f"{_number(part.launches_total)} kernels, {_number(part.graph_launches_total)} graphs"),
        ("energy", UNKNOWN if part.energy_uj_total is None else f"{part.energy_uj_total / 3.6e9:.3f} Wh"),
        ("processes", _number(part.processes)),
        ("faults of the hook", _number(part.hook_faults_total)),
    ]


def part_details(row: PartRow) -> list[tuple[str, str]]:
    """Everything of a part of a card, or of what is on the bus alone, as names and values."""
    if row.card is None:
        return [
            ("on the bus", f"{row.id} of {row.node}, not in the driver's library: its use is unknown"),
            ("state", row.state),
            *row.facts,
        ]
    return [
        ("part", f"{row.name} ({row.kind}) of card {row.card} of {row.node}"),
        ("UUID", row.id),
        *([("state", row.state)] if row.state else []),
        *row.facts,
        ("device time", f"{percent(row.use_ppm)} of the {'card' if row.kind == 'vgpu' else 'instance'}"),
        ("memory", f"{size(row.memory_used_bytes)} used of {size(row.memory_total_bytes)}"),
        ("processes", _number(row.processes)),
    ]


def card_details(row: CardRow) -> list[tuple[str, str]]:
    """Everything of a card, as names and values."""
    device = row.device
    clocks = [f"{name} {hz // 1_000_000} MHz" for name, hz in (("SM", device.sm_clock_hz), ("memory", device.memory_clock_hz)) if hz]
    return [
        ("card", f"{device.index} of {row.node}: {device.model} ({device.vendor})"),
        ("UUID", device.uuid),
        *[
            (name, value)
            for name, value in (("PCI", device.pci_bus_id), ("serial", device.serial), ("driver", device.driver_version))
            if value
        ],
        ("state", row.state + (f": {row.reason}" if row.reason else "")),
        ("sharing", row.modes),
        (
            "device time",
            f"{percent(row.use_ppm)} used, {percent(device.allocated_ppm)} promised, {percent(row.unaccounted_ppm)} unaccounted",
        ),
        (
            "memory",
            f"{size(device.memory_used_bytes)} used of {size(device.memory_total_bytes)}, {size(device.memory_allocated_bytes)} promised",
        ),
        ("unaccounted memory", size(device.unaccounted_memory_bytes)),
        ("temperature", UNKNOWN if device.temperature_celsius is None else f"{device.temperature_celsius} C"),
        ("power", UNKNOWN if device.power_mw is None else f"{device.power_mw / 1000:.1f} W"),
        *([("clocks", ", ".join(clocks))] if clocks else []),
        ("busy in all", duration(device.busy_us_total)),
        ("energy", UNKNOWN if device.energy_uj_total is None else f"{device.energy_uj_total / 3.6e9:.3f} Wh"),
        ("slices", str(len(row.slices))),
    ]


def process_details(row: ProcessRow) -> list[tuple[str, str]]:
    """Everything of a process, as names and values."""
    process, host = row.process, row.host
    return [
        ("pid", f"{process.pid} on {row.node}, card {row.card} ({process.device_uuid})"),
        ("tenant", row.tenant),
        ("hook", "hooked" if process.hooked else f"no hook: {'billed to its allocation' if row.billed else 'nobody is billed for it'}"),
        *([("allocation", process.allocation_id)] if process.allocation_id else []),
        *([("in", where_of(row))] if where_of(row) else []),
        (
            "device time",
            f"{percent(row.use_ppm)} of the card, {duration(process.busy_us_total)} in all; by: {process.used_basis or UNKNOWN}",
        ),
        ("memory", f"{size(process.memory_used_bytes)} used, {size(process.nvml_memory_bytes)} by the driver's count"),
        *([("attributed", f"to {row.named.tenant or 'nobody'} by {row.named.by}")] if row.named.by else []),
        *[("sources disagree", text) for text in row.named.disagreements],
        ("user", user_of(row) or UNKNOWN),
        ("host", f"CPU {percent(host.cpu_ppm)}, RSS {size(host.rss_bytes)}" if host else "not on this machine, or gone"),
        ("framework", framework_of(row) or UNKNOWN),
        ("command", command_of(row)),
    ]


def tenant_details(row: TenantRow) -> list[tuple[str, str]]:
    """Everything of a tenant, as names and values."""
    return [
        ("tenant", row.tenant),
        ("allocations", str(row.allocations)),
        ("cards", str(row.cards)),
        ("device time", f"{cards(row.use_ppm)} cards used of {cards(row.promise_ppm)} promised"),
        ("memory", f"{size(row.memory_used_bytes)} used of {size(row.memory_limit_bytes)}"),
        ("throttled", percent(row.throttled_ppm)),
        ("denied allocations", _number(row.denied)),
        ("processes", str(row.processes)),
        ("slices", ", ".join(f"{count} {state}" for state, count in row.states) or "none"),
    ]


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
