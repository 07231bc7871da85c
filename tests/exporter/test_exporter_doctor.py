"""`poolmeter doctor`: each check on a machine where it is well, and on one where it is not; that it changes nothing."""

import ctypes
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest
from exporter_fakes import CARD, Meter, Node
from exporter_top_fakes import device, part, process, snapshot
from hypothesis import given
from hypothesis import strategies as st
from web_certificates import Authority

from poolmeter import cli
from poolmeter.exporter.doctor import driver, node, services
from poolmeter.exporter.doctor.commands import as_text, configuration_of, row_of
from poolmeter.exporter.doctor.finding import Finding, Machine, State, Subject, problem
from poolmeter.exporter.server import Face, Server, listen
from poolmeter.model.plain import to_plain
from poolmeter.model.snapshot import Snapshot, SourceHealth
from poolmeter.pages import layout
from poolmeter.simulator.machine import Machine as Simulated
from poolmeter.web.config import load_web_config
from poolmeter.web.guard import Guard
from poolmeter.web.tls import RotatingContext

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "doctor.schema.json"
NOWHERE = "http://127.0.0.1:1"


def state_of(found: list[Finding] | Iterator[Finding], check: str) -> tuple[State, str, str | None]:
    """How one check came out; it must be there once."""
    (item,) = [item for item in found if item.check == check]
    return item.state, item.found, item.fix


def subject_of(machine: Simulated | None, run: Path = Path("/nonexistent")) -> Subject:
    return Subject("node-a", run, NOWHERE, machine.environment() if machine else None)


def looked_at(machine: Simulated, timeout_s: float = 30.0) -> list[Finding]:
    """What the doctor finds on a simulated machine."""
    subject = subject_of(machine)
    return list(driver.findings(subject, Machine(), driver.ask(subject, True, timeout_s)))


def test_a_healthy_machine_is_only_asked(machine: Simulated) -> None:
    found = looked_at(machine)
    assert {item.check for item in found} == {
        "driver library", "cuda library", *(f"card {i}{what}" for i in (0, 1) for what in ("", " persistence", " accounting")),
    }  # fmt: skip
    assert all(item.state is State.OK for item in found), found
    calls = machine.calls()
    assert calls and not any(name.startswith("cu") for name in calls), "no CUDA driver call, so no context"
    assert not any("Set" in name or "Clear" in name or "Reset" in name for name in calls)


def test_without_waking_no_card_is_asked(machine: Simulated) -> None:
    subject = subject_of(machine)
    found = list(driver.findings(subject, Machine(), driver.ask(subject, False, 30.0)))
    state, text, fix = state_of(found, "cards")
    assert state is State.UNKNOWN and "2 cards" in text and fix == "poolmeter doctor --wake"
    assert not any(name.startswith("nvmlDeviceGet") and name != "nvmlDeviceGetCount_v2" for name in machine.calls())


@pytest.mark.parametrize("wake", [False, True])
def test_how_many_cards_there_are(machine: Simulated, tmp_path: Path, wake: bool) -> None:
    answer = {key: value for key, value in ANSWER.items() if key not in ("count", "cards")}
    found = driver.findings(subject_of(machine), Machine(), {**answer, "count": 0, **({"cards": []} if wake else {})})
    state, text, _ = state_of(list(found), "cards")
    assert state is State.PROBLEM and "no card" in text
    machine.script("nvmlDeviceGetCount*", code=999)
    state, text, _ = state_of(list(driver.findings(subject_of(machine), Machine(), driver.ask(subject_of(machine), wake, 30.0))), "cards")
    assert state is State.UNKNOWN and "how many" in text


