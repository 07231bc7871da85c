"""`poolmeter dashboard` as a user has it: a process, a port, a signal; and the pages in a real Chromium."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--headless",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
]
WAIT_S = 60


def start(data: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HOME": str(data)}
    command = [sys.executable, "-m", "poolmeter.cli", "dashboard", "--data", str(data), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=data)


@pytest.fixture
def url(data: Path, tmp_path: Path) -> Iterator[str]:
    """A running dashboard; on SIGTERM it must end cleanly and soon."""
    ready = tmp_path / "ready.json"
    process = start(data, "--port", "0", "--ready-file", str(ready))
    try:
        deadline = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the dashboard wrote no ready file"
            time.sleep(0.05)
        yield str(json.loads(ready.read_text())["url"])
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=WAIT_S)[0]
        assert process.returncode == 0, output
        assert "Traceback" not in output
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium at /usr/bin/chromium")
def test_the_pages_in_a_browser(url: str, data: Path) -> None:
    from playwright.sync_api import sync_playwright

    bill = subprocess.run(
        [sys.executable, "-m", "poolmeter.cli", "chargeback", "--from", "this-month", "--data", str(data), "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    totals = json.loads(bill.stdout)["totals"]
    asked: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(WAIT_S * 1000)
            page.on("request", lambda request: asked.add(urlsplit(request.url).hostname or request.url.split(":")[0]))
            page.goto(url)
            busy = page.get_by_test_id("stMetric").filter(has_text="Busy")
            busy.wait_for()
            assert "67.5 %" in busy.inner_text()
            page.locator("[data-testid=stVegaLiteChart] canvas, [data-testid=stVegaLiteChart] svg").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.get_by_role("link", name="Chargeback").click()
            cost = page.get_by_test_id("stMetric").filter(has_text="Pool cost")
            cost.wait_for()
            assert f"{totals['cost']} {totals['currency']}" in cost.inner_text()
            with page.expect_download() as download:
                page.get_by_role("button", name="Download CSV").click()
            assert download.value.path().read_text().startswith("tenant,line,")
        finally:
            browser.close()
    # Nothing but the dashboard itself was asked for anything.
    assert asked <= {urlsplit(url).hostname, "data", "blob"}


def test_serves_its_health_and_ends_on_sigterm(url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=WAIT_S)
    connection.request("GET", "/_stcore/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tmp_path, "--port", str(port))
        output = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 3
    assert output == f"poolmeter: dashboard cannot listen on 127.0.0.1:{port}: Address already in use; expected a port that is free\n"


def test_a_port_that_cannot_be(tmp_path: Path) -> None:
    process = start(tmp_path, "--port", "70000")
    output = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 2 and output == "poolmeter: --port is 70000, expected 0 to 65535\n"
