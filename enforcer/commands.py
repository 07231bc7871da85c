"""The commands of the enforcer: the daemon, and the allocation verbs that talk to it."""

import argparse
import asyncio
import datetime
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from poolmeter import report
from poolmeter.config import Config, NodeSection, load_config
from poolmeter.enforcer import namespace
from poolmeter.enforcer.admission import OverCommit
from poolmeter.enforcer.book import Book
from poolmeter.enforcer.daemon import Daemon
from poolmeter.enforcer.decisions import DecisionPoll
from poolmeter.enforcer.inventory import NvmlInventory
from poolmeter.enforcer.journal import Journal
from poolmeter.enforcer.nodes import KnownNode, choose, first, known_nodes, show
from poolmeter.enforcer.options import add_allocation_options, add_run_folder, caller_uid, request_of
from poolmeter.enforcer.request import ResizeRequest, check_id
from poolmeter.enforcer.run import simulated_environment
from poolmeter.errors import BadInput, Unavailable
from poolmeter.model.allocation import Allocation, SlicePromise
from poolmeter.model.plain import from_plain
from poolmeter.model.units import parse_percent, parse_size
from poolmeter.places import NodeData, NodeRun, data_folder, run_folder
from poolmeter.tokens import client_token, read_token
from poolmeter.web.trust import SYSTEM, trust_of

_COLUMNS = (
    "node",
    "allocation",
    "device",
    "tenant",
    "project",
    "user",
    "workload",
    "class",
    "environment",
    "pool",
    "mode",
    "state",
    "promise_percent",
    "compute_limit_percent",
    "memory_bytes",
    "soft",
    "weight",
    "enforcement",
    "generation",
    "decision",
    "created",
    "changed",
)


