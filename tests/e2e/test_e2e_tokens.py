"""Who may write to a collector that was started by hand: commands and enforcers find the token that it asks for, strangers do not."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolmeter.books.writer import Books
from poolmeter.enforcer.decisions import fetch_url, parse_decisions
from poolmeter.errors import Unavailable
from poolmeter.model.decision import Decision
from poolmeter.model.units import HOUR_US
from poolmeter.places import CollectorData
from poolmeter.tokens import client_token

NOW_US = time.time_ns() // 1000
DECISION = Decision("d1", "n1", "a1", "GPU-1", 1, 0, NOW_US, NOW_US + HOUR_US, "rule", "why", "00", memory_bytes=5)


def poolmeter(*words: str, config: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "poolmeter.cli", *words, "--config", str(config)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLMETER_")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@contextlib.contextmanager
def collector(data: Path, config: Path) -> Iterator[tuple[str, Path]]:
    """A collector of its own: its URL and its log."""
    ready, log = data / "ready", data / "log"
    words = ["collector", "--nodes", "", "--data", str(data), "--config", str(config), "--ready-file", str(ready)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLMETER_")}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "poolmeter.cli", *words], env=environment, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield json.loads(ready.read_text())["url"], log
    finally:
        process.terminate()
        process.wait(20)


def status_of(url: str, token: str | None, body: object = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("exporters_have_one", [False, True])
@pytest.mark.parametrize("clients_have_one", [False, True])
def test_commands_and_enforcers_find_the_token(tmp_path: Path, exporters_have_one: bool, clients_have_one: bool) -> None:
    data, config = tmp_path / "data", tmp_path / "config.toml"
    data.mkdir()
    (tmp_path / "exporters").write_text("of-the-exporters\n")
    (tmp_path / "clients").write_text("of-the-clients\n")
    with Books(CollectorData(data).books) as books:
        books.add_decisions([DECISION], "test")
    text = "[collector]\nport = 0\n"
    text += f'token_file = "{tmp_path}/exporters"\n' if exporters_have_one else ""
    text += f'api_token_file = "{tmp_path}/clients"\n' if clients_have_one else ""
    config.write_text(text)
    with collector(data, config) as (url, log):
        config.write_text(text.replace("port = 0", f"port = {url.rsplit(':', 1)[1]}"))
        decisions = f"{url}/v1/decisions"
        # A stranger: reads unless clients need a token, never writes; the exporters' token is not the clients'.
        assert status_of(decisions, None) == (401 if clients_have_one else 200)
        for wrong in (None, "wrong", "of-the-exporters"):
            assert status_of(f"{decisions}/d1/approve", wrong, {"by": "stranger"}) == 401
        # The collector makes a token only where none is configured, and says where.
        assert (data / "token").exists() != clients_have_one
        assert (f"writing needs the token in {data}/token" in log.read_text()) != clients_have_one
        assert clients_have_one or (data / "token").stat().st_mode & 0o777 == 0o600
        # The command finds it without being told.
        wait_for_store(url)
        done = poolmeter("approve", "d1", "--data", str(data), "--format", "json", config=config)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert json.loads(done.stdout)["rows"][0]["state"] == "approved"
        # So does the enforcer, by the same rule.
        token = client_token(tmp_path / "clients" if clients_have_one else None, data)
        assert token is not None
        assert [decision.id for decision in parse_decisions(fetch_url(f"{decisions}?state=approved&node=n1", token))[0]] == ["d1"]
        if clients_have_one:
            for sent, said in ((None, "asks for a token and none was sent"), ("wrong", "does not take the token that was sent")):
                with pytest.raises(Unavailable, match=f"gave no decisions: it {said}, expected the collector's own"):
                    fetch_url(decisions, sent)


def wait_for_store(url: str) -> None:
    """Until something is published, by which commands know whose collector it is."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.05)


def test_a_user_without_the_token_is_told_where_it_is(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "config.toml"
    data.mkdir()
    config.write_text("[collector]\nport = 0\n")
    with Books(CollectorData(data).books) as books:
        books.add_decisions([DECISION], "test")
    with collector(data, config) as (url, _):
        config.write_text(f"[collector]\nport = {url.rsplit(':', 1)[1]}\n")
        wait_for_store(url)
        (data / "token").rename(tmp_path / "kept")
        done = poolmeter("approve", "d1", "--data", str(data), config=config)
        assert done.returncode == 3 and done.stderr.count("\n") == 1
        assert "the request has no token, expected Authorization: Bearer with the token of collector.api_token_file" in done.stderr
        assert done.stderr.rstrip().endswith("else of the file token in the collector's data folder")


def test_an_enforcer_with_a_token_file_that_is_none_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[collector]\napi_token_file = "{tmp_path}/absent"\n')
    for words in ((), ("--token-file", str(tmp_path / "other"))):
        done = poolmeter("enforcer", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"), *words, config=config)
        name = "other" if words else "absent"
        assert done.returncode == 2 and f"token file {tmp_path}/{name} cannot be read" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
