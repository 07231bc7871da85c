"""A real Prometheus for tests (Debian package prometheus)."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 30.0
PROMETHEUS = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)")


def until(condition: Callable[[], Any], what: str) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = None
        with contextlib.suppress(OSError):
            found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def ask(url: str, path: str, **parameters: str) -> Any:
    """What its API answers."""
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
        return json.load(response)["data"]


@contextlib.contextmanager
def running(folder: Path, jobs: list[dict[str, Any]]) -> Iterator[str]:
    """Its URL, while it scrapes `jobs`."""
    (folder / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={address}"], stdout=log, stderr=log, cwd=folder)
    try:
        until(lambda: process.poll() is not None or ask(f"http://{address}", "/api/v1/status/buildinfo"), "Prometheus answers")
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)
