"""Baselines of a meter page: what of it is counted already."""

from poolmeter.exporter.ledger import SliceLedger
from poolmeter.pages.meter import MeterReading


def reset(part: SliceLedger, page: int) -> None:
    """A page whose counters began at zero: nothing of it is counted yet."""
    part.page = page
    part.base_busy_us = part.base_launches = part.base_graph_launches = part.base_throttled_us = part.base_denied = 0
    part.base_denied_bytes = part.base_faults = part.base_memory_peak = part.base_retired_busy_us = part.base_retired_launches = 0
    part.backlog_us = part.given_up_us = 0


def rebase(part: SliceLedger, meter: MeterReading, uuid: str) -> None:
    """Take what the page says now as counted."""
    total = meter.total(uuid)
    part.page = meter.created_ns
    part.base_busy_us = total.busy_ns // 1000
    part.base_launches, part.base_graph_launches = total.launches, total.graph_launches
    part.base_throttled_us = total.throttled_ns // 1000
    part.base_denied = total.denied_limit + total.denied_card + total.denied_device
    part.base_denied_bytes = total.denied_limit_bytes + total.denied_card_bytes
    part.base_faults = meter.hook_faults(uuid)
    part.base_memory_peak = meter.shared[uuid].memory_peak
    part.base_retired_busy_us, part.base_retired_launches = meter.retired[uuid].busy_ns // 1000, meter.retired[uuid].launches
