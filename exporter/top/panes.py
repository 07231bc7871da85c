"""What stands in each column of each pane, and what a pane can be sorted by."""

from collections.abc import Callable

from poolmeter.exporter.top.columns import Cell, Column, gauge, text
from poolmeter.exporter.top.rows import UNACCOUNTED, CardRow, PartRow, ProcessRow, SliceRow, TenantRow
from poolmeter.exporter.top.words import UNKNOWN, cards, clean, percent, size, trend
from poolmeter.model.units import FULL_SHARE_PPM

_STATE_ROLES = {"ok": "good", "active": "good", "held": "warn", "allocated": "dim", "suspended": "warn", "lost": "bad", "unknown": "warn"}

CardLine = CardRow | PartRow | SliceRow


def _load(ppm: int | None) -> str:
    return "bad" if ppm is not None and ppm >= 950_000 else "warn" if ppm is not None and ppm >= 750_000 else "good"


def _known(value: str, role: str = "") -> Cell:
    return text(value, "unknown" if value == UNKNOWN else role)


def _card_name(row: CardLine, width: int) -> Cell:
    if isinstance(row, CardRow):
        return ((f"{row.device.index} ", "card"), (clean(row.device.model), "card"))
    if isinstance(row, PartRow):
        return (("  ", ""), (clean(row.name), "dim")) if row.card is not None else (("- ", "dim"), (clean(f"{row.id} {row.name}"), "dim"))
    return (("  ", ""), (clean(row.slice.tenant), "tenant"))


def _card_state(row: CardLine, width: int) -> Cell:
    if row.stale:
        return text("stale" if isinstance(row, CardRow) and row.state == "ok" else f"({clean(row.state)})", "warn")
    return text(clean(row.state), _STATE_ROLES.get(row.state, "warn"))


def _card_mode(row: CardLine, width: int) -> Cell:
    return text(clean(row.modes if isinstance(row, CardRow) else row.kind if isinstance(row, PartRow) else row.slice.mode), "dim")


def _allocation(row: CardLine, width: int) -> Cell:
    if isinstance(row, CardRow):
        return ()
    if isinstance(row, PartRow):
        return text(clean(row.id), "dim") if row.card is not None else ()
    return text(clean(row.slice.allocation_id), "dim")


def _card_bar(row: CardLine, width: int) -> Cell:
    if isinstance(row, CardRow):
        return gauge(row.use_ppm, FULL_SHARE_PPM, width, _load(row.use_ppm))
    if isinstance(row, PartRow):
        return gauge(row.use_ppm, FULL_SHARE_PPM, width, "dim")
    return gauge(row.obtained_ppm, FULL_SHARE_PPM, width, "tenant")


def _card_use(row: CardLine, width: int) -> Cell:
    return _known(percent(row.obtained_ppm if isinstance(row, SliceRow) else row.use_ppm))


def _card_limit(row: CardLine, width: int) -> Cell:
    if isinstance(row, CardRow):
        return text(percent(row.device.allocated_ppm), "dim") if row.device.allocated_ppm else ()
    if isinstance(row, PartRow):
        return ()
    limit = row.slice.compute_limit_ppm
    return text(percent(limit)) if limit is not None else text(f"~{percent(row.slice.promise_ppm)}", "dim")


def _memory_parts(row: CardLine) -> tuple[int | None, int | None]:
    if isinstance(row, CardRow):
        return row.device.memory_used_bytes, row.device.memory_total_bytes
    if isinstance(row, PartRow):
        return row.memory_used_bytes, row.memory_total_bytes
    return row.slice.memory_used_bytes, row.slice.memory_limit_bytes or row.slice.memory_promise_bytes


def _memory_bar(row: CardLine, width: int) -> Cell:
    used, whole = _memory_parts(row)
    ppm = used * FULL_SHARE_PPM // whole if used is not None and whole else None
    return gauge(used, whole, width, _load(ppm))


def _memory_used(row: CardLine, width: int) -> Cell:
    return _known(size(_memory_parts(row)[0]))


def _memory_limit(row: CardLine, width: int) -> Cell:
    if isinstance(row, SliceRow) and row.slice.memory_limit_bytes is None:
        return text(f"~{size(row.slice.memory_promise_bytes)}", "dim")
    return text(size(_memory_parts(row)[1]), "dim")


def _peak(row: CardLine, width: int) -> Cell:
    return _known(size(row.slice.memory_peak_bytes)) if isinstance(row, SliceRow) else ()


def _throttled(row: CardLine, width: int) -> Cell:
    if not isinstance(row, SliceRow):
        return ()
    return _known(percent(row.throttled_ppm), "warn" if row.throttled_ppm else "dim")


def _denied(row: CardLine, width: int) -> Cell:
    if not isinstance(row, SliceRow):
        return ()
    denied = row.slice.denied_allocations_total
    return _known(UNKNOWN if denied is None else str(denied), "bad" if denied else "dim")


