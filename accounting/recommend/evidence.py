"""What the recommender knows, read from the store: the newest snapshot of each slice and its records over the window."""

from pathlib import Path
from typing import TYPE_CHECKING

from poolmeter.accounting.recommend.memory_limit import Inputs, Settings, SliceEvidence
from poolmeter.accounting.source import ask, rows_of
from poolmeter.config import RecommendSection
from poolmeter.model.units import DAY_US

if TYPE_CHECKING:
    import duckdb

_SQL = """
WITH records AS (
  SELECT node, allocation_id, device_uuid, COUNT(DISTINCT minute_us) AS minutes, COUNT(*) FILTER (WHERE state = 'unknown') AS unknown_minutes,
    MAX(memory_peak_bytes) AS peak, COUNT(memory_peak_bytes) AS peaks, SUM(denied_allocations) AS denied, COUNT(denied_allocations) AS denials,
    COUNT(*) AS records, SUM(span_us * completeness_ppm) AS complete, SUM(span_us) AS span
  FROM slice_minutes WHERE minute_us >= ? GROUP BY node, allocation_id, device_uuid
), tampering AS (
  SELECT DISTINCT node, allocation_id FROM event_log WHERE event = 'tampered' AND at_us >= ?
)
SELECT n.node, n.allocation_id, n.device_uuid, n.tenant, n.generation, n.state, n.memory_limit_bytes, n.memory_used_bytes,
  n.memory_peak_bytes, n.denied_allocations_total, n.created_us, r.minutes, r.unknown_minutes, r.peak, r.peaks, r.denied, r.denials,
  r.records, r.complete, r.span, n.taken_us, EXISTS (
    SELECT 1 FROM tampering t WHERE t.node = n.node AND (t.allocation_id IS NULL OR t.allocation_id = n.allocation_id)) AS tampered
FROM now_slices n LEFT JOIN records r USING (node, allocation_id, device_uuid)
ORDER BY n.node, n.allocation_id, n.device_uuid
"""


def settings_of(section: RecommendSection, minimum_minutes: int | None = None) -> Settings:
    """The rule's settings of a configuration; `minimum_minutes` overrides its own."""
    return Settings(
        headroom_percent=section.memory_headroom_percent,
        resident_percent=section.memory_resident_percent,
        dead_band_percent=section.memory_dead_band_percent,
        minimum_minutes=section.minimum_minutes if minimum_minutes is None else minimum_minutes,
        expires_hours=section.expires_hours,
    )


def read_inputs(root: Path, window_days: int, now_us: int) -> Inputs:
    """Evidence of every slice in the newest snapshots. Raises what `source.ask` raises."""
    return ask(root, lambda connection: inputs_of(connection, window_days, now_us))


def inputs_of(connection: "duckdb.DuckDBPyConnection", window_days: int, now_us: int) -> Inputs:
    """`read_inputs` of an open catalog."""
    start_us = now_us - window_days * DAY_US
    rows = rows_of(connection, _SQL, (start_us, start_us))
    return Inputs(now_us=now_us, window_start_us=start_us, slices=tuple(_evidence(row, start_us) for row in rows))


def _evidence(row: tuple[object, ...], start_us: int) -> SliceEvidence:
    node, allocation, device, tenant, generation, state = row[:6]
    (
        limit,
        resident,
        last_peak,
        denied_total,
        created_us,
        minutes,
        unknown,
        peak,
        peaks,
        denied,
        denials,
        records,
        complete,
        span,
        taken_us,
    ) = (None if value is None else int(str(value)) for value in row[6:21])
    records = records or 0
    known_peaks = [value for value in (peak, last_peak) if value is not None]
    # A peak or a refusal that some record does not know could have been the one that matters.
    peak_bytes = max(known_peaks) if known_peaks and (peaks or 0) == records else None
    refused = (denied or 0) if (denials or 0) == records else None
    if refused is not None and created_us is not None and created_us >= start_us:
        # Younger than the window: its own counter also knows the minute that is still open.
        refused = None if denied_total is None and not records else max(refused, denied_total or 0)
    return SliceEvidence(
        node=str(node),
        allocation_id=str(allocation),
        device_uuid=str(device),
        tenant=str(tenant),
        generation=int(str(generation)),
        state=str(state),
        taken_us=taken_us or 0,
        limit_bytes=limit,
        resident_bytes=resident,
        peak_bytes=peak_bytes,
        denied_allocations=refused,
        minutes=minutes or 0,
        unknown_minutes=unknown or 0,
        completeness_ppm=complete // span if complete is not None and span else None,
        tampered=bool(row[21]),
    )
