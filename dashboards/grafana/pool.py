"""The dashboard "poolmeter: the pool": its variables, rows, panels and queries.

Every query names its metric in full, so that a search for a metric finds the panels that need it. Device series know no tenant: what
belongs to a tenant is joined from `poolmeter_slice_info` on node, card and allocation.
"""

from typing import Any

from poolmeter.dashboards.grafana.model import Json, Panel, Query, Row, dashboard, datasource_variable, label_variable

RATE = "[$__rate_interval]"
# Counters that move when a minute is closed: a shorter range would show steps.
MINUTES = "[5m]"
NODE = 'node=~"$node"'
KEY = "node, uuid, allocation"
# Cards of the chosen pools and nodes; slices of the chosen tenants besides.
IN_POOL = f'poolmeter_device_info{{{NODE}, pool=~"$pool"}}'
CARDS = f"and on (node, uuid) {IN_POOL}"
NODES = f"and on (node) {IN_POOL}"
THEIRS = f'{CARDS} and on ({KEY}) poolmeter_slice_info{{{NODE}, tenant=~"$tenant"}}'
TENANTS = f'max by ({KEY}, tenant) (poolmeter_slice_info{{{NODE}, tenant=~"$tenant"}})'


def per_tenant(slices: str) -> str:
    """A sum per tenant of an expression with one series a slice."""
    return f"sum by (tenant) (max by ({KEY}) ({slices} {CARDS}) * on ({KEY}) group_left (tenant) {TENANTS})"


def device(metric: str) -> str:
    """A gauge of the chosen cards."""
    return f"(poolmeter_device_{metric}{{{NODE}}} {CARDS})"


def device_rate(metric: str, over: str = RATE) -> str:
    """A counter of the chosen cards, a second."""
    return f"(rate(poolmeter_device_{metric}{{{NODE}}}{over}) {CARDS})"


def node_sum(metric: str) -> str:
    """A gauge of the chosen nodes, added up."""
    return f"sum(poolmeter_pool_{metric}{{{NODE}}} {NODES})"


def slice_gauge(metric: str) -> str:
    """A gauge of slices."""
    return f"poolmeter_slice_{metric}{{{NODE}}}"


def slice_rate(metric: str, over: str = RATE) -> str:
    """A counter of slices, a second."""
    return f"rate(poolmeter_slice_{metric}{{{NODE}}}{over})"


CARD_COUNT = f"count({device('up')})"
ALLOCATED = node_sum("allocated_devices")
BUSY = f"sum({device_rate('busy_seconds_total')})"
# Slice by slice, so that one whose use is not known does not pass for idle, and none makes up for another's excess.
UNUSED = f"sum(clamp_min({slice_gauge('promise_ratio')} - on ({KEY}) {slice_rate('busy_seconds_total')}, 0) {CARDS})"
USED_BY_SLICES = f"sum({slice_rate('busy_seconds_total')} {CARDS})"
SWITCHING = device_rate("switch_overhead_seconds_total", MINUTES)


def _stat(title: str, description: str, unit: str, queries: tuple[Query, ...], **options: Any) -> Panel:
    """One number, six of them side by side."""
    return Panel("stat", title, description, unit, queries, width=4, height=4, **options)


def _lines(title: str, description: str, unit: str, queries: tuple[Query, ...], **options: Any) -> Panel:
    """Something over time that is never below 0."""
    return Panel("timeseries", title, description, unit, queries, minimum=0, **options)


