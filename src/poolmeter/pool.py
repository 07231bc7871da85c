"""The daemons of a pool as child processes: started in order, watched, restarted when they die, stopped so that nothing is lost.

`poolmeter up` and `poolmeter demo` run the same daemons as real life, through their command lines. On a simulated pool each node
has its own folders and its own simulated machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poolmeter.errors import Unavailable
from poolmeter.report import write_whole
from poolmeter.tokens import make_token

READY_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 1.0
RESTART_MOST_S = 30.0  # between two starts of what keeps dying
# A daemon that has run this long starts with the short pause again.
SETTLED_S = 60.0
# Long enough for a collector that pulls every second to fetch and acknowledge the last records.
LINGER_S = 20.0
# For an exporter that nobody will ask: long enough to close its minute.
UNHEARD_S = 3.0


@dataclass(frozen=True)
class NodePlan:
    """One node of the pool: its folders, and the simulated machine's file if it has one."""

    name: str
    run: Path
    data: Path
    machine: Path | None = None


@dataclass
class Daemon:
    """One child process. `arguments` follow `poolmeter`; `ready` is the file it writes once it serves (None: no such file)."""

    name: str
    arguments: list[str]
    log: Path
    environment: dict[str, str]
    ready: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    url: str | None = None
    stopping: bool = False
    restarts: int = 0
    restart_at: float = 0.0
    started_at: float = 0.0

    def start(self) -> None:
        """Start it in its own process group, its output appended to its log."""
        if self.ready is not None:
            self.ready.unlink(missing_ok=True)
        self.started_at = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "poolmeter.cli", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it serves. Raises Unavailable with its own last words when it ends or takes too long."""
        if self.ready is None:
            return
        process = self._running()
        deadline = time.monotonic() + timeout_s
        while not self.ready.exists():
            if process.poll() is not None:
                raise Unavailable(f"{self.name} ended with status {process.returncode} at its start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name} did not answer within {timeout_s:.0f} s, its log is {self.log}")
            time.sleep(0.02)
        self.url = json.loads(self.ready.read_text()).get("url")

    def last_words(self) -> str:
        """The last line of its log, without the program's name."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("poolmeter: ") if lines else "it said nothing"

    def signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, then end it and all it started by force."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise Unavailable(f"{self.name} was not started")
        return self.process


