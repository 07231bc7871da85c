"""`poolmeter doctor`."""

import argparse
import dataclasses
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolmeter.errors import BadInput, PoolmeterError

if TYPE_CHECKING:
    from poolmeter.config import Config
    from poolmeter.exporter.doctor.finding import Finding, Machine, Subject

_WORDS = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "unknown": "cannot tell"}
_ROLES = {"ok": "32", "warning": "33", "problem": "1;31", "unknown": "36"}


class Doctor:
    """Say what is missing on this node and how to fix it: one sentence a check, and one command that would mend it.

    It changes nothing, runs none of the commands it names, makes no CUDA context, and does not ask cards that nobody holds (asking
    would start them) unless --wake is given. Exit code 0: no problem (there may be warnings), 1: a problem was found.
    """

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--run", metavar="DIR", dest="run_folder", help="run folder ($POOLMETER_RUN, else that of a running pool)")
        parser.add_argument("--exporter", metavar="URL", help="the exporter of this node (a running pool's, else the configured one)")
        parser.add_argument("--collector", metavar="URL", help="the collector (a running pool's, else the configured one)")
        parser.add_argument("--token-file", metavar="FILE", help="bearer token for an exporter that asks for one")
        parser.add_argument(
            "--ca-file",
            metavar="FILE",
            help="certificates to trust of an https exporter, and of an https collector without collector.api_ca_file (the system's)",
        )
        parser.add_argument("--prometheus", metavar="URL", default="http://127.0.0.1:9090", help="a Prometheus (http://127.0.0.1:9090)")
        parser.add_argument("--grafana", metavar="URL", default="http://127.0.0.1:3000", help="a Grafana (http://127.0.0.1:3000)")
        parser.add_argument("--simulate", action="store_true", help="look at the simulated driver ($POOLMETER_SIM_MACHINE)")
        parser.add_argument("--wake", action="store_true", help="ask the cards although nobody holds them")
        parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
        parser.add_argument("--all", action="store_true", help="show what is well, too")
        parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="how long the driver may take (15)")

    def run(self, args: argparse.Namespace) -> int:
        from poolmeter.exporter.doctor.finding import Machine, State

        if not 0.1 <= args.timeout <= 600:
            raise BadInput(f"--timeout is {args.timeout:g}, expected 0.1 to 600 seconds")
        config, faults = configuration_of(args.config)
        found = [*faults, *examine(args, config, Machine())]
        if args.format == "table":
            _print(found, args)
        else:
            from poolmeter.report import Report, write

            rows = tuple(row_of(item) for item in found)
            totals = {state.value: sum(item.state is state for item in found) for state in State}
            write(Report("doctor", ("node", "check", "state", "found", "fix"), rows, totals=totals), args.format, args.output)
        bad = (State.PROBLEM, State.WARNING) if args.strict else (State.PROBLEM,)
        return 1 if any(item.state in bad for item in found) else 0


def configuration_of(option: str | None) -> "tuple[Config, list[Finding]]":
    """The configuration in force; one that cannot be honoured is a finding, and the checks go on with the defaults."""
    from poolmeter.config import Config, config_path, load_config
    from poolmeter.exporter.doctor.finding import ok, problem, unknown

    try:
        config = load_config(option)
    except (PoolmeterError, OSError) as error:
        said = f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        return Config(), [problem("configuration", said, "poolmeter config check")]
    found = [ok("configuration", f"{config_path(option) or 'the defaults'} can be honoured")]
    web = config.exporter.web_config_file
    if web is not None:
        from poolmeter.web.config import speaks_tls

        try:
            found.append(ok("web configuration", f"{web} is {'with' if speaks_tls(web) else 'without'} TLS"))
        except BadInput as error:
            told = unknown if isinstance(error.__context__, OSError) else problem  # it may be the exporter's alone to read
            found.append(told("web configuration", str(error), f"ls -l {shlex.quote(str(web))}"))
    return config, found


def examine(args: argparse.Namespace, config: "Config", machine: "Machine") -> "Iterator[Finding]":
    """Every check, in the order in which things depend on each other. Raises BadInput for flags; nothing else."""
    from poolmeter.exporter.addresses import running_pool
    from poolmeter.exporter.doctor import driver, node, services
    from poolmeter.places import data_folder
    from poolmeter.tokens import read_token
    from poolmeter.web.trust import trust_of

    data = data_folder(args.data)
    pool = running_pool(data)
    subjects = subjects_of(args, config, pool)
    token = read_token(Path(args.token_file)) if args.token_file else None
    yield from node.hook_findings()
    yield from node.machine_findings(machine)
    for subject in subjects:
        found = [*node.run_findings(subject)]
        answered, snapshot = services.exporter_findings(subject, token, args.ca_file)
        wake = args.wake or subject.simulated is not None or driver.held(machine) or bool(snapshot and any(d.up for d in snapshot.devices))
        found = [*driver.findings(subject, machine, driver.ask(subject, wake, args.timeout)), *found, *answered]
        if snapshot is not None:
            known = {item.check for item in found if item.state.value == "problem"}
            found += [item for item in services.snapshot_findings(snapshot) if item.check not in known]
        for item in found:
            yield dataclasses.replace(item, node=subject.name)
    url = args.collector or _text(pool.get("urls"), "collector") or config.enforcer.collector
    trust = trust_of(config.collector, args.ca_file if config.collector.api_ca_file is None else None)
    yield from services.collector_findings(url, config.collector.api_token_file, data, [subject.name for subject in subjects], trust)
    yield from services.neighbour_findings(args.prometheus, args.grafana)