def pool_row() -> Row:
    """The pool in six numbers, then over time."""
    return Row(
        "Pool",
        (
            _stat(
                "Cards",
                "Cards that answer now. A card that is lost, or whose exporter is down, is not among them.",
                "short",
                (Query(f"sum({device('up')})", "cards"),),
            ),
            _stat(
                "Allocated",
                "Part of the pool's device time that is promised to somebody.",
                "percentunit",
                (Query(f"{ALLOCATED} / {CARD_COUNT}", "allocated"),),
                minimum=0,
                maximum=1,
            ),
            _stat(
                "Busy",
                "Part of the pool's device time in which a card ran a kernel of anybody.",
                "percentunit",
                (Query(f"{BUSY} / {CARD_COUNT}", "busy"),),
                minimum=0,
                maximum=1,
            ),
            _stat(
                "Promised and not used",
                "Part of the pool's device time that was promised and not used by those it was promised to.",
                "percentunit",
                (Query(f"{UNUSED} / {CARD_COUNT}", "promised, not used"),),
                minimum=0,
                maximum=1,
                thresholds=(("green", None), ("orange", 0.3), ("red", 0.6)),
            ),
            _stat(
                "Unaccounted",
                "Part of the pool's device time used by programs without the hook: billed to nobody.",
                "percentunit",
                (Query(f"sum({device_rate('unaccounted_busy_seconds_total')}) / {CARD_COUNT}", "unaccounted"),),
                minimum=0,
                maximum=1,
                thresholds=(("green", None), ("orange", 0.01), ("red", 0.05)),
            ),
            _stat(
                "Failing sources",
                "Sources (NVML, hook, allocations, ...) that an exporter could not read at its last collection.",
                "short",
                # No 0 where nobody answers: that is not "none fails".
                (Query(f"sum(poolmeter_collect_success{{{NODE}}} == bool 0)", "failing"),),
                thresholds=(("green", None), ("red", 1)),
            ),
            _lines(
                "Where the pool's device time goes",
                "Cards' worth of device time: used by allocations, by switching between them, by programs without the hook. "
                "The line is what is promised; the cards are the height.",
                "short",
                (
                    Query(f"{USED_BY_SLICES}", "used by allocations"),
                    Query(f"sum({SWITCHING})", "switching"),
                    Query(f"sum({device_rate('unaccounted_busy_seconds_total')})", "unaccounted"),
                    Query(ALLOCATED, "promised"),
                    Query(CARD_COUNT, "cards"),
                ),
                stack=True,
                colours=(
                    ("used by allocations", "green"),
                    ("switching", "purple"),
                    ("unaccounted", "red"),
                    ("promised", "blue"),
                    ("cards", "text"),
                ),
                overrides=tuple(_line(name) for name in ("promised", "cards")),
            ),
            _lines(
                "What is free, and free for whom",
                "Cards' worth of device time not promised; the part of it on cards that are already shared, which no request for a whole "
                "card can have; and what is promised beyond what the cards have.",
                "short",
                (
                    Query(node_sum("unallocated_devices"), "free"),
                    Query(node_sum("fragmented_devices"), "free on shared cards"),
                    Query(node_sum("overcommitted_devices"), "over-committed"),
                ),
            ),
            _lines(
                "Memory of the pool",
                "Device memory: used by anybody, promised to allocations, present.",
                "bytes",
                (
                    Query(f"sum({device('memory_used_bytes')})", "used"),
                    Query(f"sum({slice_gauge('memory_limit_bytes')} {CARDS})", "limits"),
                    Query(f"sum({device('memory_total_bytes')})", "present"),
                ),
            ),
            _lines(
                "Power of the pool",
                "What the boards draw together, from their energy counters.",
                "watt",
                (Query(f"sum({device_rate('energy_joules_total')})", "power"),),
            ),
        ),
    )


def _line(name: str) -> Json:
    properties: list[Json] = [{"id": "custom.stacking", "value": {"mode": "none"}}, {"id": "custom.fillOpacity", "value": 0}]
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def tenant_row() -> Row:
    """Who uses what."""
    return Row(
        "Tenants",
        (
            _lines(
                "Device time by tenant",
                "Cards' worth of device time that each tenant's programs used.",
                "short",
                (Query(per_tenant(slice_rate("busy_seconds_total")), "{{tenant}}"),),
                stack=True,
            ),
            _lines(
                "Use of the promise by tenant",
                "Device time used over device time promised. Above 1: a soft limit, or none, let it use what others left.",
                "percentunit",
                (Query(f"{per_tenant(slice_rate('busy_seconds_total'))} / {per_tenant(slice_gauge('promise_ratio'))}", "{{tenant}}"),),
            ),
            _lines(
                "Compute limit by tenant",
                "Cards' worth of device time that the hook holds each tenant to. A tenant without a limit is absent.",
                "short",
                (Query(per_tenant(slice_gauge("compute_limit_ratio")), "{{tenant}}"),),
            ),
            _lines(
                "Memory used against limit by tenant",
                "Device memory in use over the limit in force. At 1 the next allocation is denied.",
                "percentunit",
                (
                    Query(
                        f"{per_tenant(slice_gauge('memory_used_bytes'))} / {per_tenant(slice_gauge('memory_limit_bytes'))}",
                        "{{tenant}}",
                    ),
                ),
                thresholds=(("green", None), ("red", 0.95)),
            ),
            _lines(
                "Throttled time by tenant",
                "Seconds a second that programs waited because of a compute limit.",
                "short",
                (Query(per_tenant(slice_rate("throttled_seconds_total")), "{{tenant}}"),),
            ),
            _lines(
                "Denied allocations by tenant",
                "Memory allocations refused because they would have passed the limit, a second.",
                "short",
                (Query(per_tenant(slice_rate("allocations_denied_total")), "{{tenant}}"),),
            ),
            _lines(
                "Energy by tenant",
                "Power attributed to each tenant's device time. Idle power of a card belongs to nobody here.",
                "watt",
                (Query(per_tenant(slice_rate("energy_joules_total", MINUTES)), "{{tenant}}"),),
                stack=True,
            ),
            Panel(
                "table",
                "Slices",
                "Each allocation's part of each card now: state, limit, memory, and how long ago it last ran a kernel.",
                "short",
                tuple(
                    Query(f"max by ({KEY}{extra}) ({expr} {THEIRS})", table=True)
                    for extra, expr in (
                        (", tenant, project, user, workload, class", slice_gauge("info")),
                        (", state", f"{slice_gauge('state')} == 1"),
                        ("", slice_gauge("promise_ratio")),
                        ("", slice_gauge("memory_limit_bytes")),
                        ("", slice_gauge("memory_used_bytes")),
                        ("", f"time() - {slice_gauge('last_activity_timestamp_seconds')}"),
                    )
                ),
                transformations=(
                    {"id": "merge", "options": {}},
                    {
                        "id": "organize",
                        "options": {
                            "excludeByName": {"Time": True, "Value #A": True, "Value #B": True},
                            "renameByName": {
                                "Value #C": "promised",
                                "Value #D": "memory limit",
                                "Value #E": "memory used",
                                "Value #F": "last kernel ago",
                                "uuid": "card",
                            },
                        },
                    },
                ),
                overrides=(
                    _unit("promised", "percentunit"),
                    _unit("memory limit", "bytes"),
                    _unit("memory used", "bytes"),
                    _unit("last kernel ago", "s"),
                ),
            ),
        ),
    )


