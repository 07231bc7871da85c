"""Putting the exporter together: sources, agent, server, signals; reads like the picture of it."""

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.clock import Clock, SystemClock
from poolmeter.errors import Refused, Unavailable
from poolmeter.exporter.agent import Agent
from poolmeter.exporter.allocations import sweep_retired
from poolmeter.exporter.attribution import OwnAllocations
from poolmeter.exporter.attribution.build import build
from poolmeter.exporter.bell import Bell
from poolmeter.exporter.collectors.family import Outputs
from poolmeter.exporter.control import ControlSocket, Request
from poolmeter.exporter.plan import Live, Plan, plan_of
from poolmeter.exporter.push import Push
from poolmeter.exporter.sampling import SamplerProcess
from poolmeter.exporter.spool import Spool
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import Snapshot
from poolmeter.period import rfc3339
from poolmeter.places import NodeData, NodeRun, data_folder, run_folder
from poolmeter.report import Report, write, write_whole

if TYPE_CHECKING:
    from poolmeter.exporter.otlp import Pusher

_LOG = logging.getLogger("poolmeter.exporter")
FIRST_BUDGET_S = 5.0


@contextlib.contextmanager
def sampler_environment(simulate: bool) -> Iterator[Mapping[str, str] | None]:
    """The child's environment: ours, or with --simulate one in which the loader finds the simulated library and a machine."""
    if not simulate:
        yield None
        return
    from poolmeter.simulator.machine import Machine

    named = os.environ.get("POOLMETER_SIM_MACHINE")
    with contextlib.ExitStack() as stack:
        folder = None if named else stack.enter_context(tempfile.TemporaryDirectory(prefix="poolmeter-"))
        # Opened to learn its environment alone: what reads the cards is the child, and the child alone.
        with contextlib.closing(
            Machine.open(Path(named)) if named else Machine.create("single", Path(str(folder)) / "machine.sim")
        ) as machine:
            environment = {**os.environ, **machine.environment()}
        yield environment


def once(args: argparse.Namespace) -> int:
    """Look once and print: the page of `/metrics`, or the snapshot in the format that is named.

    Two turns, so that what is integrated between readings has had a moment; nothing is kept. Raises Refused when a source failed.
    """
    plan = plan_of(args)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poolmeter-")))
        environment = stack.enter_context(sampler_environment(args.simulate))
        sampler = stack.enter_context(contextlib.closing(SamplerProcess("nvidia", plan.sampler_timeout_s, environment)))
        spool = stack.enter_context(contextlib.closing(Spool(folder / "spool.sqlite", plan.settings.node, ())))
        own = OwnAllocations()
        who = stack.enter_context(contextlib.closing(build(plan.attribution, own)))
        data = NodeData(data_folder(args.data))
        agent = Agent(plan.settings, NodeRun(run_folder(args.run)), data, spool, sampler, SystemClock(), attribution=own, who=who)
        agent.turn(plan.sampler_timeout_s)
        time.sleep(0.25)
        snapshot = agent.turn(plan.sampler_timeout_s)
        page = agent.page()
    if args.format is None or args.format == "json":
        if args.format is None and page is not None:
            from poolmeter.exporter.compat import families_of
            from poolmeter.exporter.render import Renderer

            body = Renderer(families_of(plan.compat)).render(page)
        else:
            body = (json.dumps({"schema": "poolmeter.snapshot/1", **to_plain(snapshot)}, ensure_ascii=False) + "\n").encode()
        if args.output and args.output != "-":
            write_whole(Path(args.output), body)
        else:
            sys.stdout.write(body.decode())
    else:
        write(_report(snapshot), args.format, args.output)
    failed = [f"{source.source} ({source.reason})" for source in snapshot.sources if not source.ok]
    if failed:
        raise Refused(f"sources failed: {'; '.join(failed)}")
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


