"""The devices of a node, read by a short-lived child process: a driver call that hangs must not hang the enforcer."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from poolmeter.errors import Unavailable

_RETRY_S = 5.0  # callers in a row must not each wait for a driver that hangs
_PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class Device:
    """One card. `problem` says why nothing can be promised of it; None: nothing is wrong."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    problem: str | None = None


class DeviceInventory(Protocol):
    """Where the enforcer learns the node's devices from."""

    def devices(self) -> tuple[Device, ...]:
        """The devices, by index. Raises Unavailable when they cannot be read."""
        ...


class NvmlInventory:
    """The devices that NVML lists, remembered for `max_age_s` seconds.

    `environment` is added to the child's: a simulated node passes the library path and machine of its simulated driver.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, timeout_s: float = 20.0, max_age_s: float = 30.0) -> None:
        self._environment = dict(environment or {})
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._known: tuple[Device, ...] | Unavailable = ()
        self._until = 0.0
        self._lock = threading.Lock()

    def devices(self) -> tuple[Device, ...]:
        """The devices, by index. A failed reading is told, never bridged by an old one, and tried again after a while."""
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._known = parse(self._ask())
                    self._until = time.monotonic() + self._max_age_s
                except Unavailable as error:
                    self._known = error
                    self._until = time.monotonic() + min(_RETRY_S, self._max_age_s)
            known = self._known
        if isinstance(known, Unavailable):
            raise Unavailable(str(known))
        return known

    def _ask(self) -> str:
        # The file alone is run, not the package: nothing but nvidia-ml-py is imported.
        try:
            result = subprocess.run(
                [sys.executable, str(_PROBE)],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"NVML did not list the devices within {self._timeout_s:g} s, expected an answer") from None
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
            raise Unavailable(f"NVML cannot list the devices of this node: {last:.200}")
        return result.stdout


def parse(text: str) -> tuple[Device, ...]:
    """The devices in what the probe printed. Raises Unavailable for anything else."""
    try:
        rows = json.loads(text)
        devices = tuple(Device(row["uuid"], row["index"], row["model"], row["memory_bytes"], row.get("problem")) for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"the device probe printed {text!r:.80} ({error}), expected a JSON list of devices") from None
    return tuple(sorted(devices, key=lambda device: device.index))
