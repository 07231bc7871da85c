"""The collector with its books in either place: brought up at its start, written through its API, read by the commands."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from books_decisions import decision
from books_places import Places

from poolmeter.books.models import REVISION_TABLE
from poolmeter.books.sqlite import Sqlite
from poolmeter.books.writer import Books
from poolmeter.clock import SystemClock
from poolmeter.model.plain import to_plain
from poolmeter.places import CollectorData

GOLDEN = Path(__file__).parent / "golden" / "version-1.sql"
WAIT_S = 30.0


def start(data: Path, config: Path, *more: str) -> "subprocess.Popen[bytes]":
    words = [
        "collector",
        "--port",
        "0",
        "--nodes",
        "",
        "--data",
        str(data),
        "--config",
        str(config),
        "--ready-file",
        str(data / "ready"),
        *more,
    ]
    return subprocess.Popen([sys.executable, "-m", "poolmeter.cli", *words], stderr=(data / "log").open("ab"), cwd="/", env={**os.environ})


@contextlib.contextmanager
def collector(data: Path, config: Path, *more: str) -> Iterator[str]:
    """Its URL, while it runs."""
    process = start(data, config, *more)
    try:
        deadline = time.monotonic() + WAIT_S
        while not (data / "ready").exists():
            assert process.poll() is None and time.monotonic() < deadline, (data / "log").read_text()
            time.sleep(0.02)
        yield json.loads((data / "ready").read_text())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0, (data / "log").read_text()
    finally:
        process.kill()
        process.wait()


def ask(url: str, data: Path, body: object = None) -> Any:
    token = (data / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


def test_decisions_go_through_the_api_to_the_configured_books(places: Places, tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "config.toml"
    data.mkdir()
    place = CollectorData(data).books if places.kind is Sqlite else places.new()
    config.write_text("" if places.kind is Sqlite else f'[collector]\nbooks = "{place}"\n')
    proposal = decision(1, expires_us=SystemClock().wall_us() + 3_600_000_000)
    with collector(data, config) as url:
        ask(f"{url}/v1/decisions", data, {"decisions": [to_plain(proposal)], "by": "ann"})
        ask(f"{url}/v1/decisions/d1/approve", data, {"by": "bob", "reason": "looks right"})
        assert [row["state"] for row in ask(f"{url}/v1/decisions", data)["rows"]] == ["approved"]
    assert CollectorData(data).books.exists() == (places.kind is Sqlite)
    with Books(place) as books:
        assert [(change.by, change.after["state"]) for change in books.changes()] == [("ann", "proposed"), ("bob", "approved")]


def test_a_collector_takes_older_books_over_and_leaves_newer_ones(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "config.toml"
    data.mkdir()
    config.write_text("")
    path = CollectorData(data).books
    with sqlite3.connect(path) as connection:
        connection.executescript(GOLDEN.read_text())
    connection.close()
    # A database that is configured and not there does not matter to a collector that was told to keep its books to itself.
    config.write_text('[collector]\nbooks = "postgresql:///none?host=/nowhere/at/all"\n')
    with collector(data, config, "--local-books") as url:
        assert len(ask(f"{url}/v1/decisions", data)["rows"]) == 5
    assert f"books {path} brought from revision 0001 to 0003" in (data / "log").read_text()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {REVISION_TABLE} SET version_num = '0009'")
    connection.close()
    config.write_text("")
    before = path.read_bytes()
    process = start(data, config)
    assert process.wait(timeout=WAIT_S) == 2
    assert "have revision 0009, expected 0003 or older: a newer poolmeter made them" in (data / "log").read_text()
    assert path.read_bytes() == before


def test_a_collector_without_its_database_says_so(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "config.toml"
    data.mkdir()
    config.write_text('[collector]\nbooks = "postgresql://nobody@/none?host=/nowhere/at/all"\n')
    pytest.importorskip("psycopg")
    process = start(data, config)
    assert process.wait(timeout=WAIT_S) == 3
    assert "books postgresql://nobody@/none?host=/nowhere/at/all cannot be used" in (data / "log").read_text()