class Enforcer:
    """Run the enforcer of this node: it promises shares of the cards, writes their limits and journals every change.

    It opens no TCP port; poolmeter run and poolmeter allocation talk to its Unix socket.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_run_folder(parser)
        parser.add_argument("--name", metavar="NODE", help="name of this node (node.name of the configuration)")
        parser.add_argument("--simulate", action="store_true", help="the simulated cards of $POOLMETER_SIM_MACHINE")
        parser.add_argument("--collector", metavar="URL", help="where approved decisions come from (enforcer.collector)")
        parser.add_argument(
            "--token-file", metavar="FILE", help="the collector's token (collector.api_token_file, else the file token of the data folder)"
        )
        parser.add_argument(
            "--ca-file", metavar="FILE", help="certificates to trust of a collector that serves TLS (collector.api_ca_file)"
        )
        parser.add_argument(
            "--interval", type=float, metavar="SECONDS", help="time between two looks for decisions (enforcer.decision_interval_s)"
        )
        parser.add_argument("--ready-file", metavar="FILE", help="created once requests are answered")

    def run(self, args: argparse.Namespace) -> int:
        config = load_config(args.config)
        if args.name is not None:
            config = config.model_copy(update={"node": _named(config, args.name)})
        if args.interval is not None:
            if not 0.2 <= args.interval <= 3600:
                raise BadInput(f"--interval is {args.interval:g}, expected 0.2 to 3600 seconds")
            config = config.model_copy(update={"enforcer": config.enforcer.model_copy(update={"decision_interval_s": args.interval})})
        daemon = build(
            config, NodeRun(run_folder(args.run_folder)), NodeData(data_folder(args.data)), args.simulate, args.collector, args.token_file,
            args.ca_file,
        )  # fmt: skip
        asyncio.run(_serve(daemon, None if args.ready_file is None else Path(args.ready_file)))
        return 0


def build(
    config: Config,
    run: NodeRun,
    data: NodeData,
    simulate: bool,
    collector: str | None = None,
    token_file: str | None = None,
    ca_file: str | None = None,
) -> Daemon:
    """A daemon ready to serve: its book is open and its devices have been read. Raises BadInput, DataError or Unavailable."""
    machine = os.environ.get("POOLMETER_SIM_MACHINE")
    if simulate and not machine:
        raise BadInput("POOLMETER_SIM_MACHINE is not set, expected the simulated machine that --simulate is to use")
    named = config.collector.api_token_file if token_file is None else Path(token_file)
    if named is not None:
        read_token(named)  # refused at the start rather than at every look for decisions
    trust = trust_of(config.collector, ca_file)
    if trust != SYSTEM:
        trust.context()

    def token() -> str | None:
        return client_token(named, data.root)

    inventory = NvmlInventory(simulated_environment(Path(machine)) if machine else {})
    inventory.devices()
    settings = config.enforcer
    book = Book(run, Journal(data.journal), inventory, OverCommit(settings.compute_over_commit, settings.memory_over_commit))
    book.open()
    source = collector if collector is not None else settings.collector
    margin = 1 + Decimal(config.recommend.memory_resident_percent) / 100
    poll = DecisionPoll(book, config.node.name, source, settings.decision_interval_s, margin, token, trust=trust) if source else None
    return Daemon(book, config.node.name, machine, poll)


def _named(config: Config, name: str) -> NodeSection:
    try:
        return NodeSection(name=name, pool=config.node.pool)
    except ValueError:
        raise BadInput(f"--name is {name!r:.80}, expected letters, digits, dots, dashes and underscores") from None


async def _serve(daemon: Daemon, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready() -> None:
        if ready_file is not None:
            state = {"pid": os.getpid(), "socket": str(daemon.book.run.socket)}
            report.write_whole(ready_file, (json.dumps(state) + "\n").encode())

    try:
        await daemon.serve(stop, ready)
    finally:
        if not daemon.book.entries():
            namespace.leave_no_preload(daemon.book.run.root)
        daemon.book.close()


class AllocationCreate:
    """Promise a share of one or more cards; it lasts until it is released.

    Programs use it by POOLMETER_ALLOCATION_DIR and the hook; poolmeter run does all of that for one program.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_allocation_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        request = request_of(args, owned=False, uid=caller_uid())
        nodes = choose(known_nodes(args.run_folder, args.data), args.node)

        def create(node: KnownNode, last: bool) -> Allocation:
            return node.client.create(replace(request, record_refusal=last))

        node, allocation = first(nodes, create)
        _write(args, [(_name(node), allocation)], {"folder": str(node.run.allocations / allocation.id)})
        return 0


class AllocationList:
    """List the allocations of the pool's nodes, a line for each device of each (your own, unless you are the operator)."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--node", metavar="N", help="of this node only")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        nodes = choose(known_nodes(args.run_folder, args.data), args.node)
        found: list[tuple[str, Allocation]] = []
        silent: list[Unavailable] = []
        for node in nodes:
            try:
                name = _name(node)
                found += [(name, allocation) for allocation in node.client.list()]
            except Unavailable as error:
                silent.append(error)
        if len(silent) == len(nodes):
            raise silent[0]
        _write(args, found, warnings=[str(error) for error in silent])
        return 0


class AllocationShow:
    """Show one allocation: its limits, and who uses it now."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the allocation")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        node, answer = show(known_nodes(args.run_folder, args.data), check_id(args.id))
        allocation = from_plain(Allocation, answer["allocation"])
        totals = {
            "folder": str(node.run.allocations / allocation.id),
            "processes": len(answer["processes"]),
            "pids": [item["pid"] for item in answer["processes"]],
            "memory_used_bytes": answer["memory_used_bytes"],
            "hook_faults": answer["hook_faults"],
            "owner_pid": allocation.owner_pid,
        }
        warnings = () if answer["meter_trouble"] is None else (str(answer["meter_trouble"]),)
        _write(args, [(_name(node), allocation)], totals, warnings)
        return 0