def _temperature(row: CardLine, width: int) -> Cell:
    if not isinstance(row, CardRow):
        return ()
    value = row.device.temperature_celsius
    return _known(UNKNOWN if value is None else f"{value}C", "bad" if value is not None and value >= 85 else "")


def _power(row: CardLine, width: int) -> Cell:
    if not isinstance(row, CardRow):
        return ()
    return _known(UNKNOWN if row.device.power_mw is None else f"{(row.device.power_mw + 500) // 1000}W")


def _trend(row: CardLine, width: int) -> Cell:
    return text(trend(row.trend, width), "trend") if isinstance(row, CardRow) else ()


def _of_node(row: CardLine) -> bool:
    return isinstance(row, CardRow) or (isinstance(row, PartRow) and row.card is None)


def card_columns(many_nodes: bool) -> list[Column[CardLine]]:
    """Columns of cards and slices."""
    node = Column[CardLine]("node", "NODE", lambda row, _: text(clean(row.node)) if _of_node(row) else (), 6, 20, 5)
    columns: list[Column[CardLine]] = [
        Column("name", "CARD / TENANT", _card_name, 13, 34, 0),
        Column("mode", "MODE", _card_mode, 4, 14, 14),
        Column("allocation", "ALLOCATION", _allocation, 24, 40, 40),
        Column("state", "STATE", _card_state, 9, 14, 1),
        Column("bar", "TIME", _card_bar, 6, 12, 6, stretch=True),
        Column("use", "USE", _card_use, 4, 4, 2, right=True),
        Column("limit", "LIMIT", _card_limit, 5, 5, 3, right=True),
        Column("membar", "MEMORY", _memory_bar, 6, 12, 7, stretch=True),
        Column("memory", "USED", _memory_used, 5, 5, 2, right=True),
        Column("of", "OF", _memory_limit, 5, 6, 4, right=True),
        Column("peak", "PEAK", _peak, 5, 5, 10, right=True),
        Column("throttled", "THROT", _throttled, 5, 5, 11, right=True),
        Column("denied", "DENIED", _denied, 6, 6, 12, right=True),
        Column("temperature", "TEMP", _temperature, 4, 4, 8, right=True),
        Column("power", "POWER", _power, 5, 5, 9, right=True),
        Column("trend", "LATELY", _trend, 6, 40, 13, right=True),
    ]
    return [node, *columns] if many_nodes else columns


def tenant_columns() -> list[Column[TenantRow]]:
    """Columns of tenants."""

    def states(row: TenantRow, width: int) -> Cell:
        return text(", ".join(f"{count} {clean(state)}" for state, count in row.states), "dim")

    def name(row: TenantRow, width: int) -> Cell:
        return text(clean(row.tenant), "bad" if row.tenant == UNACCOUNTED else "tenant")

    def own(value: Callable[[TenantRow], str]) -> Callable[[TenantRow, int], Cell]:
        # What only allocations have.
        return lambda row, _: () if row.tenant == UNACCOUNTED else _known(value(row))

    return [
        Column("tenant", "TENANT", name, 13, 34, 0),
        Column("allocations", "ALLOC", own(lambda row: str(row.allocations)), 5, 5, 7, right=True),
        Column("cards", "CARDS", lambda row, _: text(str(row.cards)), 5, 5, 6, right=True),
        Column("promise", "PROMISED", own(lambda row: cards(row.promise_ppm)), 8, 8, 3, right=True),
        Column("use", "USED", lambda row, _: _known(cards(row.use_ppm)), 5, 5, 1, right=True),
        Column("bar", "OF PROMISE", lambda row, width: _of_promise(row, width), 10, 14, 8),
        Column("memory", "MEMORY", lambda row, _: _known(size(row.memory_used_bytes)), 6, 6, 2, right=True),
        Column("of", "OF", own(lambda row: size(row.memory_limit_bytes)), 6, 6, 4, right=True),
        Column("throttled", "THROT", own(lambda row: percent(row.throttled_ppm)), 5, 5, 9, right=True),
        Column("denied", "DENIED", own(lambda row: UNKNOWN if row.denied is None else str(row.denied)), 6, 6, 10, right=True),
        Column("processes", "PROCS", lambda row, _: text(str(row.processes)), 5, 5, 5, right=True),
        Column("states", "SLICES", states, 8, 40, 11, stretch=True),
    ]


def _of_promise(row: TenantRow, width: int) -> Cell:
    if row.tenant == UNACCOUNTED:
        return ()
    return gauge(row.use_ppm, row.promise_ppm, width, "tenant")


