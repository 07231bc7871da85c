"""`poolmeter demo`: the main job once on a simulated pool, to the bill, and the bill beside the simulator's truth."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from decimal import Decimal
from pathlib import Path
from typing import Any

from poolmeter.collector.catalog import query
from poolmeter.demo_tenants import TENANTS, Tenants
from poolmeter.errors import BadInput, DataError, PoolmeterError, Refused
from poolmeter.model.units import MICROSECONDS
from poolmeter.period import rfc3339
from poolmeter.places import CollectorData
from poolmeter.pool import Pool, simulated_nodes
from poolmeter.progress import Progress
from poolmeter.report import Report, write
from poolmeter.serve import Stop, lock_folder


class Demo:
    """The main job once on a simulated pool: five tenants on two nodes of four cards, metered, kept, billed, and one of them resized.

    Prints each tenant's billed device time beside the simulator's truth, and what was found: use by programs without the hook,
    refused allocations of memory, short-lived programs, resized allocations. Without --data the store is thrown away.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=130.0, metavar="N", help="how long the tenants work (130, at least 10)")

    def run(self, args: argparse.Namespace) -> int:
        if not 10 <= args.seconds <= 86_400:
            raise BadInput(f"--seconds is {args.seconds:g}, expected 10 to 86400")
        stop = Stop()
        with contextlib.ExitStack() as stack:
            if args.data:
                data = Path(args.data).absolute()
                # The bill is set beside the truth of this run alone.
                if (CollectorData(data).store).exists():
                    raise BadInput(f"data folder {data} holds a store already, expected one without, for the demo's own (--data)")
            else:
                data = Path(tempfile.mkdtemp(prefix="poolmeter-demo-"))
                stack.callback(shutil.rmtree, data, ignore_errors=True)
            lock_folder(data)
            pool = Pool(data, simulated_nodes(data), args.config)
            tenants = Tenants(pool, args.seconds, time.monotonic)
            resized = work(pool, tenants, args.seconds, stop)
            report = bill(pool, tenants, resized)
        write(report, args.format, args.output)
        return 0


def work(pool: Pool, tenants: Tenants, seconds: float, stop: Stop) -> int:
    """Run the pool and its tenants for `seconds`, resize once on the way, stop everything. The number of slices resized."""
    say(f"starting {len(pool.nodes)} nodes in {pool.data}")
    resized = 0
    try:
        pool.start()
        tenants.start()
        began = time.monotonic()
        say(f"{len(tenants.running)} tenants at work for {seconds:g} s")
        asked = False
        with Progress(seconds) as progress:
            while tenants.running and not stop.requested and time.monotonic() < began + seconds + 30:
                time.sleep(0.1)
                pool.watch()
                tenants.watch()
                progress.show(time.monotonic() - began)
                if not asked and time.monotonic() > began + 2 and settled(pool):
                    asked = True
                    progress.clear()
                    resized = resize(pool)
        if stop.requested:
            raise Refused("the demo was stopped before its end")
    finally:
        tenants.stop()
        pool.stop()
    return resized


def resize(pool: Pool) -> int:
    """Recommend, apply, and count the slices whose limit the next snapshots show changed."""
    from poolmeter.accounting.commands import Apply, Recommend

    before = limits(pool)
    for command, words in ((Recommend(), ["--minimum-minutes", "0"]), (Apply(), ["--all"])):
        parser = argparse.ArgumentParser()
        command.configure(parser)
        args = parser.parse_args(words)
        # In this process: on a busy machine two more interpreters would take longer to start than a short demo lasts.
        vars(args).update(data=str(pool.data), config=pool.config, format="json", output=os.devnull, debug=False)
        command.run(args)
    deadline = time.monotonic() + 5
    changed = 0
    while time.monotonic() < deadline:
        time.sleep(0.2)
        after = limits(pool)
        found = sum(1 for key, limit in after.items() if before.get(key) not in (None, limit))
        if found and not changed:
            # Nodes take their snapshots in turn, one a second: the others get time for theirs.
            deadline = min(deadline, time.monotonic() + 1.5)
        changed = found
    say(f"resized {changed} slice(s) while they ran")
    return changed


def settled(pool: Pool) -> bool:
    """Whether the store knows every tenant that lasts at work, its memory taken or refused: what it holds is then its peak."""
    sql = "SELECT DISTINCT tenant FROM now_slices WHERE memory_used_bytes > 0 OR denied_allocations_total > 0"
    try:
        held = set(query(CollectorData(pool.data).store, sql).column(0).to_pylist())
    except PoolmeterError:  # nothing is stored yet
        return False
    return {tenant.name for tenant in TENANTS if tenant.share is not None and tenant.seconds is None} <= held


