"""Letting go of the cards, reading the configuration again, and ending: a real daemon over the simulated library."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exporter_fakes import CARD, SECOND, Node
from web_certificates import Authority

from poolmeter.errors import BadInput, Refused, Unavailable
from poolmeter.exporter.control import ControlSocket, ask, parse_request
from poolmeter.exporter.plan import Live, Plan
from poolmeter.places import NodeRun
from poolmeter.simulator.machine import Machine

pytestmark = pytest.mark.timeout(120)


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, AssertionError):
            found = condition()
            if found:
                return found
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


class Daemon:
    """`poolmeter exporter` over a simulated machine."""

    def __init__(self, root: Path, machine: Machine, *options: str, config: str = "") -> None:
        self.run, self.machine, self.config = NodeRun(root / "run"), machine, root / "config.toml"
        self.config.write_text(config)
        ready = root / "ready"
        words = ["exporter", "--name", "n1", "--run", str(self.run.root), "--data", str(root / "data"), "--port", "0", "--simulate"]
        words += ["--ready-file", str(ready), "--config", str(self.config), *options]
        self.log = root / "log"
        with self.log.open("wb") as log:
            environment = {**os.environ, "POOLMETER_SIM_MACHINE": str(machine.file)}
            self.child = subprocess.Popen([sys.executable, "-m", "poolmeter.cli", *words], env=environment, stdout=log, stderr=log)
        until(lambda: ready.exists() or self.child.poll() is not None, "it serves", 60)
        assert self.child.poll() is None, self.log.read_text()
        self.url = json.loads(ready.read_text())["url"]

    def get(self, path: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/readyz")[1])
        return found

    def samplers(self) -> list[int]:
        """Living children that are samplers."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if int(stat[1]) == self.child.pid and stat[0] != "Z":
                    found.append(int(folder.name))
        return found

    def holds(self, pid: int) -> set[str]:
        """Files of the library and the machine that a process has open or mapped."""
        found = {
            line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if len(line.split(maxsplit=5)) > 5
        }
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
        return {name for name in found if "libnvidia-ml" in name or name.startswith("/dev/nvidia") or name == str(self.machine.file)}

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "poolmeter.cli", "exporter", "release", "--run", str(self.run.root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """How long it takes to end, in seconds."""
        began = time.monotonic()
        self.child.send_signal(number)
        self.child.wait(timeout=30)
        return time.monotonic() - began

    def said(self, text: str) -> bool:
        return text in self.log.read_text()


@pytest.fixture
def start(tmp_path: Path, machine: Machine) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []

    def build(*options: str, config: str = "") -> Daemon:
        made.append(Daemon(tmp_path, machine, *options, config=config))
        return made[-1]

    yield build
    for daemon in made:
        if daemon.child.poll() is None:
            daemon.child.kill()
            daemon.child.wait()


def test_release_lets_go_of_the_cards_and_takes_them_back(start: Callable[..., Daemon], machine: Machine) -> None:
    daemon = start()
    until(lambda: daemon.ready()["ok"], "the cards are read")
    (sampler,) = daemon.samplers()
    # Only the child holds what a reset would find in use; the agent never does.
    assert daemon.holds(sampler) and not daemon.holds(daemon.child.pid)
    ended = daemon.verb("--for", "300")
    assert ended.returncode == 0 and "the cards are released until" in ended.stdout, ended.stderr
    assert not daemon.samplers() and not daemon.holds(daemon.child.pid) and not Path(f"/proc/{sampler}").exists()
    found = daemon.ready()
    assert found["released"] and found["failing"] == ["nvml"] and "released" in found["failures"][0]["reason"]
    _, body = daemon.get("/metrics")
    assert b"poolmeter_cards_released 1.0" in body and b"poolmeter_device_power_watts" not in body
    time.sleep(1.5)  # ticks pass, and nobody takes them back
    assert not daemon.samplers()
    ended = daemon.verb("--resume", "--format", "json")
    assert ended.returncode == 0 and json.loads(ended.stdout) == {"schema": "poolmeter.release/1", "released": False}
    until(lambda: daemon.ready()["ok"], "the cards are read again")
    assert len(daemon.samplers()) == 1 and not daemon.ready()["released"]
    assert b"poolmeter_device_power_watts" in daemon.get("/metrics")[1]
    assert oct(daemon.run.exporter_socket.stat().st_mode & 0o777) == "0o600"
    daemon.stop()
    assert not daemon.run.exporter_socket.exists()
    ended = daemon.verb()
    assert ended.returncode == 3 and "no exporter listens" in ended.stderr


def test_a_release_ends_by_itself(start: Callable[..., Daemon]) -> None:
    daemon = start(config="[exporter]\ninterval_ms = 200\n")
    until(lambda: daemon.ready()["ok"], "the cards are read")
    assert daemon.verb("--for", "1").returncode == 0
    until(lambda: daemon.ready()["ok"], "the cards are read again")
    assert len(daemon.samplers()) == 1


def test_it_ends_at_once_in_the_midst_of_a_call_that_hangs(start: Callable[..., Daemon], machine: Machine) -> None:
    daemon = start(config="[exporter]\ninterval_ms = 4000\nsampler_timeout_s = 600\n")
    rule = machine.script("nvmlDeviceGetUtilizationRates", delay_ms=600_000)
    until(lambda: machine.hits(rule), "the call hangs")
    (sampler,) = daemon.samplers()
    took = daemon.stop()
    assert daemon.child.returncode == 0 and took < 2.0, took
    assert not Path(f"/proc/{sampler}").exists()


def test_it_ends_at_once_while_the_first_call_hangs(tmp_path: Path, machine: Machine) -> None:
    """The first look waits seconds for the library; a signal does not."""
    rule = machine.script("nvmlInit*", delay_ms=600_000)
    words = ["exporter", "--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--port", "0", "--simulate"]
    environment = {**os.environ, "POOLMETER_SIM_MACHINE": str(machine.file)}
    child = subprocess.Popen(
        [sys.executable, "-m", "poolmeter.cli", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until(lambda: machine.hits(rule) and (tmp_path / "run" / "exporter.sock").exists(), "the call hangs, and it has begun")
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 0 and time.monotonic() - began < 2.0, said.decode()


def test_reload_takes_what_is_good_and_says_what_is_not(start: Callable[..., Daemon], tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    (tmp_path / "token").write_text("first\n")
    web.write_text("bearer_token_files: [token]\n")
    daemon = start("--web.config.file", str(web), config="[exporter]\ninterval_ms = 60000\n")
    assert daemon.get("/metrics")[0] == 401
    status, body = daemon.get("/metrics", Authorization="Bearer first")
    assert status == 200 and b"poolmeter_config_last_reload_success" not in body
    (tmp_path / "token").write_text("second\n")
    daemon.config.write_text("[exporter]\ninterval_ms = 200\nport = 9\n[node]\npool = 'elsewhere'\n")
    daemon.child.send_signal(signal.SIGHUP)
    until(lambda: daemon.get("/metrics", Authorization="Bearer second")[0] == 200, "the new token is asked for")
    assert daemon.get("/metrics", Authorization="Bearer first")[0] == 401
    # It turns five times a second now, where it did once a minute.
    until(
        lambda: b"poolmeter_config_last_reload_success 1.0" in daemon.get("/metrics", Authorization="Bearer second")[1], "the turns are new"
    )
    assert daemon.said("at the next start only: settings.pool")
    for number, (path, text, said) in enumerate(
        (
            (web, "bearer_token_files: [absent]\n", "absent cannot be read"),
            (web, "nonsense: 1\n", "nonsense is not a known key"),
            (web, "a: !!bool x\n", "a value has another form than its tag says"),
            (web, 'bearer_token_files: ["a\\0b"]\n', "embedded null byte"),
            (daemon.config, '[exporter]\ntoken_file = "a\\u0000b"\n', "embedded null byte"),
            (daemon.config, "[exporter]\ninterval_ms = 1\n", "exporter.interval_ms is 1"),
            (daemon.config, "[exporter", "config.toml"),
        ),
        1,
    ):
        before = path.read_text()
        path.write_text(text)
        daemon.child.send_signal(signal.SIGHUP)
        until(lambda number=number: daemon.log.read_text().count("was not reloaded") == number, f"it says {said}")
        assert daemon.said(said)
        path.write_text(before)
    until(
        lambda: b"poolmeter_config_last_reload_success 0.0" in daemon.get("/metrics", Authorization="Bearer second")[1], "it is on the page"
    )
    assert daemon.said("what was in force stays") and daemon.child.poll() is None
    daemon.child.send_signal(signal.SIGHUP)
    until(
        lambda: b"poolmeter_config_last_reload_success 1.0" in daemon.get("/metrics", Authorization="Bearer second")[1], "all is well again"
    )


def test_what_no_reader_foresaw_is_refused_as_well(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: argparse.Namespace) -> Plan:
        raise KeyError("x")

    monkeypatch.setattr("poolmeter.exporter.plan.plan_of", fails)
    nothing: Any = None
    live = Live(argparse.Namespace(), nothing, node.agent, nothing, nothing, nothing, None, nothing)
    live.reload()
    assert live.ok is False


def test_reload_does_not_turn_tls_on(start: Callable[..., Daemon], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server")
    web = tmp_path / "web.yml"
    web.write_text("")
    daemon = start("--web.config.file", str(web))
    web.write_text(f"tls_server_config: {{cert_file: {certificate}, key_file: {key}}}\n")
    daemon.child.send_signal(signal.SIGHUP)
    until(lambda: daemon.said("turns TLS on or off"), "it says so")
    assert daemon.get("/healthz")[0] == 200


def test_a_daemon_with_tls_and_a_certificate_rotated_under_it(start: Callable[..., Daemon], tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    for source in old.issue("server"):
        shutil.copy(source, tmp_path / source.name)
    web = tmp_path / "web.yml"
    web.write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}\n")
    daemon = start("--web.config.file", str(web))
    assert daemon.url.startswith("https://")
    assert daemon.get("/metrics", ssl.create_default_context(cafile=old.certificate))[0] == 200
    for source in new.issue("server"):
        shutil.copy(source, tmp_path / source.name)
    assert daemon.get("/metrics", ssl.create_default_context(cafile=new.certificate))[0] == 200
    # A configuration that cannot be read any more leaves what is in force: the page stays up.
    (tmp_path / "server.pem").unlink()
    daemon.child.send_signal(signal.SIGHUP)
    until(lambda: daemon.said("server.pem cannot be read"), "it says so")
    assert daemon.get("/metrics", ssl.create_default_context(cafile=new.certificate))[0] == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_server_config: {cert_file: absent.pem, key_file: absent.key}", "absent.pem cannot be read"),
        ("basic_auth_users: {a: secret}", "no bcrypt hash"),
    ],
)
def test_a_start_with_a_bad_web_configuration(tmp_path: Path, text: str, said: str) -> None:
    web = tmp_path / "web.yml"
    web.write_text(text)
    words = ["exporter", "--web.config.file", str(web), "--port", "0", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    ended = subprocess.run([sys.executable, "-m", "poolmeter.cli", *words], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and said in ended.stderr and ended.stderr.count("\n") == 1 and not (tmp_path / "data").exists()


# ---- the parts -----------------------------------------------------------------------------------------------------------------------


def test_an_agent_that_released_its_cards(node: Node) -> None:
    assert node.agent.release(30 * SECOND) is None and node.sampler.closed == 1
    polls = node.sampler.polls
    node.tick(turns=29)
    page = node.agent.page()
    assert page is not None and node.sampler.polls == polls and not page.snapshot.devices[0].up
    (health,) = (source for source in page.snapshot.sources if source.source == "nvml")
    assert not health.ok and "the cards are released, until 2025-" in str(health.reason)
    node.tick(turns=2)
    assert node.sampler.polls > polls and node.agent.released_us() is None
    page = node.agent.page()
    assert page is not None and page.snapshot.devices[0].uuid == CARD and page.snapshot.devices[0].up


def test_a_child_that_cannot_be_killed_is_no_release(node: Node) -> None:
    node.sampler.stuck, node.sampler.trouble = True, "nvidia sampler (pid 7) is stuck in the kernel"
    assert node.agent.release(SECOND) == "nvidia sampler (pid 7) is stuck in the kernel"


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b'{"verb": "stop"}', b'{"verb": "release"}', b'{"verb": "release", "seconds": 0}', b'{"verb": "release", "seconds": true}',
        b'{"verb": "release", "seconds": 86401}', b'{"verb": "release", "seconds": "9"}', b"\xff",
    ],
)  # fmt: skip
def test_requests_that_are_refused(line: bytes) -> None:
    with pytest.raises(BadInput, match=r"expected|no JSON"):
        parse_request(line)


def test_the_control_socket_is_for_root_and_the_exporters_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    control = ControlSocket(tmp_path / "exporter.sock", lambda: rung.append(1))
    with pytest.raises(BadInput, match="seconds"):
        ask(tmp_path / "exporter.sock", {"verb": "release", "seconds": -1})
    monkeypatch.setattr("poolmeter.exporter.control._CREDENTIALS", _Stranger())
    with pytest.raises(Refused, match="user 4242 may not control"):
        ask(tmp_path / "exporter.sock", {"verb": "resume"})
    assert not rung and control.requests.empty()
    control.close()
    with pytest.raises(Unavailable, match="no exporter listens"):
        ask(tmp_path / "exporter.sock", {"verb": "resume"})


class _Stranger:
    """Peer credentials of somebody else."""

    size = 12

    def unpack(self, body: bytes) -> tuple[int, int, int]:
        return 1, 4242, 4242
