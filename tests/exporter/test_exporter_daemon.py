"""`poolmeter exporter` as a program: started, asked, stopped, refused."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from poolmeter import arrow
from poolmeter.exporter.spool import Spool


def start(root: Path, *options: str, environment: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
    """A daemon that serves, and its URL."""
    ready = root / "ready"
    words = [
        "exporter",
        "--name",
        "n1",
        "--run",
        str(root / "run"),
        "--data",
        str(root / "data"),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "poolmeter.cli", *words, *options],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline, "it does not serve"
        time.sleep(0.02)
    said = json.loads(ready.read_text())
    assert said["pid"] == child.pid
    return child, said["url"]


def refused(*options: str) -> tuple[int, str]:
    """Status and stderr of a start that must fail."""
    ended = subprocess.run(
        [sys.executable, "-m", "poolmeter.cli", "exporter", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "" and ended.stderr.count("\n") == 1, ended.stderr
    return ended.returncode, ended.stderr


@pytest.fixture
def no_card(tmp_path: Path) -> dict[str, str]:
    """An environment in which NVML is a file that is no library, so that no test depends on a real card."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    return {"LD_LIBRARY_PATH": str(folder)}


def test_without_a_card_it_serves_and_says_so(tmp_path: Path, no_card: dict[str, str]) -> None:
    child, url = start(tmp_path, environment=no_card)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/readyz", timeout=10)
    assert caught.value.code == 503 and json.loads(caught.value.read())["failing"] == ["nvml"]
    body = urllib.request.urlopen(f"{url}/metrics", timeout=10).read()
    assert b'poolmeter_collect_success{source="nvml"} 0.0' in body and b"poolmeter_pool_devices" not in body
    assert len(arrow.from_bytes(urllib.request.urlopen(f"{url}/v1/usage", timeout=10).read())) == 0
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0 and url in out and "Traceback" not in err


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = refused("--port", str(port), "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"))
    assert code == 3 and f"127.0.0.1:{port}" in said and not (tmp_path / "data").exists()


def test_a_spool_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with sqlite3.connect(tmp_path / "data" / "spool.sqlite") as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("INSERT INTO meta VALUES ('schema', 'poolmeter.spool/2')")
    code, said = refused("--port", "0", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"))
    assert code == 2 and "poolmeter.spool/2" in said and "poolmeter.spool/1" in said


def test_a_ledger_of_another_version(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "data" / "spool.sqlite", "n1", ())
    spool.commit([], '{"version": 9}')
    spool.close()
    code, said = refused("--port", "0", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"))
    assert code == 2 and "ledger has version 9, expected 1" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "70000"), "--port is 70000"),
        (("--name", "a b"), "--name is 'a b'"),
        (("--linger", "-1"), "--linger is -1"),
        (("--frobnicate",), "--frobnicate"),
        (("--compat", "nvitop"), "--compat is 'nvitop', expected dcgm or hami"),
        (("--otlp-endpoint", "otel:4317"), "--otlp-endpoint is 'otel:4317'"),
        (("--web.config.file", "/nowhere/web.yml"), "/nowhere/web.yml cannot be read"),
    ],
)
def test_bad_flags(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    code, text = refused("--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"), *options)
    assert code == 2 and said in text and not (tmp_path / "data").exists()


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'[exporter]\ntoken_file = "{tmp_path}/absent"\n')
    code, said = refused("--config", str(tmp_path / "c.toml"), "--data", str(tmp_path / "data"))
    assert code == 2 and "absent" in said


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, not a folder")
    code, said = refused("--port", "0", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"))
    assert code == 3 and "cannot be opened" in said


def once(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["exporter", "--once", *options, "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run")]
    return subprocess.run([sys.executable, "-m", "poolmeter.cli", *words], capture_output=True, text=True, timeout=60, check=False)


def test_once_without_a_card(tmp_path: Path, no_card: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", no_card["LD_LIBRARY_PATH"])
    ended = once(tmp_path, "--format", "json")
    assert ended.returncode == 1 and "sources failed: nvml (NVML does not answer" in ended.stderr
    assert json.loads(ended.stdout)["devices"] == [] and not (tmp_path / "data").exists()
    ended = once(tmp_path)
    assert ended.returncode == 1 and 'poolmeter_collect_success{source="nvml"} 0.0' in ended.stdout


def test_once_is_a_page(tmp_path: Path) -> None:
    """One page of text on stdout, with the names that were asked for, and 0."""
    ended = once(tmp_path, "--simulate", "--compat", "dcgm")
    assert ended.returncode == 0, ended.stderr
    names = {family.name for family in text_string_to_metric_families(ended.stdout)}
    assert {"poolmeter_device_up", "poolmeter_device_busy_seconds", "DCGM_FI_DEV_GPU_UTIL"} <= names
    ended = once(tmp_path, "--simulate", "--format", "csv", "--output", str(tmp_path / "snapshot.csv"))
    assert ended.returncode == 0 and ended.stdout == "" and (tmp_path / "snapshot.csv").read_text().startswith("index,uuid,model")
