"""Daemons and tenants die by kill -9 at random moments; nothing acknowledged is lost, nothing counts twice, no promise stays."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from poolmeter.collector.catalog import open_catalog
from poolmeter.places import CollectorData, NodeData, NodeRun
from poolmeter.pool import NodePlan, Pool, simulated_nodes
from poolmeter.simulator.machine import Machine

TENANTS = 3


def poolmeter(*words: str) -> list[str]:
    return [sys.executable, "-m", "poolmeter.cli", *words]


def start_tenant(pool: Pool, node: NodePlan, number: int, seconds: float) -> "subprocess.Popen[bytes]":
    work = poolmeter("simulate", "tenant", "--kernel-us", "300", "--gap-us", "300", "--allocate", "1G", "--seconds", str(seconds))
    share = ("--tenant", f"tenant-{number % TENANTS}", "--compute", "20", "--memory", "8G", "--quiet")
    words = poolmeter("run", "--data", str(pool.data), *share, "--", *work)
    return subprocess.Popen(words, env=pool.environment(node), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(7200)
def test_kills_lose_nothing(tmp_path: Path, rng: random.Random, rounds: Callable[[int, int], Iterator[int]]) -> None:
    nodes = simulated_nodes(tmp_path, ("n",), "h200x4")
    node = nodes[0]
    assert node.machine is not None
    pool = Pool(tmp_path, nodes, interval_s=0.5, restart_pause_s=0.02, restart_most_s=0.1)
    running: list[subprocess.Popen[bytes]] = []
    started = 0
    killed: Counter[str] = Counter()
    try:
        pool.start()
        for _ in rounds(50, 1000):
            pool.watch()
            running = [process for process in running if process.poll() is None]
            while len(running) < TENANTS:
                running.append(start_tenant(pool, node, started, rng.uniform(0.5, 4)))
                started += 1
            time.sleep(rng.uniform(0.02, 0.5))
            alive = {
                name: daemon.process.pid
                for name, daemon in pool.daemons.items()
                if daemon.process is not None and daemon.process.poll() is None
            }
            tenants = [pid for process in running for pid in (process.pid, *children(process.pid))]
            samplers = [child for pid in alive.values() for child in children(pid)]
            # A daemon every second time, the one that was spared most: it starts again at once, and its kill is what matters most.
            spared = min(alive, key=lambda name: killed[name], default="tenant")
            kind = spared if rng.random() < 0.5 else rng.choice(["tenant", *(["child"] if samplers else [])])
            killed[kind] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive.get(kind) or rng.choice(samplers if kind == "child" else tenants), signal.SIGKILL)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        settle(pool, node)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        pool.stop()
    print(f"killed: {dict(killed)}")
    assert all(killed[name] >= 3 for name in (*pool.daemons, "tenant")), killed
    check_promises(node)
    check_store(tmp_path, node)


def settle(pool: Pool, node: NodePlan) -> None:
    """Everything runs again, and the enforcer has let go of what the dead held."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pool.watch()
        alive = all(daemon.process is not None and daemon.process.poll() is None for daemon in pool.daemons.values())
        if (
            alive
            and all(daemon.ready is None or daemon.ready.exists() for daemon in pool.daemons.values())
            and not list(NodeRun(node.run).allocations.iterdir())
        ):
            return
        time.sleep(0.2)


def check_promises(node: NodePlan) -> None:
    left = sorted(path.name for path in NodeRun(node.run).allocations.iterdir())
    assert left == [], "promises stay reserved for programs that are gone"


def check_store(data: Path, node: NodePlan) -> None:
    assert node.machine is not None
    with contextlib.closing(Machine.open(node.machine)) as machine:
        truth_us = sum(record.busy_ns for record in machine.truth()) // 1000
    with open_catalog(CollectorData(data).store) as catalog:
        keys = catalog.execute(
            " UNION ALL ".join(
                f"SELECT epoch, sequence FROM {view}" for view in ("device_minutes", "slice_minutes", "process_minutes", "event_log")
            )
        ).fetchall()
        overlaps = catalog.execute(
            "SELECT count(*) FROM (SELECT start_us + span_us AS until, lead(start_us) OVER (PARTITION BY device_uuid ORDER BY start_us) AS next"
            " FROM device_minutes) WHERE until > next + 50000"
        ).fetchall()[0][0]
        identity = catalog.execute(
            "SELECT count(*) FROM device_minutes WHERE allocated_us + reserved_unused_us + unallocated_us + suspended_us + down_us <> span_us"
        ).fetchall()[0][0]
        used_us = int(catalog.execute("SELECT sum(used_us) FROM slice_minutes").fetchall()[0][0])
        quarantined = catalog.execute("SELECT reason FROM quarantine").fetchall()
    with contextlib.closing(sqlite3.connect(NodeData(node.data).spool)) as spool:
        meta = dict(spool.execute("SELECT key, value FROM meta").fetchall())
        acknowledged = spool.execute("SELECT min(sequence) FROM consumers").fetchall()[0][0]
    assert len(keys) == len(set(keys)), "a record counts twice"
    for epoch in {epoch for epoch, _ in keys}:
        numbers = sorted(number for found, number in keys if found == epoch)
        assert numbers == list(range(1, len(numbers) + 1)), "an acknowledged record is lost"
    assert {epoch for epoch, _ in keys} == {meta["epoch"]}, "the spool began anew"
    assert len(keys) >= acknowledged > 0, "more is acknowledged than stored"
    assert len(keys) == int(meta["sequence"]), "what was recorded did not reach the store before the end"
    assert (overlaps, identity, quarantined) == (0, 0, [])
    # A killed tenant takes with it what its hook had not yet settled: at most a few launches each.
    assert used_us == pytest.approx(truth_us, rel=0.03), json.dumps({"used_us": used_us, "truth_us": truth_us})
