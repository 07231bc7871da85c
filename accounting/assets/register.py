"""The register as people see it: what the books say of each device, filled up with what the store knows and the books do not."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from poolmeter.accounting.assets.stays import Sighting, Stay, stays_of
from poolmeter.accounting.source import rows_of
from poolmeter.books.assets import FIELDS, Row
from poolmeter.model.units import DAY_US, MINUTE_US
from poolmeter.period import rfc3339
from poolmeter.report import Report

if TYPE_CHECKING:
    import duckdb

COLUMNS = ("uuid", "node", *FIELDS, "first_seen", "last_seen")
STAY_COLUMNS = ("node", "from", "to")

Device = Mapping[str, object]  # of `COLUMNS`, those that are known, and `nodes`, a tuple of Stay


def devices_of(connection: "duckdb.DuckDBPyConnection", register: Sequence[Row]) -> list[Device]:
    """Every device of the register and of the store, by uuid. What a person wrote stands; model and vendor are the store's without."""
    seen: dict[str, tuple[object, ...]] = {}
    for uuid, *rest in rows_of(
        connection, "SELECT uuid, node, model, vendor, first_seen_us, last_seen_us FROM devices ORDER BY last_seen_us"
    ):
        before = seen.get(str(uuid))
        first = rest[3] if before is None else min(int(str(before[3])), int(str(rest[3])))
        seen[str(uuid)] = (*rest[:3], first, rest[4])
    history = node_history(connection)
    written = {str(row["uuid"]): row for row in register}
    devices: list[Device] = []
    for uuid in sorted({*seen, *written, *history}):
        row: dict[str, object] = {name: value for name, value in written.get(uuid, {"uuid": uuid}).items() if value is not None}
        stays = history.get(uuid, ())
        if uuid in seen:
            node, model, vendor, first_us, last_us = seen[uuid]
            stays = stays or (Stay(str(node), int(str(first_us)), int(str(last_us)) + 1),)
            found = {"node": node, "model": model, "vendor": vendor}
            row = {**{name: value for name, value in found.items() if value is not None}, **row}
            row |= {"first_seen": rfc3339(int(str(first_us))), "last_seen": rfc3339(int(str(last_us)))}
        elif stays:
            row |= {"node": stays[-1].node, "first_seen": rfc3339(stays[0].start_us), "last_seen": rfc3339(stays[-1].end_us)}
        devices.append({**row, "nodes": stays})
    return devices


def node_history(connection: "duckdb.DuckDBPyConnection") -> dict[str, tuple[Stay, ...]]:
    """The stays of each device that has records: from days where they tell it, from minutes for the newest day and days of a move.

    Days are kept for ever, minutes are not: a move within an old day is one at the end of the earlier node's records of that day.
    """
    newest_us = int(str(rows_of(connection, "SELECT COALESCE(MAX(day_us), -1) FROM device_days")[0][0]))
    moved = "SELECT device_uuid, day_us FROM device_days GROUP BY 1, 2 HAVING COUNT(DISTINCT node) > 1"
    by_minute = f"""WITH chosen AS (
        SELECT device_uuid, node, minute_us FROM device_minutes WHERE minute_us >= {newest_us}
        UNION SELECT m.device_uuid, m.node, m.minute_us FROM device_minutes m
          JOIN ({moved}) d ON m.device_uuid = d.device_uuid AND m.minute_us // {DAY_US} * {DAY_US} = d.day_us
      ), marked AS (
        SELECT *, CASE WHEN LAG(node) OVER times = node THEN 0 ELSE 1 END AS moved FROM chosen
        WINDOW times AS (PARTITION BY device_uuid ORDER BY minute_us, node)
      ), runs AS (
        SELECT *, SUM(moved) OVER (PARTITION BY device_uuid ORDER BY minute_us, node) AS run FROM marked)
      SELECT device_uuid, node, MIN(minute_us), MAX(minute_us) FROM runs GROUP BY device_uuid, node, run"""
    by_day = f"""SELECT device_uuid, node, first_minute_us, last_minute_us FROM device_days d WHERE day_us < {newest_us}
      AND NOT EXISTS (SELECT 1 FROM device_minutes m WHERE m.device_uuid = d.device_uuid AND m.minute_us // {DAY_US} * {DAY_US} = d.day_us
        AND (d.device_uuid, d.day_us) IN ({moved}))"""
    sightings: dict[str, list[Sighting]] = {}
    for uuid, node, first_us, last_us in [*rows_of(connection, by_minute), *rows_of(connection, by_day)]:
        sightings.setdefault(str(uuid), []).append(Sighting(str(node), int(str(first_us)), int(str(last_us)) + MINUTE_US))
    return {uuid: stays_of(seen) for uuid, seen in sightings.items()}


def chosen(devices: Sequence[Device], filters: Mapping[str, str | None], without: Sequence[str] = ()) -> list[Device]:
    """Those with the values that the filters name, and without the fields in `without`."""
    wanted = {name: value for name, value in filters.items() if value is not None}
    return [
        device
        for device in devices
        if all(device.get(name) == value for name, value in wanted.items()) and all(device.get(name) is None for name in without)
    ]


def list_report(devices: Sequence[Device]) -> Report:
    """Devices as a report, a row each."""
    rows = tuple({name: device[name] for name in COLUMNS if device.get(name) is not None} for device in devices)
    used = tuple(name for name in COLUMNS if name == "uuid" or any(name in row for row in rows))
    return Report("assets", used, rows, totals={"devices": len(rows)})


def show_report(device: Device) -> Report:
    """One device: what is known of it, and a row for each stay on a node."""
    stays = device["nodes"]
    assert isinstance(stays, tuple)
    rows = tuple({"node": stay.node, "from": rfc3339(stay.start_us), "to": rfc3339(stay.end_us)} for stay in stays)
    asset = {name: device[name] for name in COLUMNS if device.get(name) is not None}
    return Report("asset", STAY_COLUMNS, rows, totals={"stays": len(rows)}, extra={"asset": asset})