class AllocationResize:
    """Change the limits of an allocation while its programs run.

    What is not named stays. A memory limit below what is in use denies new memory until use has fallen.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the allocation")
        parser.add_argument("--compute", metavar="PCT", help="device time, promised and enforced")
        parser.add_argument("--memory", metavar="SIZE", help="memory, promised and enforced")
        parser.add_argument("--device", metavar="UUID|INDEX", help="on this device only (on all of its devices)")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        request = ResizeRequest(
            check_id(args.id),
            None if args.compute is None else parse_percent(args.compute, "compute share"),
            None if args.memory is None else parse_size(args.memory, "memory"),
            args.device,
        )
        node, _ = show(known_nodes(args.run_folder, args.data), request.id)
        allocation, warnings = node.client.resize(request)
        _write(args, [(_name(node), allocation)], warnings=warnings)
        return 0


class AllocationSuspend:
    """Give an allocation's device time back for a while: its programs wait at their next launch and get no new memory.

    What they hold of a card's memory stays there, and stays counted, until they free it.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the allocation")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        node, _ = show(known_nodes(args.run_folder, args.data), check_id(args.id))
        allocation, warnings = node.client.suspend(args.id)
        _write(args, [(_name(node), allocation)], warnings=warnings)
        return 0


class AllocationResume:
    """Take a suspended allocation up again, with all that was promised; refused while its cards cannot give that."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the allocation")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        node, _ = show(known_nodes(args.run_folder, args.data), check_id(args.id))
        allocation, warnings = node.client.resume(args.id)
        _write(args, [(_name(node), allocation)], warnings=warnings)
        return 0


class AllocationRelease:
    """End an allocation. Refused while programs use it, unless forced; those then get no new memory."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", metavar="ID", help="the allocation")
        parser.add_argument("--force", action="store_true", help="also while programs use it")
        add_run_folder(parser)

    def run(self, args: argparse.Namespace) -> int:
        node, _ = show(known_nodes(args.run_folder, args.data), check_id(args.id))
        _write(args, [(_name(node), node.client.release(args.id, args.force))])
        return 0


def _name(node: KnownNode) -> str:
    return node.name or str(node.client.ping()["node"])


def _write(
    args: argparse.Namespace,
    found: Iterable[tuple[str, Allocation]],
    totals: Mapping[str, object] | None = None,
    warnings: Iterable[str] = (),
) -> None:
    rows = tuple(_row(name, allocation, item) for name, allocation in found for item in allocation.slices)
    body = report.Report("allocations", _COLUMNS, rows, totals=totals or {}, warnings=tuple(warnings))
    if args.format in ("csv", "parquet", "arrow"):
        for warning in body.warnings:
            sys.stderr.write(f"poolmeter: warning: {warning}\n")
    report.write(body, args.format, args.output)


def _row(node: str, allocation: Allocation, item: SlicePromise) -> dict[str, object]:
    labels = allocation.labels
    return {
        "node": node,
        "allocation": allocation.id,
        "device": item.device_uuid,
        "tenant": labels.tenant,
        "project": labels.project,
        "user": labels.user,
        "workload": labels.workload,
        "class": labels.workload_class,
        "environment": labels.environment,
        "pool": labels.pool,
        "mode": allocation.mode.value,
        "state": allocation.state.value,
        "promise_percent": _percent(item.promise_ppm),
        "compute_limit_percent": None if item.compute_limit_ppm is None else _percent(item.compute_limit_ppm),
        "memory_bytes": item.memory_bytes,
        "soft": item.soft,
        "weight": item.weight,
        "enforcement": allocation.enforcement,
        "generation": allocation.generation,
        "decision": allocation.decision_id,
        "created": _time(allocation.created_us),
        "changed": _time(allocation.changed_us),
    }


def _percent(ppm: int) -> Decimal:
    return Decimal(ppm) / 10_000


def _time(at_us: int) -> str:
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=at_us)
    return moment.isoformat(timespec="microseconds") + "Z"
