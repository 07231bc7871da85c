"""A real collector process for tests, and what its store holds."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from collector_fakes import FakeExporter

from poolmeter.collector.catalog import open_catalog
from poolmeter.errors import Unavailable

SEQUENCES = (
    "SELECT node, sequence FROM device_minutes UNION ALL SELECT node, sequence FROM slice_minutes "
    "UNION ALL SELECT node, sequence FROM process_minutes UNION ALL SELECT node, sequence FROM event_log"
)


class Daemon:
    """A collector process on a data folder."""

    def __init__(self, data: Path, nodes: str | None, *more: str) -> None:
        """`nodes` None: those of the configuration."""
        self.address = ""
        self.data, self.ready = data, data / "collector.ready"
        self.ready.unlink(missing_ok=True)
        words = ["collector", "--port", "0", "--interval", "0.2", "--data", str(data), "--ready-file", str(self.ready)]
        words += [] if nodes is None else ["--nodes", nodes]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLMETER_")}
        self.log = (data / "collector.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "poolmeter.cli", *words, *more], env=environment, stderr=self.log, stdout=self.log
        )

    async def url(self) -> str:
        await until(lambda: self.ready.exists() or self.process.poll() is not None, 90)
        assert self.process.poll() is None, (self.data / "collector.log").read_text()
        found = json.loads(self.ready.read_text())
        assert found["pid"] == self.process.pid
        self.address = str(found["url"])
        return self.address

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    async def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, 30)
        self.log.close()
        return code


async def until(done: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.01)


def stored(data: Path) -> dict[str, list[int]]:
    try:
        with open_catalog(data / "store") as connection:
            rows = connection.execute(f"SELECT node, list(sequence ORDER BY sequence) FROM ({SEQUENCES}) GROUP BY node").fetchall()
    except Unavailable:
        return {}
    return dict(rows)


@contextlib.asynccontextmanager
async def exporters(*names: str) -> AsyncIterator[list[FakeExporter]]:
    fakes = [await FakeExporter(name).start() for name in names]
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()


async def fetch(url: str, token_file: Path | None = None) -> dict[str, Any]:
    headers = {} if token_file is None else {"Authorization": f"Bearer {token_file.read_text().strip()}"}

    def get() -> dict[str, Any]:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    return await asyncio.to_thread(get)


async def refused(data: Path, *words: str) -> tuple[int, str]:
    given = ["collector", *([] if "--data" in words else ["--data", str(data)]), *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POOLMETER_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "poolmeter.cli", *given, env=environment, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()
