"""`poolmeter up --simulate` and `poolmeter demo`: the whole loop by its command lines."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest


def poolmeter(*words: str) -> list[str]:
    return [sys.executable, "-m", "poolmeter.cli", *words]


def ask(*words: str) -> dict[str, Any]:
    done = subprocess.run(poolmeter(*words, "--format", "json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout, parse_float=Decimal)
    return result


def config(folder: Path) -> Path:
    """A configuration with free ports, so that tests do not meet each other."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            ports.append(server.getsockname()[1])
    path = folder / "config.toml"
    path.write_text(f"[collector]\nport = {ports[0]}\n[dashboard]\nport = {ports[1]}\n")
    return path


@contextlib.contextmanager
def up(data: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    words = poolmeter("up", "--simulate", "--data", str(data), "--format", "json", "--config", str(config(data.parent)), *flags)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        poolmeter("demo", "--seconds", "20", "--format", "json", "--data", str(data)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout, parse_float=Decimal)
    result["data"] = str(data)
    return result


@pytest.mark.timeout(400)
def test_the_demo_bills_what_the_simulator_knows(demo: dict[str, Any]) -> None:
    rows = {row["tenant"]: row for row in demo["rows"]}
    assert set(rows) == {"vision", "research", "search", "speech", "unhooked"}
    for tenant in ("vision", "search", "speech"):
        assert rows[tenant]["billed_device_seconds"] == pytest.approx(rows[tenant]["true_device_seconds"], rel=Decimal("0.01")), tenant
        assert rows[tenant]["true_device_seconds"] > 0
    assert rows["research"]["billed_device_seconds"] == rows["research"]["true_device_seconds"] == 0
    assert "billed_device_seconds" not in rows["unhooked"] and rows["unhooked"]["true_device_seconds"] > 1


def test_the_demo_finds_what_it_hides(demo: dict[str, Any]) -> None:
    found = demo["found"]
    assert found["unaccounted"] == 1
    assert found["denied_allocations"] >= 1
    assert found["short_lived"] == 1
    assert found["resized"] >= 1


def test_the_demo_adds_up(demo: dict[str, Any]) -> None:
    totals = demo["totals"]
    parts = sum(totals[f"{part}_us"] for part in ("allocated", "reserved_unused", "unallocated", "suspended", "down"))
    assert parts == totals["capacity_us"]
    money = {key: Decimal(totals[key]) for key in ("cost", "tenants", "idle", "unallocated", "overhead")}
    assert money["tenants"] + money["idle"] + money["unallocated"] + money["overhead"] == money["cost"]
    assert sum(Decimal(row["cost"]) for row in demo["rows"] if "cost" in row) == money["tenants"]


def test_the_demos_json_is_what_its_schema_says(demo: dict[str, Any]) -> None:
    schema = json.loads((Path(__file__).resolve().parents[2] / "docs/reference/demo.schema.json").read_text())
    jsonschema.validate({key: value for key, value in demo.items() if key != "data"}, schema)


def test_the_demos_store_answers_the_same_afterwards(demo: dict[str, Any]) -> None:
    bill = ask("chargeback", "--data", demo["data"], "--from", demo["from"], "--to", demo["to"])
    assert bill["totals"]["cost"] == demo["totals"]["cost"]
    usage = ask("usage", "--data", demo["data"], "--from", demo["from"], "--to", demo["to"])
    assert usage["totals"]["capacity_us"] == demo["totals"]["capacity_us"]
    history = ask("history", "--data", demo["data"])
    assert any(row["state"] == "applied" for row in history["rows"])


def test_a_second_demo_does_not_mix_its_bill_with_the_first(demo: dict[str, Any]) -> None:
    words = poolmeter("demo", "--seconds", "10", "--data", demo["data"])
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "holds a store already" in done.stderr


@pytest.mark.timeout(400)
def test_up_serves_runs_resizes_and_stops(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data) as (process, state):
        jsonschema.validate(state, json.loads((Path(__file__).resolve().parents[2] / "docs/reference/up.schema.json").read_text()))
        assert json.loads((data / "up.json").read_text()) == state
        for name in ("collector", "dashboard", "exporter:node-a", "exporter:node-b"):
            with urllib.request.urlopen(f"{state['urls'][name].rstrip('/')}/healthz", timeout=20) as answer:
                assert answer.status == 200
        with urllib.request.urlopen(f"{state['urls']['collector'].rstrip('/')}/v1/reports/usage", timeout=20) as answer:
            assert json.load(answer)["schema"] == "poolmeter.usage/1"
        # Nobody but the collector acknowledges.
        epoch = urllib.request.urlopen(f"{state['urls']['exporter:node-a'].rstrip('/')}/v1/usage", timeout=20).headers["X-Poolmeter-Epoch"]
        body = json.dumps({"consumer": "collector", "epoch": epoch, "seq": 0}).encode()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{state['urls']['exporter:node-a'].rstrip('/')}/v1/ack", body, timeout=20)
        request = urllib.request.Request(
            f"{state['urls']['collector'].rstrip('/')}/v1/decisions", b'{"decisions": [], "by": "me"}', {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=20)
        assert (data / "token").stat().st_mode & 0o077 == 0
        # A program on a share of the pool, its limit changed while it runs.
        run = subprocess.Popen(
            [
                *poolmeter(
                    "run", "--data", str(data), "--tenant", "guest", "--compute", "10", "--memory", "4G", "--id-file", str(tmp_path / "id")
                ),
                "--",
                *poolmeter("simulate", "tenant", "--kernel-us", "500", "--seconds", "6", "--allocate", "1G"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 30
        while not (tmp_path / "id").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        allocation = (tmp_path / "id").read_text().strip()
        assert allocation in {row["allocation"] for row in ask("allocation", "list", "--data", str(data))["rows"]}
        resized = subprocess.run(
            poolmeter("allocation", "resize", allocation, "--memory", "2G", "--data", str(data)), capture_output=True, text=True
        )
        assert resized.returncode == 0, resized.stderr
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0 and json.loads(out.splitlines()[-1])["device_seconds"] > 0
        assert allocation not in {row["allocation"] for row in ask("allocation", "list", "--data", str(data))["rows"]}
        # A daemon that dies is started again, where it was.
        os.kill(state["pids"]["collector"], signal.SIGKILL)
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{state['urls']['collector'].rstrip('/')}/healthz", timeout=5):
                break
            time.sleep(0.2)
        else:
            pytest.fail("the collector was not started again")
        second = subprocess.run(poolmeter("up", "--simulate", "--data", str(data)), capture_output=True, text=True, timeout=60)
        assert second.returncode == 3 and second.stderr.count("\n") == 1, second.stderr
        process.terminate()
        process.wait(90)
        assert process.returncode == 0
    rows = {row["tenant"]: row for row in ask("usage", "--data", str(data), "--from", "1d")["rows"]}
    assert {"vision", "research", "search", "speech", "guest"} <= set(rows)
    for pid in state["pids"].values():
        assert not Path(f"/proc/{pid}").exists()


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        path = tmp_path / "config.toml"
        path.write_text(f"[collector]\nport = {port}\n")
        words = poolmeter("up", "--simulate", "--no-dashboard", "--data", str(tmp_path / "data"), "--config", str(path))
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("poolmeter: ") and f"port {port}" in last, done.stderr
    assert not (tmp_path / "data" / "up.json").exists()
    assert done.stdout == ""


@pytest.mark.parametrize("seconds", ["9", "0", "-1", "nan", "x"])
def test_a_demo_too_short_is_refused(seconds: str) -> None:
    done = subprocess.run(poolmeter("demo", "--seconds", seconds), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--seconds" in done.stderr