def process_columns(many_nodes: bool) -> list[Column[ProcessRow]]:
    """Columns of processes."""

    def card(row: ProcessRow, width: int) -> Cell:
        return text(UNKNOWN if row.card < 0 else str(row.card))

    def kind(row: ProcessRow, width: int) -> Cell:
        return text("hooked", "good") if row.process.hooked else text("no hook", "bad")

    def owner(row: ProcessRow, width: int) -> Cell:
        return text(clean(row.tenant), "tenant" if row.process.tenant else "bad")

    node = Column[ProcessRow]("node", "NODE", lambda row, _: text(clean(row.node)), 6, 20, 6)
    columns: list[Column[ProcessRow]] = [
        Column("pid", "PID", lambda row, _: text(str(row.process.pid)), 7, 10, 0, right=True),
        Column("user", "USER", lambda row, _: text(clean(user_of(row)), ""), 5, 12, 8),
        Column("tenant", "TENANT", owner, 8, 24, 1),
        Column("card", "CARD", card, 4, 4, 3, right=True),
        Column("use", "USE", lambda row, _: _known(percent(row.use_ppm)), 4, 4, 2, right=True),
        Column("memory", "MEM", lambda row, _: _known(size(row.process.memory_used_bytes)), 5, 5, 2, right=True),
        Column("cpu", "CPU", lambda row, _: _host(row, lambda: percent(row.host.cpu_ppm if row.host else None)), 5, 5, 9, right=True),
        Column("rss", "RSS", lambda row, _: _host(row, lambda: size(row.host.rss_bytes if row.host else None)), 5, 5, 10, right=True),
        Column("kind", "HOOK", kind, 7, 7, 5),
        Column("framework", "FRAMEWORK", lambda row, _: text(clean(framework_of(row)), "dim"), 9, 10, 12),
        Column("where", "IN", lambda row, _: text(clean(where_of(row)), "dim"), 8, 28, 11),
        Column("command", "COMMAND", lambda row, _: text(clean(short_command(row)), ""), 8, 40, 4, stretch=True),
    ]
    return [node, *columns] if many_nodes else columns


def _host(row: ProcessRow, value: Callable[[], str]) -> Cell:
    # A process of another machine has none to show; one of this machine has, or it is not known.
    return _known(value()) if row.host is not None else ()


def user_of(row: ProcessRow) -> str:
    """The user the process runs as, else the one its allocation names; empty when neither is known."""
    return (row.host.user if row.host else None) or row.named.user or row.label_user or ""


def where_of(row: ProcessRow) -> str:
    """Pod, container, job or service, else the workload its allocation names; empty when there is none."""
    return row.named.where or row.workload or (row.host.where if row.host else None) or ""


_FRAMEWORKS = {"cuda": "CUDA", "cann": "CANN", "dtk": "DTK", "rocm": "ROCm"}


def framework_of(row: ProcessRow) -> str:
    """What it computes with, as its makers write it; empty when that is not known."""
    name = row.named.framework or (row.host.framework if row.host else None) or ""
    return _FRAMEWORKS.get(name, name)


def command_of(row: ProcessRow) -> str:
    """The command line, else the command's name; `?` when neither is known."""
    return (row.host.command_line if row.host else None) or row.process.command or UNKNOWN


def short_command(row: ProcessRow) -> str:
    """The command line without the folder of its program, which would fill a narrow column by itself."""
    program, space, rest = command_of(row).partition(" ")
    return (program.rsplit("/", 1)[-1] if program.startswith("/") else program) + space + rest


# Sort keys of the process pane: what unknown values come last in, whichever way it is sorted.
SORTS: dict[str, Callable[[ProcessRow], object]] = {
    "use": lambda row: row.use_ppm,
    "memory": lambda row: row.process.memory_used_bytes,
    "pid": lambda row: row.process.pid,
    "tenant": lambda row: row.process.tenant,
    "cpu": lambda row: row.host.cpu_ppm if row.host else None,
    "rss": lambda row: row.host.rss_bytes if row.host else None,
    "user": lambda row: user_of(row) or None,
    "command": lambda row: command_of(row),
    "card": lambda row: (row.node, row.card),
}
FALLING = frozenset({"use", "memory", "cpu", "rss"})


def sort_processes(rows: tuple[ProcessRow, ...], key: str, reverse: bool) -> list[ProcessRow]:
    """By `key` (of SORTS), then by pid; numbers fall and text rises unless `reverse`. What is not known comes last either way."""
    value = SORTS[key]
    known = sorted((row for row in rows if value(row) is not None), key=lambda row: row.process.pid)
    unknown = sorted((row for row in rows if value(row) is None), key=lambda row: row.process.pid)
    known.sort(key=lambda row: value(row), reverse=(key in FALLING) != reverse)  # type: ignore[arg-type, return-value]
    return known + unknown


def matches(row: ProcessRow, needle: str) -> bool:
    """Whether any text that the row shows contains `needle`, whatever its case."""
    process = row.process
    texts = (str(process.pid), row.tenant, row.node, user_of(row), where_of(row), command_of(row), process.allocation_id or "")
    return any(needle.casefold() in word.casefold() for word in (*texts, framework_of(row), "hooked" if process.hooked else "no hook"))