def test_no_library(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has the library")
    except OSError:
        pass
    subject = Subject("n", tmp_path, NOWHERE)
    found = list(driver.findings(subject, Machine(tmp_path, tmp_path, tmp_path), driver.ask(subject, True, 30.0)))
    state, text, fix = state_of(found, "driver library")
    assert state is State.PROBLEM and "libnvidia-ml.so.1 is not found" in text and fix
    assert state_of(found, "cuda library")[0] is State.PROBLEM and state_of(found, "kernel module")[2] == "sudo modprobe nvidia"
    assert state_of(found, "device files")[0] is State.PROBLEM


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [(18, "expected the same", "sudo reboot"), (9, "no driver is loaded", "sudo modprobe nvidia"), (4, "may not use", "ls -l /dev/nvidia*"),
     (999, "does not start", "nvidia-smi")],
)  # fmt: skip
def test_a_driver_that_does_not_start(machine: Simulated, code: int, words: str, fix: str) -> None:
    machine.script("nvmlInit*", code=code)
    state, text, mend = state_of(looked_at(machine), "driver library")
    assert state is State.PROBLEM and words in text and mend == fix


def test_a_lost_card_hides_no_other(machine: Simulated) -> None:
    machine.lose(0)
    found = looked_at(machine)
    assert state_of(found, "card 0")[0] is State.PROBLEM and state_of(found, "card 1")[0] is State.OK


def test_a_call_that_fails_is_not_known(machine: Simulated) -> None:
    machine.script("nvmlDeviceGetPersistenceMode", device=1, code=3)
    machine.script("nvmlDeviceGetAccountingMode", device=1, code=999)
    found = looked_at(machine)
    assert state_of(found, "card 1 persistence")[0] is State.UNKNOWN and state_of(found, "card 1 accounting")[0] is State.UNKNOWN
    assert state_of(found, "card 0 persistence")[0] is State.OK


def test_a_call_that_hangs_ends_in_time(machine: Simulated) -> None:
    machine.script("nvmlSystemGetDriverVersion", delay_ms=600_000)
    began = time.monotonic()
    state, text, _ = state_of(looked_at(machine, 3.0), "driver library")
    assert state is State.PROBLEM and "no answer within 3 s" in text and time.monotonic() - began < 60


def test_a_child_that_cannot_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = Subject("n", tmp_path, NOWHERE, {})
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert state_of(list(driver.findings(subject, Machine(), driver.ask(subject, True, 5.0))), "driver library")[0] is State.UNKNOWN
    monkeypatch.setattr("sys.executable", "/bin/false")
    state, text, _ = state_of(list(driver.findings(subject, Machine(), driver.ask(subject, True, 5.0))), "driver library")
    assert state is State.PROBLEM and "status 1" in text


def card(**values: object) -> list[Finding]:
    """A card in good health but for `values`."""
    base: dict[str, object] = {"index": 3, "uuid": "GPU-3", "model": "H200", "persistence": 1, "accounting": 0, "compute_mode": 0,
                               "mig": [0, 0], "mps_clients": 0}  # fmt: skip
    return list(driver.card_findings({**base, **values}))


def test_modes_of_a_card() -> None:
    assert [item.state for item in card()] == [State.OK] * 3 and "time slicing" in card()[0].found
    assert card(compute_mode=2)[0].state is State.PROBLEM and card(compute_mode=3)[0].state is State.WARNING
    assert card(compute_mode=3, mps_clients=2)[0].state is State.OK and "MPS (2 clients)" in card(mps_clients=2)[0].found
    assert "becomes on" in card(mig=[0, 1])[0].found and card(mig=[1, 1])[0].state is State.WARNING and card(mig=None)[0].state is State.OK
    for untold in ("compute_mode", "mps_clients"):
        state, text, _ = state_of(card(**{untold: None}), "card 3")
        assert state is State.UNKNOWN and "default" not in text and "time slicing" not in text
        assert ("compute mode" in text) == (untold == "compute_mode") and ("MPS clients" in text) == (untold == "mps_clients")
        assert card(**{untold: None}, mig=[1, 1])[0].state is State.WARNING
    assert (
        card(compute_mode=3, mps_clients=None)[0].state is State.UNKNOWN
        and card(compute_mode=2, mps_clients=None)[0].state is State.PROBLEM
    )
    state, text, fix = state_of(card(persistence=0), "card 3 persistence")
    assert state is State.WARNING and "off" in text and fix == "sudo nvidia-smi -i 3 -pm 1"
    on = state_of(card(accounting=1), "card 3 accounting")
    assert on[0] is State.OK and on[2] is None and state_of(card(accounting=None), "card 3 accounting")[0] is State.UNKNOWN


