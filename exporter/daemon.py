"""Putting the exporter together: sources, agent, server, signals; reads like the picture of it."""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from poolmeter.clock import Clock, SystemClock
from poolmeter.config import Config, load_config
from poolmeter.errors import BadInput, Unavailable
from poolmeter.exporter.agent import Agent, Settings
from poolmeter.exporter.allocations import sweep_retired
from poolmeter.exporter.attribution import OwnAllocations
from poolmeter.exporter.attribution.build import build
from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.exporter.spool import Spool
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import Snapshot
from poolmeter.places import NodeData, NodeRun, data_folder, run_folder
from poolmeter.report import Report, write, write_whole
from poolmeter.tokens import read_token

_LOG = logging.getLogger("poolmeter.exporter")
FIRST_BUDGET_S = 5.0


def settings_of(args: argparse.Namespace, config: Config) -> Settings:
    """Flags over configuration."""
    from poolmeter.config import NodeSection

    try:
        name = NodeSection(name=args.name).name if args.name is not None else config.node.name
    except ValueError:
        raise BadInput(f"--name is {args.name!r:.80}, expected letters, digits, dots, dashes and underscores") from None
    if args.port is not None and not 0 <= args.port <= 65535:
        raise BadInput(f"--port is {args.port}, expected 0 to 65535")
    if not 0 <= args.linger <= 3600:
        raise BadInput(f"--linger is {args.linger:g}, expected 0 to 3600 seconds")
    return Settings(
        node=name,
        pool=config.node.pool,
        interval_ms=config.exporter.interval_ms,
        retention_days=config.exporter.retention_days,
        simulated=args.simulate,
    )


@contextlib.contextmanager
def sampler_environment(simulate: bool) -> Iterator[Mapping[str, str] | None]:
    """The child's environment: ours, or with --simulate one in which the loader finds the simulated library and a machine."""
    if not simulate:
        yield None
        return
    from poolmeter.simulator.machine import Machine

    named = os.environ.get("POOLMETER_SIM_MACHINE")
    with contextlib.ExitStack() as stack:
        if named:
            machine = stack.enter_context(contextlib.closing(Machine.open(Path(named))))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="poolmeter-"))
            machine = stack.enter_context(contextlib.closing(Machine.create("single", Path(folder) / "machine.sim")))
        yield {**os.environ, **machine.environment()}


def once(args: argparse.Namespace) -> int:
    """Look once and print. Two turns, so that what is integrated between readings has had a moment; nothing is kept."""
    config = load_config(args.config)
    settings = settings_of(args, config)
    with tempfile.TemporaryDirectory(prefix="poolmeter-") as folder, sampler_environment(args.simulate) as environment:
        sampler = SamplerProcess("nvidia", config.exporter.sampler_timeout_s, environment)
        spool = Spool(Path(folder) / "spool.sqlite", settings.node, ())
        own = OwnAllocations()
        who = build(config.attribution, own)
        try:
            data = NodeData(data_folder(args.data))
            agent = Agent(settings, NodeRun(run_folder(args.run)), data, spool, sampler, SystemClock(), attribution=own, who=who)
            agent.turn(config.exporter.sampler_timeout_s)
            time.sleep(0.25)
            snapshot = agent.turn(config.exporter.sampler_timeout_s)
        finally:
            who.close()
            sampler.close()
            spool.close()
    if args.format == "json":
        body = json.dumps({"schema": "poolmeter.snapshot/1", **to_plain(snapshot)}, ensure_ascii=False) + "\n"
        if args.output and args.output != "-":
            write_whole(Path(args.output), body.encode())
        else:
            sys.stdout.write(body)
    else:
        write(_report(snapshot), args.format, args.output)
    nvml = next(source for source in snapshot.sources if source.source == "nvml")
    if not nvml.ok:
        raise Unavailable(f"no card can be read: {nvml.reason}")
    return 0


def _report(snapshot: Snapshot) -> Report:
    columns = (
        "index",
        "uuid",
        "model",
        "up",
        "utilization_ppm",
        "memory_used_bytes",
        "memory_total_bytes",
        "allocated_ppm",
        "slices",
        "power_mw",
    )
    rows = []
    for device in snapshot.devices:
        row: dict[str, object] = {name: getattr(device, name) for name in columns if name != "slices"}
        row["slices"] = sum(part.device_uuid == device.uuid for part in snapshot.slices)
        rows.append(row)
    return Report("snapshot", columns, tuple(rows), warnings=tuple(s.reason or s.source for s in snapshot.sources if not s.ok))


class _Stop:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.event.set()


def serve(args: argparse.Namespace) -> int:
    """The daemon: until SIGTERM, then close the running minute, and linger until it is acknowledged."""
    from poolmeter.exporter.server import Face, Server, listen

    config = load_config(args.config)
    settings = settings_of(args, config)
    token_file = Path(args.token_file) if args.token_file else config.exporter.token_file
    token = None if token_file is None else read_token(token_file)
    run, data = NodeRun(run_folder(args.run)), NodeData(data_folder(args.data))
    if run.root.exists() and not run.root.is_dir():
        raise Unavailable(f"run folder {run.root} is a file, expected a folder, or nothing yet")
    stop, clock = _Stop(), SystemClock()
    bound = listen(args.host or config.exporter.host, config.exporter.port if args.port is None else args.port)
    with contextlib.ExitStack() as stack:
        stack.callback(bound.close)
        spool = Spool(data.spool, settings.node, config.exporter.consumers)
        stack.callback(spool.close)
        environment = stack.enter_context(sampler_environment(args.simulate))
        sampler = SamplerProcess("nvidia", config.exporter.sampler_timeout_s, environment)
        stack.callback(sampler.close)
        sweep_retired(run)
        own = OwnAllocations()
        who = build(config.attribution, own)
        stack.callback(who.close)
        agent = Agent(settings, run, data, spool, sampler, clock, attribution=own, who=who)
        agent.turn(min(FIRST_BUDGET_S, config.exporter.sampler_timeout_s))
        server = Server(Face(agent, token).application(), bound)
        server.start()
        stack.callback(server.stop)
        announce(server.url, args.ready_file)
        loop(agent, clock, stop.event, settings.interval_ms * 1000)
        agent.stop()
        linger(agent, args.linger)
    return 0


def loop(agent: Agent, clock: Clock, stop: threading.Event, interval_us: int) -> None:
    """Turns at whole multiples of the interval of wall time, so that one falls right behind each minute's end; one that fails is logged."""
    while True:
        wait_us = interval_us - clock.wall_us() % interval_us
        if stop.wait(wait_us / 1_000_000):
            break
        try:
            agent.turn(0.5 * interval_us / 1_000_000)
        except Exception:
            _LOG.exception("a turn failed; the page stays as it was, the next turn makes up for it")
            agent.recover()
    # What was counted up to now belongs to the minute that is about to be closed.
    agent.turn(0.2)


def linger(agent: Agent, seconds: float) -> None:
    """Serve on until every consumer has everything, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and agent.spool.acknowledged() < agent.spool.last_sequence:
        time.sleep(0.05)
    agent.tidy()


def announce(url: str, ready_file: str | None) -> None:
    """Say where it serves."""
    if ready_file is not None:
        write_whole(Path(ready_file), (json.dumps({"url": url, "pid": os.getpid()}) + "\n").encode())
    sys.stdout.write(f"exporter  {url}\n")
    sys.stdout.flush()