def limits(pool: Pool) -> dict[tuple[str, str], int]:
    """Memory limits in force by (allocation, device)."""
    return {(row["allocation_id"], row["device_uuid"]): row["memory_limit_bytes"] for row in slices(pool) if "memory_limit_bytes" in row}


def slices(pool: Pool) -> list[dict[str, Any]]:
    """All slices of the exporters' newest snapshots."""
    found: list[dict[str, Any]] = []
    for name, daemon in pool.daemons.items():
        if name.startswith("exporter") and daemon.url:
            with urllib.request.urlopen(f"{daemon.url.rstrip('/')}/v1/snapshot", timeout=10) as answer:
                found += json.load(answer).get("slices", [])
    return found


def bill(pool: Pool, tenants: Tenants, resized: int) -> Report:
    """The bill of everything the pool did, beside the truth."""
    from poolmeter.accounting.chargeback import chargeback_report, chosen_plan
    from poolmeter.accounting.usage import usage_report
    from poolmeter.collector.catalog import open_catalog
    from poolmeter.period import parse_period

    root = CollectorData(pool.data).store
    with contextlib.closing(open_catalog(root)) as catalog:
        used = catalog.execute("SELECT tenant, sum(used_us), sum(denied_allocations) FROM slice_minutes GROUP BY tenant").fetchall()
        first_us, last_us = catalog.execute("SELECT min(start_us), max(start_us + span_us) FROM device_minutes").fetchall()[0]
        unhooked = catalog.execute(
            "SELECT count(DISTINCT (node, pid, start_ticks)), sum(used_us) FROM process_minutes WHERE NOT hooked"
        ).fetchall()[0]
    if first_us is None:
        raise DataError("the demo's store holds no device record, expected at least one for each device")
    period = parse_period(rfc3339(first_us), rfc3339(last_us), "UTC", last_us)
    plan, warnings = chosen_plan(root, None, None)
    charged = chargeback_report(root, period, plan)
    usage = usage_report(root, period)
    costs = {row["tenant"]: row["cost"] for row in charged.rows if row.get("line") == "usage"}
    billed = {tenant: int(us) for tenant, us, _ in used if us is not None}
    denied = [int(count) for _, _, count in used if count is not None]
    truth = true_device_us(tenants)
    rows = []
    for name in sorted({*billed, *truth}):
        row: dict[str, object] = {"tenant": name, "true_device_seconds": seconds_of(truth.get(name))}
        if name in billed:
            row |= {"billed_device_seconds": seconds_of(billed[name]), "cost": costs.get(name), "currency": plan.currency}
        rows.append(row)
    found = {
        "unaccounted": unhooked[0],
        "unaccounted_device_seconds": seconds_of(None if unhooked[1] is None else int(unhooked[1])),
        "denied_allocations": sum(denied) if denied else None,
        "short_lived": sum(1 for item in tenants.finished if item.tenant.seconds is not None and billed.get(item.tenant.name, 0) > 0),
        "resized": resized,
    }
    return Report(
        "demo",
        ("tenant", "billed_device_seconds", "true_device_seconds", "cost", "currency"),
        tuple(rows),
        period.start_text(),
        period.end_text(),
        {**usage.totals, **charged.totals},
        warnings + charged.warnings,
        {"found": found},
    )


def true_device_us(tenants: Tenants) -> dict[str, int]:
    """Device time by tenant as the simulator kept it, from what each tenant's program printed at its end."""
    truth: dict[str, int] = {}
    for item in tenants.finished:
        text = item.out.read_text().strip()
        if not text:
            log = item.out.with_suffix(".log").read_text(errors="replace").strip()[-300:]
            raise PoolmeterError(f"tenant {item.tenant.name} ended with status {item.process.returncode} and printed nothing: {log}")
        seconds = Decimal(str(json.loads(text.splitlines()[-1], parse_float=Decimal)["device_seconds"]))
        truth[item.tenant.name] = truth.get(item.tenant.name, 0) + int(seconds * MICROSECONDS)
    return truth


def seconds_of(us: int | None) -> Decimal | None:
    """Device seconds of microseconds, exactly."""
    return None if us is None else (Decimal(us) / MICROSECONDS).quantize(Decimal("0.000001"))


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"poolmeter demo: {text}\n")
    sys.stderr.flush()