def serve(args: argparse.Namespace) -> int:
    """The daemon: until SIGTERM, then close the running minute, and linger until it is acknowledged."""
    from poolmeter.exporter.server import Face, Server, listen
    from poolmeter.web.guard import Guard

    plan = plan_of(args)
    run, data = NodeRun(run_folder(args.run)), NodeData(data_folder(args.data))
    if run.root.exists() and not run.root.is_dir():
        raise Unavailable(f"run folder {run.root} is a file, expected a folder, or nothing yet")
    clock = SystemClock()
    bound = listen(plan.host, plan.port)
    with contextlib.ExitStack() as stack:
        stack.callback(bound.close)
        context = None
        if plan.web.tls_server_config is not None:
            from poolmeter.web.tls import RotatingContext

            context = RotatingContext(plan.web.tls_server_config)
        spool = Spool(data.spool, plan.settings.node, plan.consumers)
        stack.callback(spool.close)
        bell = Bell()
        stack.callback(bell.close)
        bell.answer_signals()
        environment = stack.enter_context(sampler_environment(args.simulate))
        sampler = SamplerProcess("nvidia", plan.sampler_timeout_s, environment, bell=bell.fileno())
        stack.callback(sampler.close)
        sweep_retired(run)
        own = OwnAllocations()
        who = build(plan.attribution, own)
        stack.callback(who.close)
        agent = Agent(plan.settings, run, data, spool, sampler, clock, attribution=own, who=who)
        control = _control(run, bell)
        if control is not None:
            stack.callback(control.close)
        agent.turn(min(FIRST_BUDGET_S, plan.sampler_timeout_s))
        face = Face(agent, plan.token, plan.compat)
        guard = Guard(face.application(), plan.web, plan.token)
        server = Server(guard, bound, context)
        server.start()
        stack.callback(server.stop)
        pusher = _pusher(plan, agent)
        if pusher is not None:
            stack.callback(pusher.stop)
        push = None if plan.push is None else Push(plan.push, plan.settings.node, agent)
        if push is not None:
            push.start()
        live = Live(args, plan, agent, sampler, face, guard, context, lambda section: who.take(build(section, own)))
        agent.outputs = lambda: Outputs(
            sampler_restarts=sampler.restarts,
            released=agent.released_us() is not None,
            reload_ok=live.ok,
            pushes_ok=pusher.ok if pusher else None,
            pushes_failed=pusher.failed if pusher else None,
            push_ok=push.ok if push else None,
            push_refused=push.refused if push else None,
            push_failed=push.failed if push else None,
            push_last_us=push.last_us if push else None,
            push_waiting=push.waiting if push else None,
        )
        announce(server.url, args.ready_file)
        loop(agent, clock, bell, control, live.reload)
        agent.stop()
        if push is not None:
            push.finish(args.linger)
        linger(agent, args.linger)
    return 0


def _control(run: NodeRun, bell: Bell) -> ControlSocket | None:
    try:
        return ControlSocket(run.exporter_socket, bell.ring)
    except Unavailable as error:
        _LOG.warning("%s; poolmeter exporter release has nobody to ask", error)
        return None


def _pusher(plan: Plan, agent: Agent) -> "Pusher | None":
    if plan.otlp_endpoint is None:
        return None
    from poolmeter.exporter.otlp import Pusher

    pusher = Pusher(plan.otlp_endpoint, plan.otlp_interval_s, agent)
    pusher.start()
    return pusher


def loop(agent: Agent, clock: Clock, bell: Bell, control: ControlSocket | None, reload: Callable[[], None]) -> None:
    """Turns at whole multiples of the interval of wall time, so that one falls right behind each minute's end; one that fails is logged.

    Between them it does what signals and the control socket ask for, on this one thread: nothing changes in the midst of a turn.
    """
    due_us = 0
    while True:
        interval_us = agent.settings.interval_ms * 1000
        now = clock.wall_us()
        if not now < due_us <= now + interval_us:  # the first, the next, or a clock that was set
            due_us = now + interval_us - now % interval_us
        bell.wait((due_us - now) / 1_000_000)
        bell.silence()
        if bell.stop:
            break
        if bell.reload:
            bell.reload = False
            reload()
        while control is not None and not control.requests.empty():
            request = control.requests.get()
            request.answer.put(_control_answer(agent, clock, request))
            _turn(agent, 0.0)  # so that pages say it at once
        if clock.wall_us() >= due_us:
            _turn(agent, 0.5 * interval_us / 1_000_000)
    # What was counted up to now belongs to the minute that is about to be closed.
    agent.turn(0.2)


def _turn(agent: Agent, budget_s: float) -> None:
    try:
        agent.turn(budget_s)
    except Exception:
        _LOG.exception("a turn failed; the page stays as it was, the next turn makes up for it")
        agent.recover()


def _control_answer(agent: Agent, clock: Clock, request: Request) -> dict[str, Any]:
    if request.verb == "resume":
        agent.resume()
        return {"schema": "poolmeter.release/1", "released": False}
    seconds = request.seconds or 0
    stuck = agent.release(seconds * 1_000_000)
    if stuck is not None:
        return {"error": f"the cards are not free yet: {stuck}", "exit_code": Unavailable.exit_code}
    until = rfc3339((clock.wall_us() // 1_000_000 + seconds) * 1_000_000)
    _LOG.info("the cards are released until %s", until)
    return {"schema": "poolmeter.release/1", "released": True, "until": until}


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
