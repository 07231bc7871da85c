"""What the store costs on this machine, without a card; one run of all questions, beside plain DuckDB tables with the same rows.

ticks: rows made durable a second in batches of 30,000 slice rows (64 slices a node), checked before and not; segment and catalog synced
A loaded machine shows in `load_before`, and in wall time far above `cpu_ms`.
publish: time of a publication of one tick, one a second, and of a reader's point query in a process of its own beside it
start: time to open the store that results
month: bytes a minute row, tenant-day totals and the idlest devices of 7 days, over minutes, stored hours and stored days, and the same
minutes in a DuckDB table (`--millions` rows in 30 days; the disk needs about 100 MB a million rows with the table)
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from cards import Card, Results

from poolmeter import arrow
from poolmeter.collector.catalog import open_catalog
from poolmeter.collector.check import Expected, check_together
from poolmeter.collector.maintenance import maintain
from poolmeter.collector.retention import Retention
from poolmeter.collector.segments import day_of, write_segment
from poolmeter.collector.store import Batch, Store
from poolmeter.collector.tables import SegmentKind, arrow_schema
from poolmeter.model.units import DAY_US, MINUTE_US

DAY = 1_799_971_200_000_000
EPOCH = "0b8f1c1e-5a55-4c59-9a55-0d6a4a2c7b11"
SLICES = 64
TICK_NODES = 469
DAYS = 30


def slice_rows(engine: duckdb.DuckDBPyConnection, first_node: int, nodes: int, start_us: int, minutes: int) -> pa.Table:
    """Slice rows of some nodes and minutes: whose share it is hardly changes, what it used is noise; an eighth stands idle."""
    row = f"n, s, (m + {start_us // MINUTE_US})"
    idle = f"hash({row}, 1) % 8 = 0 OR (n % 5 = 0 AND s % 8 = 3)"
    minute = f"({start_us} + m * {MINUTE_US})::BIGINT"
    sql = f"""
    SELECT 'gpu-' || n AS node, '{EPOCH}' AS epoch, ((m + {(start_us - DAY) // MINUTE_US}) * {SLICES} + s + 1)::BIGINT AS sequence,
      {minute} AS minute_us, {minute} AS start_us, {MINUTE_US}::BIGINT AS span_us, 'h200' AS pool, 1000000::BIGINT AS completeness_ppm,
      'GPU-' || md5((n * 8 + s % 8)::VARCHAR) AS device_uuid, 'NVIDIA H200' AS device_model, 'a-' || md5((n * {SLICES} + s)::VARCHAR) AS allocation_id,
      'tenant-' || ((n * {SLICES} + s) % 64) AS tenant, 'hook' AS mode, CASE WHEN {idle} THEN 'held' ELSE 'active' END AS state,
      'hook' AS used_basis, 1::BIGINT AS generation, 7500000::BIGINT AS promised_us, 7500000::BIGINT AS allocated_us, 0::BIGINT AS suspended_us,
      (17 << 20)::BIGINT * {MINUTE_US} AS memory_allocated_kib_us, 'p-' || (s % 16) AS project, 'u-' || (s % 40) AS "user",
      'w-' || (n * {SLICES} + s) AS workload, 'training' AS workload_class, 'prod' AS environment, 125000::BIGINT AS promise_ppm,
      125000::BIGINT AS compute_limit_ppm, 17::BIGINT << 30 AS memory_limit_bytes, NULL::VARCHAR AS decision_id,
      CASE WHEN {idle} THEN 0 ELSE (hash({row}) % 7500000)::BIGINT END AS used_us,
      (((9 + hash(n, s, m // 7) % 8) << 20) * {MINUTE_US})::BIGINT AS memory_used_kib_us, ((10 + hash(n, s, m // 7) % 7) << 30)::BIGINT AS memory_peak_bytes,
      (hash({row}, 2) % 4000000000)::BIGINT AS energy_uj, CASE WHEN {idle} THEN 0 ELSE (hash({row}, 3) % 600000)::BIGINT END AS launches,
      0::BIGINT AS graph_launches, CASE WHEN hash(n, s) % 4 = 0 THEN (hash({row}, 4) % 3000000)::BIGINT ELSE 0 END AS throttled_us,
      0::BIGINT AS denied_allocations, 0::BIGINT AS denied_bytes,
      CASE WHEN {idle} THEN {DAY} ELSE {minute} + {MINUTE_US} - (hash({row}, 5) % 1000000)::BIGINT END AS last_activity_us, 0::BIGINT AS hook_faults
    FROM range({first_node}, {first_node + nodes}) a(n), range({minutes}) b(m), range({SLICES}) c(s)
    ORDER BY node, device_uuid, allocation_id, minute_us"""
    schema = arrow_schema(SegmentKind.SLICE)
    return engine.sql(sql).to_arrow_table().select(schema.names).cast(schema)


def wide(table: pa.Table) -> pa.Table:
    """The same rows as an exporter's answer has them: every column of the wire."""
    columns = {name: table.column(name) for name in table.column_names} | {"kind": pa.array(["slice"] * table.num_rows)}
    target = arrow.to_table([]).schema
    arrays = [columns[field.name].cast(field.type) if field.name in columns else pa.nulls(table.num_rows, field.type) for field in target]
    return pa.Table.from_arrays(arrays, schema=target)


def answers(engine: duckdb.DuckDBPyConnection, minute: int) -> list[tuple[str, pa.Table]]:
    """One tick: the answer of each node."""
    table = wide(slice_rows(engine, 0, TICK_NODES, DAY + minute * MINUTE_US, 1).sort_by([("node", "ascending"), ("sequence", "ascending")]))
    nodes = table.column("node").to_pylist()
    return [(nodes[at], table.slice(at, SLICES)) for at in range(0, table.num_rows, SLICES)]


def checked(tick: Sequence[tuple[str, pa.Table]], minute: int) -> list[Batch]:
    """The answers after the rules of ingestion."""
    now = DAY + (minute + 1) * MINUTE_US
    found = check_together([(table, Expected(node, EPOCH, 1 << 40, now)) for node, table in tick])
    return [Batch(node, EPOCH, result, now) for (node, _), result in zip(tick, found, strict=True)]


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def ticks(results: Results, folder: Path, engine: duckdb.DuckDBPyConnection, count: int) -> None:
    """Publish ticks one after the other, upkeep between them not counted."""
    bare, whole, rows = list[tuple[float, float]](), list[tuple[float, float]](), 0
    with Store(folder / "ticks") as store:
        for minute in range(count):
            tick = answers(engine, minute)
            began = time.perf_counter(), time.process_time()
            batches = checked(tick, minute)
            between = time.perf_counter(), time.process_time()
            done = store.publish(batches, now_us=DAY + (minute + 1) * MINUTE_US)
            ended = time.perf_counter(), time.process_time()
            rows = sum(done.rows.values())
            bare.append((ended[0] - between[0], ended[1] - between[1]))
            whole.append((ended[0] - began[0], ended[1] - began[1]))
            maintain(store, DAY + minute * MINUTE_US, Retention())
    for what, both in (("publish", bare), ("check and publish", whole)):
        seconds, cpu = [wall for wall, _ in both], statistics.median(spent for _, spent in both)
        results.add(
            "ticks",
            what=what,
            rows=rows,
            ticks=count,
            median_ms=statistics.median(seconds) * 1e3,
            p99_ms=quantile(seconds, 0.99) * 1e3,
            best_ms=min(seconds) * 1e3,
            cpu_ms=cpu * 1e3,
            rows_a_second=rows / statistics.median(seconds),
            rows_a_cpu_second=rows / cpu,
        )


READER = """
import json, sys, time
from pathlib import Path
from poolmeter.collector.catalog import open_catalog
root, until = Path(sys.argv[1]), time.time() + float(sys.argv[2])
took, failed, seen = [], 0, 0
sql = "SELECT used_us, state FROM slice_minutes WHERE node = ? AND minute_us = (SELECT max(minute_us) FROM slice_minutes WHERE node = ?) LIMIT 64"
open_catalog(root).close()
while time.time() < until:
    began = time.perf_counter()
    try:
        with open_catalog(root) as connection:
            seen += len(connection.execute("SELECT last_sequence FROM nodes WHERE node = 'gpu-7'").fetchall())
            last = connection.execute("SELECT max(last_sequence) FROM sequences WHERE node = 'gpu-7'").fetchall()[0][0]
            newest = connection.execute("SELECT max(max_minute_us) FROM segments WHERE kind = 'slice'").fetchall()[0][0]
            seen += len(connection.execute("SELECT used_us, state FROM slice_minutes WHERE node = 'gpu-7' AND minute_us = ?", [newest]).fetchall())
    except Exception as error:
        failed += 1
        print(error, file=sys.stderr)
    took.append(time.perf_counter() - began)
    time.sleep(0.05)
print(json.dumps({"took": took, "failed": failed, "rows": seen}))
"""


def publish(results: Results, folder: Path, engine: duckdb.DuckDBPyConnection, seconds: int) -> None:
    """A tick a second for so long, upkeep every ten, one reader beside."""
    took: list[float] = []
    root = folder / "publish"
    prepared = [checked(answers(engine, minute), minute) for minute in range(seconds)]
    with Store(root) as store:
        store.publish(prepared[0], now_us=DAY)
        reader = subprocess.Popen([sys.executable, "-c", READER, str(root), str(seconds)], stdout=subprocess.PIPE, text=True)
        for number, batches in enumerate(prepared[1:], 1):
            began = time.perf_counter()
            store.publish(batches, now_us=DAY + number * MINUTE_US)
            took.append(time.perf_counter() - began)
            store.sweep()
            if number % 10 == 0:
                maintain(store, DAY + number * MINUTE_US, Retention())
            time.sleep(max(0.0, 1 - (time.perf_counter() - began)))
        said = json.loads(reader.communicate()[0].splitlines()[-1])
        segments = len(store.state.segments)
    for what, values in (("publish", took), ("reader's point query", said["took"])):
        results.add(
            "publish",
            what=what,
            count=len(values),
            median_ms=statistics.median(values) * 1e3,
            p99_ms=quantile(values, 0.99) * 1e3,
            segments=segments,
            failed=said["failed"] if what != "publish" else 0,
        )
    began = time.perf_counter()
    Store(root).close()
    results.add(
        "start", what="open the store", ms=(time.perf_counter() - began) * 1e3, segments=segments, rows=seconds * TICK_NODES * SLICES
    )


TENANT_DAYS = "SELECT tenant, minute_us // 86400000000 AS d, sum(used_us), sum(allocated_us) FROM {source} GROUP BY ALL ORDER BY ALL"
IDLE = (
    "SELECT node, device_uuid, sum(used_us) / sum(allocated_us) AS share FROM {source} WHERE minute_us >= {since} GROUP BY ALL"
    " ORDER BY share, node, device_uuid LIMIT 20"
)
QUESTIONS: dict[str, str] = {"tenant-day totals": TENANT_DAYS, "20 idlest devices of 7 days": IDLE}


POLARS = """
import json, sys, time
import polars as pl
given = json.load(sys.stdin)
minutes = pl.scan_parquet(given["files"], hive_partitioning=False)
day = (pl.col("minute_us") // 86400000000).alias("d")
used, promised = pl.col("used_us").sum(), pl.col("allocated_us").sum()
asked = {
    "tenant-day totals": minutes.group_by("tenant", day).agg(used, promised).sort("tenant", "d"),
    "20 idlest devices of 7 days": minutes.filter(pl.col("minute_us") >= given["since"]).group_by("node", "device_uuid")
    .agg((used / promised).alias("share")).sort("share", "node", "device_uuid").head(20),
}
out = {"version": pl.__version__}
for name, frame in asked.items():
    times = []
    for _ in range(4):
        began = time.perf_counter()
        found = frame.collect(engine="streaming")
        times.append((time.perf_counter() - began) * 1e3)
    out[name] = [times[0], min(times[1:]), [list(row) for row in found.rows()]]
print(json.dumps(out))
"""


def polars(results: Results, python: Path, files: list[str], since: int, rows: int) -> dict[str, list[Any]]:
    """The same questions asked of the same minute segments by polars, in the given interpreter: what it answers."""
    given = json.dumps({"files": files, "since": since})
    done = subprocess.run([str(python), "-c", POLARS], input=given, stdout=subprocess.PIPE, text=True, check=True)
    out = json.loads(done.stdout)
    answers = {}
    for question in QUESTIONS:
        first, best, answers[question] = out[question]
        source = f"polars {out['version']} over the minute segments"
        results.add("questions", question=question, source=source, minute_rows=rows, first_ms=first, best_ms=best)
    return answers


def best_ms(ask: Callable[[], list[Any]]) -> tuple[float, float, list[Any]]:
    """The first time, the best of three more, and the answer."""
    times, answer = [], []
    for _ in range(4):
        began = time.perf_counter()
        answer = ask()
        times.append((time.perf_counter() - began) * 1e3)
    return times[0], min(times[1:]), answer


def month(results: Results, folder: Path, engine: duckdb.DuckDBPyConnection, millions: float, python: Path | None) -> None:
    """Thirty days of minutes, and what is asked of them."""
    nodes = max(1, round(millions * 1e6 / (DAYS * 1440 * SLICES)))
    root, plain_path = folder / "month", folder / "plain.duckdb"
    keep = Retention(minute_days=3000, hour_days=3000)
    rows = size = 0
    with Store(root) as store, duckdb.connect(str(plain_path)) as plain:
        for day in range(DAYS):
            table = slice_rows(engine, 0, nodes, DAY + day * DAY_US, 1440)
            made = write_segment(root, SegmentKind.SLICE, day_of(DAY + day * DAY_US), table)
            store.swap((), lambda made=made: [made], lambda _: None)  # type: ignore[misc]
            plain.register("incoming", table)
            plain.execute("CREATE TABLE minutes AS SELECT * FROM incoming" if day == 0 else "INSERT INTO minutes SELECT * FROM incoming")
            plain.unregister("incoming")
            rows, size = rows + made.rows, size + made.bytes
        began = time.perf_counter()
        maintain(store, DAY + (DAYS + 1) * DAY_US, keep)
        rolled_s = time.perf_counter() - began
        tiers = {kind: [segment for segment in store.state.segments.values() if segment.kind is kind] for kind in SegmentKind}
        plain.execute("CHECKPOINT")
    for kind in (SegmentKind.SLICE, SegmentKind.SLICE_HOUR, SegmentKind.SLICE_DAY):
        count, bytes_ = sum(segment.rows for segment in tiers[kind]), sum(segment.bytes for segment in tiers[kind])
        results.add("size", what=kind.value, rows=count, bytes=bytes_, bytes_a_row=bytes_ / count)
    results.add(
        "size",
        what="the same minutes in a DuckDB table",
        rows=rows,
        bytes=plain_path.stat().st_size,
        bytes_a_row=plain_path.stat().st_size / rows,
    )
    results.add("rollup", what="hours and days of 30 days", seconds=rolled_s, minute_rows_a_second=rows / rolled_s)
    since = DAY + (DAYS - 7) * DAY_US
    files = [str(root / segment.file) for segment in tiers[SegmentKind.SLICE]]
    beside = polars(results, python, files, since, rows) if python else {}
    for question, sql in QUESTIONS.items():
        found: dict[str, list[Any]] = {}
        for source, start in (("slice_minutes", "minute_us"), ("slice_hours", "hour_us"), ("slice_days", "day_us")):
            text = sql.replace("minute_us", start).format(source=source, since=since)

            def ask(text: str = text) -> list[Any]:
                with open_catalog(root) as connection:
                    return connection.execute(text).fetchall()

            first, best, found[source] = best_ms(ask)
            results.add("questions", question=question, source=source, minute_rows=rows, first_ms=first, best_ms=best)
        with duckdb.connect(str(plain_path), read_only=True) as plain:
            text = sql.format(source="minutes", since=since)
            first, best, found["plain"] = best_ms(lambda text=text: plain.execute(text).fetchall())  # type: ignore[misc]
            results.add("questions", question=question, source="DuckDB table", minute_rows=rows, first_ms=first, best_ms=best)
        if python:
            # Its columns of an idle device come as node, device, share too; a tuple is a list in JSON.
            found["polars"] = [tuple(row) for row in beside[question]]
        same = all(answer == found["plain"] for answer in found.values())
        results.add("answers", question=question, same_in_all_sources=same, rows=len(found["plain"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=5, help="minute rows of the month, in millions (5; the figures are for 100)")
    parser.add_argument("--ticks", type=int, default=30, help="ticks to publish one after the other (30)")
    parser.add_argument("--seconds", type=int, default=60, help="seconds of publishing beside a reader (60)")
    parser.add_argument("--polars", type=Path, help="an interpreter that has polars, to ask the same segments beside (left out)")
    parser.add_argument("--only", choices=["ticks", "publish", "month"], help="one part alone")
    parser.add_argument("--folder", type=Path, help="where the stores are made and deleted again (a temporary folder)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    results = Results(args.output, "store", Card("", "2 cores, no card", "none", 0))
    folder = Path(tempfile.mkdtemp(prefix="poolmeter-store-", dir=args.folder))
    try:
        with duckdb.connect() as engine:
            engine.execute("SET memory_limit = '8GB'")
            results.add("machine", cores=os.cpu_count(), load_before=os.getloadavg()[0])
            if args.only in (None, "ticks"):
                ticks(results, folder, engine, args.ticks)
            if args.only in (None, "publish"):
                publish(results, folder, engine, args.seconds)
            if args.only in (None, "month"):
                month(results, folder, engine, args.millions, args.polars)
            results.add("machine", cores=os.cpu_count(), load_after=os.getloadavg()[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