@dataclass
class Pool:
    """All daemons of one pool under one data folder."""

    data: Path
    nodes: tuple[NodePlan, ...]
    config: str | None = None
    collector_port: int = 0
    dashboard_port: int | None = None
    interval_s: float = 1.0
    restart_pause_s: float = RESTART_PAUSE_S
    restart_most_s: float = RESTART_MOST_S
    daemons: dict[str, Daemon] = field(default_factory=dict)

    def start(self) -> None:
        """Exporters, collector, enforcers, dashboard; returns when all of them serve. On a failure all are stopped again."""
        try:
            self._start()
        except BaseException:
            self.stop(linger=self.daemons.get("collector") is not None and self.daemons["collector"].url is not None)
            raise

    def _start(self) -> None:
        (self.data / "logs").mkdir(parents=True, exist_ok=True)
        exporters = [self._exporter(node) for node in self.nodes]
        for daemon in exporters:
            daemon.start()
        for daemon in exporters:
            daemon.wait_ready()
            # A restarted exporter answers where the collector looks for it.
            port = str(daemon.url).rsplit(":", 1)[1].rstrip("/")
            daemon.arguments[daemon.arguments.index("--port") + 1] = port
        collector = self._collector([str(daemon.url) for daemon in exporters])
        collector.start()
        collector.wait_ready()
        collector.arguments[collector.arguments.index("--port") + 1] = str(collector.url).rsplit(":", 1)[1].rstrip("/")
        later = [self._enforcer(node, str(collector.url)) for node in self.nodes]
        if self.dashboard_port is not None:
            later.append(self._dashboard(self.dashboard_port))
        for daemon in later:
            daemon.start()
        for daemon in later:
            daemon.wait_ready()
        self.write_state()

    def stop(self, linger: bool = True) -> None:
        """Enforcers and dashboard first; then exporters close their minute and wait for the collector; the collector last.

        `linger` false: there is no collector to wait for; what the exporters recorded stays in their spools.
        """
        first = [d for name, d in self.daemons.items() if name.startswith(("enforcer", "dashboard"))]
        exporters = [d for name, d in self.daemons.items() if name.startswith("exporter")]
        for group, timeout_s in (
            (first, 10.0),
            (exporters, LINGER_S + 5 if linger else UNHEARD_S),
            ([d for d in self.daemons.values() if d.name == "collector"], 20.0),
        ):
            for daemon in group:
                daemon.signal(signal.SIGTERM)
            for daemon in group:
                daemon.wait(timeout_s)
        (self.data / "up.json").unlink(missing_ok=True)

    def watch(self) -> None:
        """Restart what has died, with a pause that grows while it keeps dying. Call often."""
        changed = False
        for daemon in self.daemons.values():
            if daemon.process is None or daemon.stopping or daemon.process.poll() is None:
                continue
            now = time.monotonic()
            if daemon.restart_at == 0.0:
                daemon.restarts = 0 if now - daemon.started_at > SETTLED_S else daemon.restarts
                daemon.restart_at = now + min(self.restart_most_s, self.restart_pause_s * 2.0 ** min(daemon.restarts, 10))
                sys.stderr.write(
                    f"poolmeter: {daemon.name} ended with status {daemon.process.returncode} ({daemon.last_words()}); it is started again\n"
                )
            elif now >= daemon.restart_at:
                daemon.restarts += 1
                daemon.restart_at = 0.0
                daemon.start()
                changed = True
        if changed:
            self.write_state()

    def state(self) -> dict[str, object]:
        """What `up` prints and keeps in up.json: URLs, process ids, nodes."""
        running = {name: daemon.process.pid for name, daemon in self.daemons.items() if daemon.process is not None}
        return {
            "schema": "poolmeter.up/1",
            "urls": {name: daemon.url for name, daemon in self.daemons.items() if daemon.url},
            "pids": {"up": os.getpid(), **running},
            "data": str(self.data),
            "nodes": [
                {
                    "name": node.name,
                    "run": str(node.run),
                    "data": str(node.data),
                    **({"simulated_machine": str(node.machine)} if node.machine else {}),
                }
                for node in self.nodes
            ],
        }

    def write_state(self) -> None:
        """Write up.json, by which commands find this pool."""
        write_whole(self.data / "up.json", (json.dumps(self.state()) + "\n").encode())

    def environment(self, node: NodePlan | None) -> dict[str, str]:
        """The environment of a daemon or a command on `node`."""
        environment = dict(os.environ)
        if node is not None:
            environment["POOLMETER_RUN"] = str(node.run)
            if node.machine is not None:
                environment.update(machine_environment(node.machine))
        return environment

    def _add(self, name: str, arguments: Sequence[str], data: Path, environment: Mapping[str, str], serves: bool = True) -> Daemon:
        ready = self.data / "logs" / f"{name.replace(':', '-')}.ready" if serves else None
        words = [*arguments, "--data", str(data)]
        if self.config is not None:
            words += ["--config", self.config]
        if ready is not None:
            words += ["--ready-file", str(ready)]
        daemon = Daemon(name, words, self.data / "logs" / f"{name.replace(':', '-')}.log", dict(environment), ready)
        self.daemons[name] = daemon
        return daemon

    def _exporter(self, node: NodePlan) -> Daemon:
        port = "0" if node.machine is not None else str(self._exporter_port())
        words = ["exporter", "--name", node.name, "--run", str(node.run), "--port", port, "--linger", str(LINGER_S), *self._token()]
        if node.machine is not None:
            words.append("--simulate")
        return self._add(self._named("exporter", node), words, node.data, self.environment(node))

    def _token(self) -> list[str]:
        """The option that names the token of this pool's acknowledgements; none where the configuration names its own.

        Without one, whoever has an account on the machine could acknowledge records that no collector has.
        """
        from poolmeter.config import load_config

        config = load_config(self.config)
        if config.exporter.token_file is not None or config.collector.token_file is not None:
            return []
        return ["--token-file", str(make_token(self.data))]

    def _reader(self) -> list[str]:
        """The option that names the collector's own token: reading asks for one too once somebody has been given a token with a role."""
        from poolmeter.config import load_config

        return [] if load_config(self.config).collector.api_token_file is not None else ["--token-file", str(make_token(self.data))]

    def _exporter_port(self) -> int:
        from poolmeter.config import load_config

        return load_config(self.config).exporter.port

    def _collector(self, urls: list[str]) -> Daemon:
        words = ["collector", "--port", str(self.collector_port), "--nodes", ",".join(urls), "--interval", str(self.interval_s)]
        words += self._token()
        if any(node.machine is not None for node in self.nodes):
            words.append("--local-books")  # what is simulated does not belong into the books of a real pool
        return self._add("collector", words, self.data, self.environment(None))

    def _enforcer(self, node: NodePlan, collector_url: str) -> Daemon:
        words = ["enforcer", "--name", node.name, "--run", str(node.run), "--collector", collector_url]
        if node.machine is not None:
            words += ["--simulate", "--interval", str(self.interval_s)]
        words += self._reader()
        return self._add(self._named("enforcer", node), words, node.data, self.environment(node))

    def _dashboard(self, port: int) -> Daemon:
        return self._add("dashboard", ["dashboard", "--port", str(port)], self.data, self.environment(None))

    def _named(self, kind: str, node: NodePlan) -> str:
        return f"{kind}:{node.name}" if len(self.nodes) > 1 else kind


def machine_environment(machine: Path) -> dict[str, str]:
    """The variables by which a program on a simulated node finds the simulated driver and its machine."""
    from poolmeter.simulator.machine import Machine

    with contextlib.closing(Machine.open(machine)) as opened:
        return dict(opened.environment())


def simulated_nodes(data: Path, names: Sequence[str] = ("node-a", "node-b"), machine: str = "h200x4") -> tuple[NodePlan, ...]:
    """Nodes with a fresh simulated machine each, under the data folder."""
    from poolmeter.simulator.configuration import load_machine, rename_machine
    from poolmeter.simulator.machine import Machine

    nodes = []
    for name in names:
        node = NodePlan(name, data / "run" / name, data / "nodes" / name, data / "nodes" / name / "machine.sim")
        node.run.mkdir(parents=True, exist_ok=True)
        node.data.mkdir(parents=True, exist_ok=True)
        assert node.machine is not None
        node.machine.unlink(missing_ok=True)
        # Cards are named after their machine: each node has its own.
        Machine.create(rename_machine(load_machine(machine), name), node.machine).close()
        nodes.append(node)
    return tuple(nodes)