def machine_at(root: Path) -> Machine:
    """A machine of files, on which an NVIDIA driver 580.95.05 runs with one card."""
    for folder in ("proc/driver/nvidia", "proc/self/ns", "dev", "sys/module/nvidia", "sys/fs/cgroup"):
        (root / folder).mkdir(parents=True)
    words = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"
    (root / "proc/driver/nvidia/version").write_text(words)
    (root / "proc/self/ns/pid").write_text("")
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (root / "dev" / name).write_text("")
    return Machine(root / "proc", root / "dev", root / "sys")


ANSWER = {"nvml": {"file": "/usr/lib/libnvidia-ml.so.580.95.05"}, "cuda": {"file": "/usr/lib/libcuda.so.580.95.05"}, "driver": "580.95.05",
          "library": "13.580.95.05", "count": 1, "cards": []}  # fmt: skip


def test_library_and_kernel_module_must_be_of_one_version(tmp_path: Path) -> None:
    machine, subject = machine_at(tmp_path), Subject("n", tmp_path, NOWHERE)
    found = list(driver.findings(subject, machine, ANSWER))
    assert all(state_of(found, check)[0] is State.OK for check in ("driver library", "cuda library", "kernel module", "device files"))
    newer = {**ANSWER, "nvml": {"file": "/usr/lib/libnvidia-ml.so.590.1"}, "init": {"code": 18, "error": "Driver/library version mismatch"}}
    state, text, fix = state_of(list(driver.findings(subject, machine, newer)), "driver library")
    assert state is State.PROBLEM and "590.1" in text and "580.95.05" in text and fix == "sudo reboot"
    assert (
        state_of(list(driver.findings(subject, machine, {**ANSWER, "nvml": {}, "library": "13.590.1"})), "driver library")[0]
        is State.WARNING
    )


def test_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, subject = machine_at(tmp_path), Subject("n", tmp_path, NOWHERE)

    def files(answer: dict[str, object] = ANSWER) -> tuple[State, str, str | None]:
        return state_of(list(driver.findings(subject, machine, answer)), "device files")

    assert files({**ANSWER, "count": 2})[0] is State.WARNING
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _: not str(path).endswith("nvidia0"))
        state, text, _ = files()
        assert state is State.PROBLEM and "/dev/nvidia0 cannot be read and written" in text
    (machine.dev / "nvidia0").unlink()
    assert files()[0] is State.PROBLEM
    (machine.dev / "nvidia-uvm").unlink()
    assert "/dev/nvidia-uvm is absent" in files()[1]


