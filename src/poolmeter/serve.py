"""What runs several components together: the collector's process with every component's routes, and `poolmeter up`."""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from poolmeter.collector.commands import Collector
from poolmeter.config import Config, load_config
from poolmeter.demo_tenants import Tenants
from poolmeter.errors import Unavailable
from poolmeter.places import CollectorData, data_folder, run_folder
from poolmeter.pool import NodePlan, Pool, simulated_nodes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute


class Stop:
    """True once SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


class Served(Collector):
    """Pull every configured exporter, keep what they send in the store under the data folder, and serve it over HTTP.

    Serves usage and chargeback reports too. Stops on SIGTERM after a last pull of every node. One collector owns a data folder.
    """

    def extra_routes(self, args: argparse.Namespace) -> "Sequence[BaseRoute]":
        from poolmeter.accounting.routes import routes

        return routes(CollectorData(data_folder(args.data)).store, load_config(args.config).accounting, tenant_of=asking_tenant)


def asking_tenant(request: "Request") -> str | None:
    """The tenant whose token a request to the collector has; None: somebody who may see all tenants'."""
    from poolmeter.collector.gate import caller_of
    from poolmeter.collector.tenancy import report_tenant

    return report_tenant(caller_of(request.scope))


class Up:
    """Start all daemons on loopback, print their URLs, and stay in the foreground until SIGTERM.

    On a machine with NVIDIA cards the pool is the real one; elsewhere, or with --simulate, it is a simulated pool of two nodes with
    four cards each and five tenants at work. --format json prints one line when everything serves.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--simulate", action="store_true", help="a simulated pool with demo tenants, even where there are cards")
        parser.add_argument("--no-dashboard", action="store_true", help="do not start the dashboard")

    def run(self, args: argparse.Namespace) -> int:
        config = load_config(args.config)
        stop = Stop()
        simulate = args.simulate or not has_cards()
        data = data_folder(args.data)
        lock = lock_folder(data)
        if simulate and not args.simulate:
            sys.stderr.write("poolmeter: no NVIDIA driver answers here: this is a simulated pool with demo tenants\n")
        pool = build_pool(config, args.config, data, simulate, not args.no_dashboard)
        try:
            pool.start()
            tenants = Tenants(pool, None, time.monotonic) if simulate else None
            if tenants is not None:
                tenants.start()
            announce(pool, args.format, tenants is not None)
            try:
                while not stop.requested:
                    time.sleep(0.2)
                    pool.watch()
                    if tenants is not None:
                        tenants.watch()
            finally:
                sys.stderr.write("poolmeter: stopping; the running minute is closed and kept\n")
                if tenants is not None:
                    tenants.stop()
        finally:
            pool.stop()
            os.close(lock)
        return 0


def build_pool(config: Config, config_option: str | None, data: Path, simulate: bool, dashboard: bool) -> Pool:
    """The pool that the configuration describes; simulated nodes are made afresh."""
    nodes = simulated_nodes(data) if simulate else (NodePlan(config.node.name, run_folder(), data),)
    return Pool(
        data=data,
        nodes=nodes,
        config=config_option,
        collector_port=config.collector.port,
        dashboard_port=config.dashboard.port if dashboard else None,
        interval_s=1.0 if simulate else config.collector.pull_interval_s,
    )


def lock_folder(data: Path) -> int:
    """Hold the data folder against a second pool; the open descriptor is the lock. Raises Unavailable."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        handle = os.open(data / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unavailable(f"data folder {data} cannot be written: {error.strerror or error}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise Unavailable(f"data folder {data} belongs to another poolmeter up, expected one that is free (--data)") from None
    return handle


def has_cards() -> bool:
    """Whether an NVIDIA driver with at least one card answers, asked in a child so that a stuck driver cannot hang us."""
    code = "import pynvml as n; n.nvmlInit(); raise SystemExit(0 if n.nvmlDeviceGetCount() > 0 else 1)"
    try:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def announce(pool: Pool, fmt: str, tenants: bool) -> None:
    """One JSON line, or a few lines for people."""
    if fmt == "json":
        sys.stdout.write(json.dumps(pool.state()) + "\n")
    else:
        width = max(len(name) for name in pool.daemons)
        for name, daemon in pool.daemons.items():
            if daemon.url:
                sys.stdout.write(f"{name.ljust(width)}  {daemon.url}\n")
        sys.stdout.write(f"data{' ' * max(0, width - 4)}  {pool.data}\n")
        if tenants:
            sys.stdout.write("demo tenants are at work\n")
        sys.stdout.write("Ctrl-C stops all of it; the first bill is there when the running minute is over:\n")
        sys.stdout.write(f"  poolmeter usage --data {pool.data}\n  poolmeter chargeback --data {pool.data}\n")
    sys.stdout.flush()