def subjects_of(args: argparse.Namespace, config: "Config", pool: dict[str, Any]) -> "list[Subject]":
    """The nodes to look at: every one of a running pool, else the one this machine is."""
    from poolmeter.exporter.addresses import configured_url
    from poolmeter.exporter.doctor.finding import Subject
    from poolmeter.places import run_folder

    simulated = None
    if args.simulate:
        named = os.environ.get("POOLMETER_SIM_MACHINE")
        if not named:
            raise BadInput("$POOLMETER_SIM_MACHINE is not set, expected the file of a simulated machine for --simulate")
        simulated = _machine(named)
    if args.run_folder is None and not os.environ.get("POOLMETER_RUN") and args.exporter is None and not args.simulate:
        nodes = pool.get("nodes")
        rows = [row for row in nodes if isinstance(row, dict) and isinstance(row.get("run"), str)] if isinstance(nodes, list) else []
        urls = pool.get("urls")
        found = []
        for row in rows:
            name = str(row.get("name"))
            url = _text(urls, f"exporter:{name}") or _text(urls, "exporter")
            if url:
                machine = row.get("simulated_machine")
                found.append(Subject(name, Path(row["run"]), url, _machine(machine) if isinstance(machine, str) else None))
        if found:
            return found
    url = args.exporter or configured_url(config.exporter)
    return [Subject(config.node.name, run_folder(args.run_folder), url, simulated)]


def _machine(file: str) -> dict[str, str]:
    # What Machine.environment() says, without opening the machine: that would be a change of it.
    from poolmeter.errors import Unavailable
    from poolmeter.native import native_path

    try:
        folder = str(native_path("sim/libnvidia-ml.so.1").parent)
    except Unavailable:
        folder = ""
    rest = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": ":".join(part for part in (folder, rest) if part), "POOLMETER_SIM_MACHINE": file}


def _text(table: object, key: str) -> str | None:
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else None


def _print(found: "Sequence[Finding]", args: argparse.Namespace) -> None:
    from poolmeter.report import write_whole

    terminal = sys.stdout.isatty() and not args.output
    body = as_text(found, colour=terminal and not os.environ.get("NO_COLOR"), everything=args.all)
    if args.output and args.output != "-":
        write_whole(Path(args.output), body.encode("utf-8", "replace"))
    else:
        sys.stdout.write(body)


def row_of(item: "Finding") -> dict[str, str | None]:
    """A finding as its row. Half a surrogate pair, which JSON of others can hold, is `?`: it has no bytes."""
    row = {**dataclasses.asdict(item), "state": item.state.value}
    return {key: None if text is None else text.encode(errors="replace").decode() for key, text in row.items()}


def as_text(found: "Sequence[Finding]", colour: bool, everything: bool) -> str:
    """A line or two a finding, then how many there are of each kind."""
    from poolmeter.exporter.top.words import clean

    shown = [item for item in found if everything or item.state.value != "ok"]
    many = len({item.node for item in found if item.node}) > 1
    names = {id(item): f"{item.node}: {item.check}" if many and item.node else item.check for item in shown}
    width = max((len(name) for name in names.values()), default=0)
    out = []
    for item in shown:
        word = _WORDS[item.state.value].ljust(11)
        mark = f"\x1b[{_ROLES[item.state.value]}m{word}\x1b[0m" if colour else word
        out.append(f"{mark}  {clean(names[id(item)]).ljust(width)}  {clean(item.found)}")
        if item.fix and item.state.value != "ok":
            out.append(f"{'':11}  {'':{width}}  fix: {clean(item.fix)}")
    counts = Counter(item.state.value for item in found)
    counted = [
        f"{counts[state]} {word.lower()}{'s' * (state in ('warning', 'problem') and counts[state] > 1)}" for state, word in _WORDS.items()
    ]
    out.append(", ".join(text for text in counted if not text.startswith("0 ")) + ("" if everything else " (--all shows what is ok)"))
    return "\n".join(out) + "\n"