def test_whether_somebody_holds_the_cards(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    assert not driver.held(machine)
    (machine.proc / "77" / "fd").mkdir(parents=True)
    (machine.proc / "77" / "comm").write_text("python\n")
    (machine.proc / "77" / "fd" / "3").symlink_to("/dev/nvidiactl")
    assert not driver.held(machine)
    (machine.proc / "77" / "fd" / "4").symlink_to("/dev/nvidia0")
    assert driver.held(machine)
    (machine.proc / "77" / "fd" / "4").unlink()
    (machine.proc / "77" / "comm").write_text("nvidia-persiste\n")
    assert driver.held(machine)


def test_control_groups_and_namespaces(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    found = list(node.machine_findings(machine))
    assert "version 2" in state_of(found, "cgroup")[1] and state_of(found, "pid namespace")[0] is State.WARNING
    (machine.sys / "fs/cgroup/cgroup.controllers").unlink()
    assert state_of(node.machine_findings(machine), "cgroup")[0] is State.UNKNOWN
    (machine.sys / "fs/cgroup/memory").mkdir()
    assert "version 1" in state_of(node.machine_findings(machine), "cgroup")[1]
    (machine.proc / "mounts").write_text("proc /proc proc rw,nosuid,hidepid=invisible 0 0\n")
    hidden = [item for item in node.machine_findings(machine) if item.check == "proc"]
    assert len(hidden) == (os.geteuid() != 0)


def test_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(node.hook_findings(), "hook")[0] is State.OK
    monkeypatch.setenv("POOLMETER_NATIVE", str(tmp_path))
    assert "is in none of" in state_of(node.hook_findings(), "hook")[1]
    for name in ("libpoolmeter_hook.so", "libpoolmeter_pages.so"):
        (tmp_path / name).write_bytes(b"no library")
    state, text, fix = state_of(node.hook_findings(), "hook")
    assert state is State.PROBLEM and "cannot be loaded" in text and fix == "make install"


@contextmanager
def enforcer_at(path: Path) -> Iterator[None]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as bound:
        bound.bind(str(path))
        bound.listen()
        yield


def run_of(made: Node) -> list[Finding]:
    return list(node.run_findings(Subject("node-a", made.run.root, NOWHERE)))


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    return {str(path): ((info := path.lstat()).st_mode, info.st_mtime_ns, info.st_size) for path in sorted(root.rglob("*"))}


def test_pages_that_are_sound(node: Node) -> None:
    node.create("a")
    before = tree(node.run.root)
    with enforcer_at(node.run.socket):
        found = run_of(node)
        node.run.socket.unlink()
    assert {item.check: item.state for item in found} == dict.fromkeys(("permissions", "enforcer", "pages"), State.OK)
    version = f"2 of ABI {layout.ABI_MAJOR}.{layout.ABI_MINOR}"
    assert version in state_of(found, "pages")[1]
    after = tree(node.run.root)
    assert after == before, "it only looks"


def test_pages_that_are_not(node: Node) -> None:
    for name in ("torn", "foreign", "faulty", "gone"):
        node.create(name)
    folder = node.run.allocations
    os.truncate(folder / "torn" / "meter", 100)
    with open(folder / "foreign" / "meter", "r+b") as file:
        file.seek(layout.Meter.abi_major.offset)
        file.write((7).to_bytes(4, "little"))
    meter: Meter = node.meters["faulty"]
    meter.attach()
    meter.count(CARD, internal_faults=3)
    (folder / "gone" / "allocation.json").unlink()
    (folder / "faulty" / "grant").chmod(0o666)
    found = run_of(node)
    state, text, fix = state_of(found, "pages of torn")
    assert state is State.PROBLEM and "torn or foreign" in text and fix == "poolmeter allocation release torn"
    state, text, _ = state_of(found, "pages of foreign")
    assert state is State.PROBLEM and "ABI version 7." in text and f"expected {layout.ABI_MAJOR}.x" in text
    assert state_of(found, "pages of gone")[0] is State.WARNING
    state, text, _ = state_of(found, "hook faults")
    assert state is State.WARNING and "3 faults" in text and "tenant-faulty" in text
    assert "1 of ABI 7." in state_of(found, "pages")[1] and "1 of 4 allocations are sound" in state_of(found, "pages")[1]
    state, text, fix = state_of(found, "permissions")
    assert state is State.PROBLEM and fix == f"sudo chmod go-w {folder}/faulty/grant"
    assert state_of(found, "enforcer")[0] is State.WARNING


def test_no_run_folder_and_one_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(node.run_findings(Subject("n", tmp_path / "none", NOWHERE)), "run folder")[0] is State.WARNING
    (tmp_path / "allocations").mkdir()
    real = os.scandir

    def closed(path: object = ".") -> object:
        if str(path) == str(tmp_path / "allocations"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", closed)
    state, text, fix = state_of(node.run_findings(Subject("n", tmp_path, NOWHERE)), "run folder")
    assert state is State.UNKNOWN and "Permission denied" in text and fix


Routes = dict[str, Callable[[], tuple[int, object]]]


@contextmanager
def serving(routes: Routes, date: str | None = None, token: str | None = None) -> Iterator[str]:
    """A server of these JSON bodies; with `token` it asks for it, with `date` it says that it is then."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = 404, {}
            if token is not None and self.headers["Authorization"] != f"Bearer {token}":
                status = 401
            elif self.path.split("?")[0] in routes:
                status, body = routes[self.path.split("?")[0]]()  # type: ignore[assignment]
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date if date is not None else super().date_time_string(timestamp)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def exporter(snapped: Snapshot, *sources: dict[str, object]) -> Routes:
    ready = {"schema": "poolmeter.ready/1", "ok": all(source["ok"] for source in sources), "sources": list(sources)}
    return {"/readyz": lambda: (200 if ready["ok"] else 503, ready), "/v1/snapshot": lambda: (200, to_plain(snapped))}


def now_us() -> int:
    return time.time_ns() // 1000


def test_the_exporter() -> None:
    def at(url: str) -> list[Finding]:
        return services.exporter_findings(Subject("n", Path("/x"), url))[0]

    state, text, fix = state_of(at(NOWHERE), "exporter")
    assert state is State.PROBLEM and "nobody answers" in text and fix == "sudo systemctl restart poolmeter-exporter"
    well = {"source": "nvml", "ok": True}
    with serving(exporter(snapshot(at_us=now_us()), well)) as url:
        assert [item.state for item in at(url)] == [State.OK]
    with serving(exporter(snapshot(at_us=now_us()), well, {"source": "hook", "ok": False, "reason": "folder x cannot be listed"})) as url:
        assert state_of(at(url), "exporter source hook")[:2] == (State.PROBLEM, "folder x cannot be listed")
    with serving(exporter(snapshot(at_us=now_us() - 60_000_000), well)) as url:
        assert "60 s old" in state_of(at(url), "exporter snapshot")[1]
    with serving(exporter(snapshot(at_us=now_us()), well), token="secret") as url:
        assert state_of(at(url), "exporter")[0] is State.UNKNOWN
        assert services.exporter_findings(Subject("n", Path("/x"), url), "secret")[0][0].state is State.OK
    with serving({"/readyz": lambda: (200, ["something else"])}) as url:
        assert "is no exporter" in state_of(at(url), "exporter")[1]
    with serving({**exporter(snapshot(), well), "/v1/snapshot": lambda: (503, {})}) as url:
        assert state_of(at(url), "exporter snapshot")[0] is State.UNKNOWN


def test_an_exporter_over_tls_is_well_or_cannot_be_told(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("server")
    web = tmp_path / "web.yml"
    plain = f"tls_server_config: {{cert_file: {certificate}, key_file: {key}"
    strict = f"{plain}, client_ca_file: {authority.certificate}, client_auth_type: RequireAndVerifyClientCert}}\n"
    node.tick()

    def at(text: str, *words: str, config: str | None = None, readable: bool = True) -> dict[str, tuple[str, str, str]]:
        """What is found, of an exporter that was started with `text`, where the configuration names a file with `config`."""
        web.write_text(text)
        loaded = load_web_config(web)
        assert loaded.tls_server_config is not None
        server = Server(
            Guard(Face(node.agent, None).application(), loaded), listen("127.0.0.1", 0), RotatingContext(loaded.tls_server_config)
        )
        server.start()
        try:
            port = server.url.rpartition(":")[2]
            web.write_text(text if config is None else config)
            named = f'web_config_file = "{web}"\n' if readable else ""
            (tmp_path / "config.toml").write_text(f"[exporter]\nport = {port}\n{named}")
            command = ["doctor", "--run", str(node.run.root), "--data", str(tmp_path), "--config", str(tmp_path / "config.toml"),
                       "--prometheus", NOWHERE, "--grafana", NOWHERE, "--format", "json"]  # fmt: skip
            cli.dispatch([*command, *(word.replace("PORT", port) for word in words)])
        finally:
            server.stop()
        rows = json.loads(capsys.readouterr().out)["rows"]
        return {row["check"]: (row["state"], row["found"], (row.get("fix") or "").replace(port, "PORT")) for row in rows}

    fix = "poolmeter doctor --exporter https://NAME:PORT --ca-file FILE"
    state, said, _ = at(plain + "}\n", "--ca-file", str(authority.certificate))["exporter"]
    assert state == "ok" and "it answers at https://127.0.0.1:" in said
    state, said, mend = at(plain + "}\n")["exporter"]
    assert state == "unknown" and "certificate" in said and mend == fix
    state, said, mend = at(strict, "--ca-file", str(authority.certificate))["exporter"]
    assert state == "unknown" and "may want a client's certificate" in said, said
    assert mend.startswith("curl --cert FILE --key FILE")
    for words in ((), ("--exporter", "http://127.0.0.1:PORT")):
        state, said, mend = at(plain + "}\n", *words, readable=False)["exporter"]  # TLS by a flag that the doctor does not know of
        assert state == "unknown" and "does not speak plain HTTP" in said and mend == fix, said
    found = at(plain + "}\n", config="nonsense: 1\n")
    assert found["web configuration"][0] == "problem" and "nonsense is not a known key" in found["web configuration"][1]
    assert found["exporter"][0] == "unknown" and found["exporter"][2] == fix


def test_a_web_configuration_that_cannot_be_honoured_or_read(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    for name, text, state in (
        ("a", "{}", State.OK),
        ("b", "nonsense: 1", State.PROBLEM),
        ("c", None, State.UNKNOWN),
        ("d\\u0000", None, State.PROBLEM),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        config.write_text(f'[exporter]\nweb_config_file = "{tmp_path}/{name}"\n')
        assert state_of(configuration_of(str(config))[1], "web configuration")[0] is state


def test_what_the_exporter_sees() -> None:
    found = list(services.snapshot_findings(snapshot(devices=(device(0, up=False),), slices=(part("a", "t", state="unknown"),))))
    state, text, _ = state_of(found, "programs without hook")
    assert state is State.WARNING and "prog200 (200)" in text
    unmetered = part("a", "t", used_basis="sampled")
    stranger = process(1, "t", hooked=False, allocation_id="a")
    bare = process(2, "t", hooked=False, allocation_id=None)
    whole = part("a", "t", used_basis="sampled", mode="whole")
    for slices, processes, nobody in (
        ((unmetered,), (stranger,), ()),
        ((unmetered,), (stranger, bare), ("prog2 (2)",)),  # somebody's, as is known, and of no allocation
        ((part("a", "t"),), (stranger,), ("prog1 (1)",)),  # the meter is what is billed
        ((part("a", "t", card=1, used_basis="sampled"),), (stranger,), ("prog1 (1)",)),
        ((part("a", "t", used_basis="sampled", state="suspended"),), (stranger,), ("prog1 (1)",)),
        ((whole,), (stranger, bare), ()),
        ((whole, part("b", "u", used_basis="sampled")), (stranger, bare), ("prog2 (2)",)),
        ((part("a", "t", mode="whole"),), (bare,), ("prog2 (2)",)),
    ):
        state, text, _ = state_of(services.snapshot_findings(snapshot(slices=slices, processes=processes)), "programs without hook")
        assert (state is State.WARNING) == bool(nobody) and all(name in text for name in nobody), (slices, processes, text)
        assert ("prog1 (1)" in text) == ("prog1 (1)" in nobody)
        assert state is State.WARNING or "billed" in text
    assert state_of(found, "card 0")[0] is State.PROBLEM and state_of(found, "slices")[0] is State.WARNING
    found = list(services.snapshot_findings(snapshot(processes=(process(1, "vision"),))))
    assert [item.state for item in found] == [State.OK]
    dark = SourceHealth(source="nvml", ok=False, at_us=None, duration_us=None, reason="hung")
    (item,) = services.snapshot_findings(snapshot(processes=(), sources=(dark,), devices=(device(0, up=False),)))
    assert item.state is State.UNKNOWN


def test_the_collector(tmp_path: Path) -> None:
    def at(url: str | None, *nodes: str, file: Path | None = None) -> list[Finding]:
        return list(services.collector_findings(url, file, tmp_path, nodes))

    assert [item.state for item in at(None)] == [State.OK] and state_of(at(NOWHERE), "collector")[0] is State.PROBLEM
    rows = [{"node": "node-a", "state": "up"}, {"node": "node-b", "state": "down", "reason": "it is off"}]
    routes: Routes = {"/v1/nodes": lambda: (200, {"rows": rows})}
    (tmp_path / "token").write_text("secret\n")
    with serving(routes, token="secret") as url:
        found = at(url, "node-a", "node-b", "node-c")
        assert all(state_of(found, check)[0] is State.OK for check in ("collector", "collector token", "clock"))
        assert "it is off" in state_of(found, "node node-b")[1] and "does not pull it" in state_of(found, "node node-c")[1]
        (tmp_path / "token").write_text("wrong\n")
        state, text, _ = state_of(at(url), "collector token")
        assert state is State.PROBLEM and "secret" not in text and "wrong" not in text
        (tmp_path / "token").unlink()
        assert "refuses to answer without one" in state_of(at(url), "collector token")[1]
    with serving(routes) as url:
        assert state_of(at(url), "collector token")[0] is State.WARNING
        assert "cannot be read" in state_of(at(url, file=tmp_path / "none"), "collector token")[1]
    with serving(routes, date="Thu, 01 Jan 2026 00:00:00 GMT") as url:
        state, text, fix = state_of(at(url), "clock")
        assert state is State.PROBLEM and "ahead of" in text and fix == "sudo timedatectl set-ntp true"
    with serving(routes, date="yesterday") as url:
        assert state_of(at(url), "clock")[0] is State.UNKNOWN


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([0, 10**400, float("inf"), float("nan"), "", "nvml", "node-a", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["schema", "ok", "sources", "source", "reason", "rows", "node", "data", "result"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def plainly(value: object) -> object:
    """A strategy of the value, with any JSON in place of any part of it."""
    if isinstance(value, dict):
        return JSON | st.fixed_dictionaries({key: plainly(part) for key, part in value.items()})  # type: ignore[operator, misc]
    if isinstance(value, list):
        return JSON | st.tuples(*[plainly(part) for part in value]).map(list)  # type: ignore[operator, arg-type]
    return st.just(value) | st.just(value) | JSON


READY = {
    "schema": "poolmeter.ready/1",
    "ok": True,
    "sources": [{"source": "nvml", "ok": True}, {"source": "hook", "ok": False, "reason": "x"}],
}
SNAPSHOT = {
    **to_plain(snapshot(processes=(), slices=(), devices=())),
    "processes": [to_plain(process(200, None))],
    "slices": [to_plain(part("a", "t", state="unknown"))],
    "devices": [to_plain(device(0, up=False))],
}


@given(
    plainly(READY), plainly(SNAPSHOT), plainly({"rows": [{"node": "node-a", "state": "up", "reason": None}]}), plainly({"data": {"result": [1]}}),
    st.sampled_from([200, 401, 500]), st.sampled_from([None, "", "Thu, 01 Jan 0001 00:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 -2359"]),
)  # fmt: skip
def test_whatever_they_answer_is_a_finding(
    tmp_path_factory: pytest.TempPathFactory, ready: object, snapped: object, nodes: object, query: object, status: int, date: str | None
) -> None:
    answers = {"/readyz": ready, "/v1/snapshot": snapped, "/v1/nodes": nodes, "/api/v1/query": query, "/api/health": ready}
    _answered(tmp_path_factory, {path: json.dumps(value).encode() for path, value in answers.items()}, status, date)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000])
def test_what_is_no_json_is_a_finding(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    for ready in (body, json.dumps(READY).encode()):
        _answered(
            tmp_path_factory,
            {"/readyz": ready, "/v1/snapshot": body, "/v1/nodes": body, "/api/v1/query": body, "/api/health": body},
            200,
            None,
        )


def _answered(factory: pytest.TempPathFactory, bodies: dict[str, bytes], status: int, date: str | None) -> None:
    def get(url: str, path: str, *_: object, **__: object) -> tuple[int, bytes, str | None]:
        return status, bodies[path.split("?")[0]], date

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "_get", get)
        found, snapped = services.exporter_findings(Subject("node-a", Path("/x"), NOWHERE))
        assert found
        found += services.snapshot_findings(snapped) if snapped is not None else ()
        several = list(services.collector_findings(NOWHERE, None, factory.mktemp("data"), ["node-a"]))
        assert {item.check for item in several} >= {"collector token", "clock"}
        neighbours = list(services.neighbour_findings(NOWHERE, NOWHERE))
        assert [item.check for item in neighbours] == ["prometheus", "grafana"]
    shown = [*found, *several, *neighbours]
    as_text(shown, colour=False, everything=True).encode()
    json.dumps([row_of(item) for item in shown], ensure_ascii=False).encode()


def test_an_address_that_is_none_is_a_finding(tmp_path: Path) -> None:
    for url in ("http://" + "a" * 64 + ".example", "http://a..example", "http://\u00e4" + "b" * 70, "http://a/\u00e4", "nonsense"):
        assert state_of(services.exporter_findings(Subject("n", Path("/x"), url))[0], "exporter")[0] is State.PROBLEM
        assert state_of(services.collector_findings(url, None, tmp_path, []), "collector")[0] is State.PROBLEM


def test_neighbours_are_optional() -> None:
    assert [item.state for item in services.neighbour_findings(NOWHERE, NOWHERE)] == [State.OK, State.OK]
    answer: dict[str, object] = {"data": {"result": []}}
    with serving({"/api/v1/query": lambda: (200, answer), "/api/health": lambda: (200, {})}) as url:
        assert [item.state for item in services.neighbour_findings(url, url)] == [State.WARNING, State.OK]
        answer["data"] = {"result": [1]}
        assert [item.state for item in services.neighbour_findings(url, url)] == [State.OK, State.OK]


def test_the_command(
    node: Node, machine: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.create("a")
    monkeypatch.setenv("POOLMETER_SIM_MACHINE", str(machine.file))
    routes = exporter(snapshot(at_us=now_us(), processes=()), {"source": "nvml", "ok": True})
    nodes: Routes = {"/v1/nodes": lambda: (200, {"rows": [{"node": "node-a", "state": "up"}]})}
    (tmp_path / "token").write_text("t\n")
    config = tmp_path / "config.toml"
    config.write_text('[node]\nname = "node-a"\n')
    with serving(routes) as exporter_url, serving(nodes) as collector_url, enforcer_at(node.run.socket):
        words = ["doctor", "--simulate", "--run", str(node.run.root), "--data", str(tmp_path), "--config", str(config), "--exporter", exporter_url,
                 "--collector", collector_url, "--prometheus", NOWHERE, "--grafana", NOWHERE]  # fmt: skip
        assert cli.dispatch([*words, "--format", "json"]) == 0
        body = json.loads(capsys.readouterr().out)
        jsonschema.validate(body, json.loads(SCHEMA.read_text()))
        assert body["totals"]["problem"] == 0 and body["totals"]["ok"] >= 15
        machine.script("nvmlDeviceGetComputeMode", device=0, code=3)
        (node.run.allocations / "a" / "grant").chmod(0o666)
        assert cli.dispatch(words) == 1
        text = capsys.readouterr().out
        assert "PROBLEM" in text and "fix: sudo chmod go-w" in text and "1 problem" in text and "\x1b" not in text
        (node.run.allocations / "a" / "grant").chmod(0o644)
        os.truncate(node.run.allocations / "a" / "allocation.json", 0)
        assert cli.dispatch([*words, "--strict"]) == 1
        capsys.readouterr()
        config.write_text("[node]\nnam = 1\n")
        assert cli.dispatch([*words, "--format", "json"]) == 1
        rows = json.loads(capsys.readouterr().out)["rows"]
        (bad,) = [row for row in rows if row["check"] == "configuration"]
        assert bad["state"] == "problem" and "nam is not a known key" in bad["found"]
    assert cli.main(["doctor", "--timeout", "0"]) == 2
    monkeypatch.delenv("POOLMETER_SIM_MACHINE")
    assert cli.main(["doctor", "--simulate", "--data", str(tmp_path)]) == 2


def test_hostile_words_stay_on_their_line() -> None:
    text = as_text([problem("a\n\x1b[2J", "b\u202e\n", "c\x07")], colour=True, everything=False)
    assert len(text.splitlines()) == 3 and "\x1b[2J" not in text and "\x07" not in text and "\u202e" not in text