def _unit(name: str, unit: str) -> Json:
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}


def card_row() -> Row:
    """The cards one by one."""
    each = "{{node}} {{uuid}}"
    return Row(
        "Cards",
        (
            _lines(
                "Busy by card",
                "Part of the time in which the card ran a kernel.",
                "percentunit",
                (Query(f"max by (node, uuid) ({device_rate('busy_seconds_total')})", each),),
                maximum=1,
            ),
            _lines(
                "Memory by card",
                "Part of the card's memory in use.",
                "percentunit",
                (Query(f"max by (node, uuid) ({device('memory_used_bytes')} / {device('memory_total_bytes')})", each),),
                maximum=1,
            ),
            _lines(
                "Power by card",
                "Board power, from the energy counter: what Prometheus missed between two scrapes is in it.",
                "watt",
                (Query(f"max by (node, uuid) ({device_rate('energy_joules_total')})", each),),
            ),
            _lines(
                "Switching by card",
                "Part of the time lost to switching between programs that share the card.",
                "percentunit",
                (Query(f"max by (node, uuid) ({SWITCHING})", each),),
            ),
            _lines(
                "Unaccounted by card",
                "Part of the time used by programs without the hook.",
                "percentunit",
                (Query(f"max by (node, uuid) ({device_rate('unaccounted_busy_seconds_total')})", each),),
            ),
            _lines(
                "Unaccounted memory by card",
                "Memory held by programs without the hook.",
                "bytes",
                (Query(f"max by (node, uuid) ({device('unaccounted_memory_bytes')})", each),),
            ),
        ),
    )


def health_row() -> Row:
    """Whether the numbers above can be believed."""
    sources = "max by (node, source)"
    return Row(
        "Exporters",
        (
            _lines(
                "Exporters that answer",
                "1 while Prometheus gets the node's page, 0 while not.",
                "short",
                (Query(f'max by (node) (up{{job="poolmeter", {NODE}}})', "{{node}}"),),
                width=8,
                maximum=1,
            ),
            _lines(
                "Age of the data",
                "How long ago each source was last read. It should stay near the exporter's interval.",
                "s",
                (Query(f"{sources} (time() - poolmeter_last_collect_timestamp_seconds{{{NODE}}})", "{{node}} {{source}}"),),
                width=8,
            ),
            _lines(
                "Time to collect",
                "How long each source took at its last collection.",
                "s",
                (Query(f"{sources} (poolmeter_collect_duration_seconds{{{NODE}}})", "{{node}} {{source}}"),),
                width=8,
            ),
        ),
    )


def pool_dashboard() -> Json:
    """The dashboard."""
    return dashboard(
        uid="poolmeter-pool",
        title="poolmeter: the pool",
        description="Who uses which card, what is promised, what stands idle, and whether the exporters are well.",
        variables=(
            datasource_variable(),
            label_variable("pool", "Pool", "label_values(poolmeter_device_info, pool)"),
            label_variable("node", "Node", 'label_values(poolmeter_device_info{pool=~"$pool"}, node)'),
            label_variable("tenant", "Tenant", f"label_values(poolmeter_slice_info{{{NODE}}}, tenant)"),
        ),
        rows=(pool_row(), tenant_row(), card_row(), health_row()),
    )
