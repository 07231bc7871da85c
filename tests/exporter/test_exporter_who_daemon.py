"""Attribution in the running exporter: on a simulated machine, a program without the hook, and a kubelet that goes away."""

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from attribution_fakes import FakeKubelet, pod, short_folder, until

from poolmeter.simulator.machine import Machine

pytestmark = pytest.mark.timeout(120)


def get(url: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def end(program: subprocess.Popen[bytes]) -> None:
    """Kill a program and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def test_a_stranger_is_told_and_a_kubelet_that_goes_is_noticed(tmp_path: Path, machine: Machine) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    with short_folder() as sockets, contextlib.ExitStack() as stack:
        kubelet = FakeKubelet(sockets / "kubelet.sock")
        kubelet.pods = [pod("ml", "idle", "main", f"{machine.uuid(1)}::0")]
        kubelet.start()
        stack.callback(kubelet.stop)
        config = tmp_path / "config.toml"
        config.write_text(
            f'[attribution]\ninterval_s = 0.2\nkubelet_socket = "{kubelet.path}"\nkubernetes_logs = "{tmp_path}"\n'
            f'users = ["{user}=operations"]\ndocker = "off"\npodman = "off"\ncontainerd = "off"\n'
        )
        ready = tmp_path / "ready"
        words = ["exporter", "--simulate", "--config", str(config), "--run", str(tmp_path / "run"), "--data", str(tmp_path / "data")]
        exporter = subprocess.Popen(
            [sys.executable, "-m", "poolmeter.cli", *words, "--port", "0", "--ready-file", str(ready)],
            env={**os.environ, "POOLMETER_SIM_MACHINE": str(tmp_path / "machine.sim")},
        )
        stack.callback(exporter.wait)
        stack.callback(exporter.kill)
        until(lambda: ready.exists() or exporter.poll() is not None, 60)
        url = json.loads(ready.read_text())["url"]
        stranger = subprocess.Popen(
            [sys.executable, "-m", "poolmeter.cli", "simulate", "tenant", "--seconds", "60", "--kernel-us", "2000"],
            env=machine.environment() | {"CUDA_VISIBLE_DEVICES": machine.uuid(0)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        stack.callback(stranger.wait)
        stack.callback(end, stranger)

        def told() -> dict[str, Any] | None:
            snapshot = json.loads(get(f"{url}/v1/snapshot")[1])
            return {**snapshot, "found": snapshot["attributions"][0]} if snapshot["attributions"] else None

        until(lambda: (said := told()) is not None and any(item.get("pod") == "idle" for item in said["holders"]), 30)
        until(lambda: (said := told()) is not None and "framework" in said["found"], 10)  # a thread reads that
        said = told()
        assert said is not None and said["found"]["framework"] == "cuda"
        # In a container a test's user id says nothing, and no claim is made of it.
        if any(claim["source"] == "user" for claim in said["found"].get("claims", [])):
            assert said["found"]["tenant"] == "operations" and said["found"]["source"] == "user"
            until(lambda: 'tenant="operations"' in get(f"{url}/metrics")[1])
        assert 'poolmeter_collect_success{source="kubernetes"} 1.0' in get(f"{url}/metrics")[1]
        kubelet.stop()
        until(lambda: get(f"{url}/readyz")[0] == 503)
        status, body = get(f"{url}/readyz")
        assert status == 503 and json.loads(body)["failing"] == ["kubernetes"] and "kubelet.sock" in body
        status, page = get(f"{url}/metrics")
        assert status == 200 and 'poolmeter_collect_success{source="kubernetes"} 0.0' in page
        assert 'pod="idle"' not in page  # nobody says any more that it was given the card
        kubelet.start()
        until(lambda: get(f"{url}/readyz")[0] == 200, 20)
        # A source that is turned off asks nobody any more, and its failing is no failing.
        kubelet.stop()
        until(lambda: get(f"{url}/readyz")[0] == 503)
        config.write_text(config.read_text() + 'kubernetes = "off"\n')
        exporter.send_signal(signal.SIGHUP)
        until(lambda: get(f"{url}/readyz")[0] == 200, 20)
        assert 'source="kubernetes"' not in get(f"{url}/metrics")[1]
        stranger.kill()
        stranger.wait()
        until(
            lambda: (
                f'"pid": {stranger.pid}' not in get(f"{url}/v1/snapshot")[1] and f'"pid":{stranger.pid}' not in get(f"{url}/v1/snapshot")[1]
            )
        )
        exporter.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert exporter.wait(30) == 0 and time.monotonic() - began < 10
